"""The contract of a lower tier (L2): where records of blocks lie outside the server's memory.

A store of records does I/O and nothing else. It blocks, and is called by the threads of its pool,
several at once. What is in it, what it may hold and what goes is decided on the event loop
(`lower.py`), which posts reads and writes and takes their results. Nothing here waits without
limit where the medium has a way to say so.

Errors of files and connections are mapped once, here: what a call means for one block is an
outcome, what it means for the whole tier is a `TierFault`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..codec import Codec
from ..core import BlockKey, Fault, ReadOutcome, Tier
from ..errors import KVTierError
from .compression import Coded


class TierFault(KVTierError):
    """The tier failed, not one block. The text names the tier and the fix, never a secret."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace as a store needs it."""

    digest: str
    """64 hex digits."""
    payload_bytes: int
    """Bytes of a block: those of a slot."""
    manifest: str
    """The manifest as JSON, for people who look at the store."""
    element_bytes: int = 1
    """Bytes of a number in the payload; 1 where nobody can tell."""

    @property
    def raw(self) -> bytes:
        """Return the digest as a header holds it."""
        return bytes.fromhex(self.digest)


class Held(NamedTuple):
    """A record that a scan came upon."""

    key: BlockKey
    record_bytes: int
    """What it takes of the medium."""
    used: float
    """When it was last read or written, in seconds of the medium's clock."""


class Listing(NamedTuple):
    """All records of one namespace whose keys begin with one byte."""

    namespace: str
    """Empty for what belongs to no namespace; it has no records then."""
    first: int
    """That byte."""
    records: list[Held]
    overhead_bytes: int
    """What holding them takes of the medium beside the records: a directory, for example."""


class Written(NamedTuple):
    """What a write took of the medium."""

    record_bytes: int
    overhead_bytes: int
    """Taken, and not for this record alone: a new directory, for example. Negative if less."""
    coded: Coded = Coded()
    """What compressing took, if the payload was to be compressed."""


def ignore(_: Coded) -> None:
    """Take no note."""


class RecordStore(ABC):
    """One medium that keeps records. All calls block; all but `open` may overlap."""

    tier: Tier
    listed: bool
    """Whether `scan` tells all that there is: nothing else needs to be asked for with `find`."""

    @abstractmethod
    def open(self) -> None:
        """Get ready, or ready again after a fault. Raises TierFault.

        After FULL and READ_ONLY, reads may go on.
        """

    @abstractmethod
    def scan(self) -> Iterator[Listing]:
        """Yield what is there; what did not change since the last whole scan may be left out.

        Cleans up what a crash left behind. Yields nothing where the medium is not this server's
        to list. Raises TierFault.
        """

    @abstractmethod
    def find(self, space: Space, keys: Sequence[BlockKey]) -> int:
        """Return how many of `keys`, from the first on, are there without a gap.

        One round trip to the medium, or one to each node of a cluster. Raises TierFault.
        """

    @abstractmethod
    def read(
        self,
        space: Space,
        key: BlockKey,
        into: memoryview,
        report: Callable[[Coded], object] = ignore,
    ) -> ReadOutcome:
        """Read a block, however it is stored, into `into` (`payload_bytes`, page-aligned).

        It is verified. `report` is called, in this thread, with what decompressing took if there
        was anything to decompress. On another outcome than READ the bytes in `into` mean nothing.
        Raises TierFault.
        """

    @abstractmethod
    def write(
        self,
        space: Space,
        key: BlockKey,
        parent: BlockKey,
        payload: memoryview,
        codec: Codec = Codec.RAW,
    ) -> Written:
        """Write a block; it is there as a whole or not at all. Raises TierFault.

        Writing what is there already replaces it. With a codec, a payload that does not get
        smaller is stored raw all the same. Raises CodecMissing where that is not installed.
        """

    @abstractmethod
    def drop(self, namespace: str, keys: Sequence[BlockKey]) -> None:
        """Remove records; one that is not there counts as removed. Raises TierFault."""

    @abstractmethod
    def wipe(self, namespace: str) -> None:
        """Remove every record of a namespace, whoever wrote it. Raises TierFault."""

    @abstractmethod
    def close(self) -> None:
        """Let go of descriptors and connections. Raises nothing."""
