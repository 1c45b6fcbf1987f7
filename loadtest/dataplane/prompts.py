"""Prompts of simulated engines: their keys, and bytes of blocks that tell whose they are.

A block's bytes are its key again and again, so that whoever loads it can tell another block's
bytes, and changed ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvtier.core import KEY_BYTES

from ..rig import RigError

Pages = npt.NDArray[np.uint8]
"""uint8 [blocks, bytes of a block]."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of what engines ask for. A block has whole pages of the memory."""

    block_bytes: int
    prompt_blocks: int
    """Of one lookup, and one load."""
    store_blocks: int
    """Of one store: what a step of chunked prefill fills."""

    @property
    def words(self) -> int:
        """Keys that fit into a block."""
        return self.block_bytes // KEY_BYTES


def keys_of(name: str, blocks: int) -> bytes:
    """Return the keys of a prompt, as lookups carry them. Equal names give equal keys."""
    return random.Random(name).randbytes(blocks * KEY_BYTES)


def fill(pages: Pages, keys: bytes) -> None:
    """Write into each page what the block with this key has: as many pages as keys."""
    _words(pages)[:] = _rows(keys)[:, np.newaxis]


def check(pages: Pages, keys: bytes) -> None:
    """Compare all bytes. Raises RigError if one is wrong."""
    _compare(_words(pages), keys)


def check_ends(pages: Pages, keys: bytes) -> None:
    """Compare the first and the last bytes of each page: cheap. Raises RigError for wrong ones."""
    _compare(_words(pages)[:, [0, -1]], keys)


def _compare(words: npt.NDArray[np.uint64], keys: bytes) -> None:
    right = (words == _rows(keys)[:, np.newaxis]).all(axis=(1, 2))
    if not right.all():
        wrong = np.flatnonzero(~right)
        raise RigError(f"{len(wrong)} of {len(right)} blocks have wrong bytes, first {wrong[0]}.")


def _words(pages: Pages) -> npt.NDArray[np.uint64]:
    return pages.view(np.uint64).reshape(len(pages), -1, KEY_BYTES // 8)


def _rows(keys: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(keys, np.uint64).reshape(-1, KEY_BYTES // 8)
