"""Codec 1: bytes shuffled by the size of an element, then one zstd frame.

Needs the extra `compression`; `compression.py` is the only module that imports this one. A number's
upper byte (sign and exponent) takes few values and its lower ones take all: side by side, the
former compress and the latter are passed over. The payload is shuffled piece by piece, so that each
plane of a piece is one block of zstd, and a piece stays in a core's cache. `docs/formats.md` has
the layout byte by byte.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple, TypeAlias

import numpy as np
import zstandard

from ..codec import RecordError
from ..core import PAGE_BYTES, align_up

PLANE_BYTES = 128 << 10
"""Bytes of a plane: a block of zstd. A piece has as many planes as an element has bytes."""
LEVEL = 1
WINDOW_BYTES = 8 << 20
"""A frame that wants a larger window is refused. Those that are written here want 512 KiB."""

Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Frame(NamedTuple):
    """A compressed payload; its memory is a `ShuffleZstd`'s until that compresses another one."""

    stored: memoryview
    padded: memoryview
    """The same, page-aligned, and zeros up to a whole page."""


class ShuffleZstd:
    """What one thread codes with. Its buffers are as large as the largest payload so far.

    numpy and zstd let other threads run while they work.
    """

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
        self._shuffled = memoryview(b"")
        self._frame = memoryview(b"")

    def compress(self, payload: memoryview, element_bytes: int, limit: int) -> Frame | None:
        """Return the payload in at most `limit` bytes, or None if it takes more."""
        self._grow(len(payload))
        plain = payload
        if element_bytes > 1:
            plain = self._shuffled[: len(payload)]
            _shuffle(payload, plain, element_bytes)
        done = 0
        with self._compressor.stream_reader(plain, size=len(payload)) as reader:
            while done <= limit:
                count = reader.readinto(self._frame[done : limit + 1])
                if not count:
                    end = align_up(done, PAGE_BYTES)
                    self._frame[done:end] = bytes(end - done)
                    return Frame(self._frame[:done], self._frame[:end])
                done += count
        return None

    def decompress(self, stored: memoryview, into: memoryview, element_bytes: int) -> None:
        """Fill `into`, in which `stored` may lie, with the payload. Raises RecordError.

        Whatever `stored` is, this takes no more memory than `into` and a window.
        """
        try:
            size = zstandard.get_frame_parameters(stored).content_size
            if size != len(into):
                raise RecordError(f"a frame of {size} bytes for a payload of {len(into)}")
            plain = self._decompressor.decompress(
                stored, max_output_size=size, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise RecordError(f"no frame of zstd: {error}") from None
        if len(plain) != len(into) or len(plain) % element_bytes:
            raise RecordError(f"{len(plain)} bytes of elements of {element_bytes}")
        _unshuffle(memoryview(plain), into, element_bytes)

    def _grow(self, size: int) -> None:
        if len(self._shuffled) < size:
            whole = align_up(size + 1, PAGE_BYTES)
            self._shuffled = memoryview(mmap.mmap(-1, whole))
            self._frame = memoryview(mmap.mmap(-1, whole))


def _shuffle(plain: memoryview, into: memoryview, element_bytes: int) -> None:
    """Put the bytes of elements, piece by piece, plane by plane: first all first bytes."""
    source, target = _pieces(plain, element_bytes), _pieces(into, element_bytes)
    for piece, shuffled in zip(source, target, strict=True):
        for plane, each in enumerate(shuffled.reshape(element_bytes, -1)):
            each[:] = piece[plane::element_bytes]


def _unshuffle(shuffled: memoryview, into: memoryview, element_bytes: int) -> None:
    """Undo `_shuffle`."""
    source, target = _pieces(shuffled, element_bytes), _pieces(into, element_bytes)
    for piece, plain in zip(source, target, strict=True):
        for plane, each in enumerate(piece.reshape(element_bytes, -1)):
            plain[plane::element_bytes] = each


def _pieces(memory: memoryview, element_bytes: int) -> list[Bytes]:
    step = element_bytes * PLANE_BYTES
    whole = np.frombuffer(memory, np.uint8)
    return [whole[start : start + step] for start in range(0, len(whole), step)]
