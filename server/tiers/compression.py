"""How payloads are stored and come back: raw, or shuffled and compressed (lossless).

Compressing needs the extra `compression` (`shuffle_zstd.py`), which is imported when it is first
wanted. Records of both kinds lie side by side. All of this runs in a tier's threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..codec import Codec, Header, seal, verify
from ..core import BlockKey, ReadOutcome
from ..errors import KVTierError

if TYPE_CHECKING:
    from .base import Space
    from .shuffle_zstd import ShuffleZstd

log = logging.getLogger(__name__)

LEAST_SAVED = 20
"""A payload that does not get smaller by 1 ÷ this is stored raw."""
EXTRA = "pip install 'kvtier[compression]'"


class CodecMissing(KVTierError):
    """What compresses is not installed. The text says what is missing, and the fix."""


class Coded(NamedTuple):
    """What coding one payload took; all zero where it was neither compressed nor tried."""

    raw_bytes: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0
    """Of the thread."""


class Stored(NamedTuple):
    """A payload as it is to be stored."""

    header: Header
    payload: memoryview
    """Without padding. Page-aligned; the thread's own until it codes another one."""
    padded: memoryview
    """The same and zeros up to a whole page, or the bare payload where that is stored raw."""
    coded: Coded


def require() -> None:
    """Raise CodecMissing unless payloads can be compressed here."""
    _tools()


class Coder:
    """What the threads of one store code with."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._said = False

    def encode(
        self, space: Space, key: BlockKey, parent: BlockKey, payload: memoryview, codec: Codec
    ) -> Stored:
        """Return a payload, compressed if `codec` says so and that makes it small enough."""
        size, element_bytes = len(payload), space.element_bytes
        frame, coded = None, Coded()
        if codec is not Codec.RAW and not size % element_bytes:
            began = time.perf_counter()
            frame = self._thread().compress(payload, element_bytes, size - size // LEAST_SAVED)
            seconds = time.perf_counter() - began
            coded = Coded(size, len(frame.stored) if frame else size, seconds)
        if frame is None:
            return Stored(seal(space.raw, key, parent, payload), payload, payload, coded)
        header = seal(space.raw, key, parent, frame.stored, codec, size, element_bytes)
        return Stored(header, frame.stored, frame.padded, coded)

    def restore(
        self, header: Header, into: memoryview, report: Callable[[Coded], object]
    ) -> ReadOutcome:
        """Verify what lies at the beginning of `into`, and put the raw payload in its place.

        Returns MISSING where what decompresses is not installed: the record is good, and stays.
        Raises RecordError.
        """
        stored = into[: header.stored_bytes]
        verify(header, stored)
        if header.codec is Codec.RAW:
            return ReadOutcome.READ
        began = time.perf_counter()
        try:
            self._thread().decompress(stored, into, header.element_bytes)
        except CodecMissing as missing:
            if not self._said:
                log.warning("compressed records of others are passed over: %s", missing)
                self._said = True
            return ReadOutcome.MISSING
        report(Coded(len(into), len(stored), time.perf_counter() - began))
        return ReadOutcome.READ

    def _thread(self) -> ShuffleZstd:
        tools: ShuffleZstd | None = getattr(self._local, "tools", None)
        if tools is None:
            tools = self._local.tools = _tools()()
        return tools


def _tools() -> type[ShuffleZstd]:
    try:
        from .shuffle_zstd import ShuffleZstd  # noqa: PLC0415 (it needs the extra)
    except ImportError as error:
        raise CodecMissing(f"{error.name} is not installed ({EXTRA})") from None
    return ShuffleZstd
