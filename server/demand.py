"""How likely a block is wanted again after it left the host tier, by its class.

A class is how often the block was used and how deep in a conversation it came up, both up to three.
Blocks that left are remembered for a while without their bytes; those that are asked for again
within that time came back. Each class's share of those tells what the next one of it will do. Keys
are kept as 64-bit hashes, about 90 bytes each: two that share one harm nothing but a guess.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from .core import BlockKey

DEPTH = 3
"""Uses, and turns, are told apart up to here."""
CLASSES = DEPTH * DEPTH
"""A class is a number: (uses - 1) x `DEPTH` + turn - 1."""
BACK = CLASSES
"""Added to the class of a block that left and was asked for since, so that it counts once."""
LEFT_AT_FIRST, BACK_AT_FIRST = 4.0, 1.0
"""What a class counts before anything was seen of it: it is thought to be wanted."""
HALVED_AT = 4096.0
"""When so many of a class have left, what was counted of it counts half from then on."""
WINDOW_SHARE, WINDOW_AT_LEAST, WINDOW_AT_MOST = 8, 4096, 1 << 20
"""Blocks that left and are remembered, as a multiple of those that are there."""
TRIMMED_AT_ONCE = 1024

_USED = [min(seen + DEPTH, CLASSES - DEPTH + seen % DEPTH) for seen in range(CLASSES)]
"""The class after one more use."""
_CAME_BACK = [_USED[seen % CLASSES] + BACK for seen in range(CLASSES + BACK)]


class Demand:
    """What is remembered of blocks. Every operation is O(1) a block."""

    def __init__(self) -> None:
        self._here: dict[int, int] = {}
        """Classes of the blocks in the host tier."""
        self._gone: dict[int, int] = {}
        """Classes of those that left it, in that order."""
        self._left = [LEFT_AT_FIRST] * CLASSES
        self._back = [BACK_AT_FIRST] * CLASSES

    def used(self, chain: Iterable[BlockKey]) -> None:
        """Record one request's use of the chain that it asked for, whatever there is of it."""
        here, gone = self._here, self._gone
        for name in map(hash, chain):
            if (seen := here.get(name)) is not None:
                if seen < CLASSES - DEPTH:
                    here[name] = seen + DEPTH
            elif (seen := gone.get(name)) is not None:
                if seen < BACK:
                    self._back[seen] += 1.0
                gone[name] = _CAME_BACK[seen]

    def stored(self, key: BlockKey, parent: BlockKey) -> None:
        """A block came into the host tier; `parent` is empty at the head of a chain.

        What continues a block that an earlier request used too is one turn deeper than that.
        """
        name = hash(key)
        seen = self._gone.pop(name, None)
        if seen is None:
            above = self._here.get(hash(parent)) if parent else None
            seen = 0
            if above is not None:
                seen = min(above % DEPTH + (above >= DEPTH), DEPTH - 1)
        self._here[name] = seen % CLASSES

    def left(self, key: BlockKey) -> None:
        """A block left the host tier for room."""
        name = hash(key)
        seen = self._here.pop(name, 0)
        self._left[seen] += 1.0
        if self._left[seen] > HALVED_AT:
            self._left[seen] /= 2
            self._back[seen] /= 2
        self._gone.pop(name, None)
        self._gone[name] = seen
        self._trim()

    def dropped(self, key: BlockKey) -> None:
        """A block was dropped from the host tier, which says nothing of others."""
        self._here.pop(hash(key), None)

    def uses(self, key: BlockKey) -> int:
        """Return how many requests used a block of the host tier, up to `DEPTH`; at least 1."""
        return self._here.get(hash(key), 0) // DEPTH + 1

    def chance(self, key: BlockKey) -> float:
        """Return how likely a block of the host tier is asked for again once it has left."""
        seen = self._here.get(hash(key), 0)
        return self._back[seen] / self._left[seen]

    def __len__(self) -> int:
        """Return how many blocks are remembered."""
        return len(self._here) + len(self._gone)

    def _trim(self) -> None:
        gone = self._gone
        most = min(max(WINDOW_SHARE * len(self._here), WINDOW_AT_LEAST), WINDOW_AT_MOST)
        if len(gone) > most + TRIMMED_AT_ONCE:
            for name in list(islice(gone, TRIMMED_AT_ONCE)):
                del gone[name]
