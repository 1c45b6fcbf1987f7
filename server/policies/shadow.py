"""A small cache of keys under MQ with one life: what a tier would have hit with that life.

It serves a whole request at once, and keeps a dictionary a queue instead of runs: of the blocks
that it is shown, hardly two follow each other. It looks for what was idle only when it evicts, and
so hits nearly, but not exactly, what `MQ` would hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from ..core import BlockKey
from .links import MOST_USES
from .mq import LEVELS, QUEUES, ghosts_share

SLACK_SHARE = 32
"""It may hold as much more than it should, its blocks ÷ this, so that it evicts seldom."""


class Shadow:
    """A cache that counts its `hits`: contiguous ones, and decayed by whoever reads them.

    A request takes O(1) a block.
    """

    def __init__(self, life: float) -> None:
        self.life = life
        self.hits = 0.0
        self._places: dict[BlockKey, tuple[int, int]] = {}
        """The uses of each resident block, and its queue."""
        self._queues = [dict[BlockKey, int]() for _ in range(QUEUES)]
        """Blocks from cold to hot, with the time of their last use or move down."""
        self._ghosts: dict[BlockKey, int] = {}
        self._share = ghosts_share(life)
        self._now = 0

    def __len__(self) -> int:
        return len(self._places)

    def serve(self, chains: Iterable[Sequence[BlockKey]], room: int | None) -> None:
        """Serve requests, in turn, from at most `room` blocks; None sets no bound."""
        for chain in chains:
            self._request(chain, room)

    def _request(self, chain: Sequence[BlockKey], room: int | None) -> None:
        places = self._places
        placed: list[tuple[BlockKey, int]] = []
        hits, level, most = 0, QUEUES, MOST_USES
        for at, key in enumerate(chain):
            if (place := places.get(key)) is not None:
                del self._queues[place[1]][key]
                most = min(place[0] + 1, MOST_USES)
                hits += at == hits
            else:
                most = min(self._ghosts.pop(key, 0) + 1, most)
            level = min(level, LEVELS[most])
            places[key] = (most, level)
            placed.append((key, level))
        for key, level in reversed(placed):
            self._queues[level][key] = self._now
        self.hits += hits
        self._now += len(placed)
        if room is not None and (excess := len(places) - room) > room // SLACK_SHARE:
            self._evict(excess, frozenset(chain[:hits]))

    def _evict(self, count: int, leased: frozenset[BlockKey]) -> None:
        self._settle()
        places, ghosts = self._places, self._ghosts
        for queue in self._queues:
            for key in list(islice(queue, count)):
                if key not in leased:
                    del queue[key]
                    ghosts[key], _ = places.pop(key)
                    count -= 1
        most = self._share * len(places)
        while len(ghosts) > most:
            del ghosts[next(iter(ghosts))]

    def _settle(self) -> None:
        """Move blocks that were idle for longer than the life down one queue."""
        places = self._places
        oldest = self._now - self.life * len(places)
        for level in range(1, QUEUES):
            queue, below = self._queues[level], self._queues[level - 1]
            while queue:
                key = next(iter(queue))
                if queue[key] >= oldest:
                    break
                del queue[key]
                below[key] = self._now
                places[key] = (places[key][0], level - 1)
