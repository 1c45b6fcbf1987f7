"""Recorded requests in memory: which blocks each one began with.

Blocks are numbered from 0 in the order in which they first appear. Equal numbers are equal
prefixes, as equal block hashes are in the server.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..core import BlockKey
from ..errors import KVTierError

SPREAD = 0x9E3779B97F4A7C15
"""An odd factor that spreads numbers over 64 bits, one to one."""
MASK = (1 << 64) - 1


class TraceError(KVTierError):
    """A trace can't be read. The text names the file, the line and the format."""


@dataclass(slots=True)
class Trace:
    """Requests of one file, or of several recordings, of which `file` is the first.

    It takes 4 bytes for each block of each request, and 60 a block.
    """

    file: Path
    format: str = ""
    block_tokens: int = 0
    block_bytes: int | None = None
    """Bytes of a block, where the file tells."""
    tokens: int = 0
    """Prompt tokens in all, those outside complete blocks included."""
    keys: list[BlockKey] = field(default_factory=list)
    """A key for each distinct block, by number."""
    _blocks: array[int] = field(default_factory=lambda: array("I"))
    _ends: array[int] = field(default_factory=lambda: array("Q"))
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def add(self, identities: Sequence[Hashable], tokens: int) -> None:
        """Append a request of `tokens` prompt tokens; equal identities are equal prefixes."""
        numbers = self._numbers
        for identity in identities:
            self._blocks.append(numbers.setdefault(identity, len(numbers)))
        self._ends.append(len(self._blocks))
        self.tokens += tokens

    def finish(self) -> None:
        """Make the keys, and let go of what only `add` needs."""
        distinct = len(self._numbers)
        self._numbers = {}
        # Not before: the keys take the memory that the identities gave back.
        self.keys = [(number * SPREAD & MASK).to_bytes(8, "little") for number in range(distinct)]

    def requests(self) -> Iterator[Sequence[int]]:
        """Yield the numbers of each request's complete blocks, in order."""
        begin = 0
        for end in self._ends:
            yield self._blocks[begin:end]
            begin = end

    @property
    def distinct(self) -> int:
        """Different blocks."""
        return len(self.keys)

    @property
    def accesses(self) -> int:
        """Complete blocks of all requests together."""
        return len(self._blocks)

    def __len__(self) -> int:
        return len(self._ends)
