"""Least recently used, tail first.

A list from cold to hot. A request's chain goes to its hot end with the head above the tail, and a
new block takes the place just below its parent, so that a child is never hotter than its parent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain as joined
from typing import ClassVar

from ..core import BlockKey
from .base import EvictionPolicy, Parents, PolicyState
from .links import MOST_USES
from .runs import Run, Runs, chains_of, known_of, walk_runs


class LRU(EvictionPolicy):
    """Tail-first LRU. Counts uses, but only for a successor."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._runs: Runs[Run] = Runs()
        self._ring = Run([], 0, None, 0)

    def follow(self, parents: Parents) -> None:
        """Keep few blocks in the index from now on."""
        super().follow(parents)
        self._runs.follow(parents)

    def insert(self, keys: Sequence[BlockKey], weight: int, parent: BlockKey | None) -> None:
        """Take in new blocks just below their parent, or as the hottest if there is none."""
        above = self._ring if parent is None else self._runs.ending_with(parent) or self._ring
        if above.uses == 1 and above.weight == weight:
            self._runs.extend(above, keys)
            return
        run = Run(list(keys), weight, parent, 1)
        run.link_below(above)
        self._runs.add(run)

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Make the chain the hottest, its head above its tail."""
        above = self._ring
        at, end, run_of = 0, len(chain), self._runs.of.get
        while at < end:
            if (run := run_of(chain[at])) is None:
                at = self._runs.next_resident(chain, at)
                continue
            run = self._runs.cut_out(run, chain, at)
            at += len(run.keys)
            # A chain mostly lies in one piece already, of which only the ends have to move.
            if run is not above:
                if run.uses < MOST_USES:
                    run.uses += 1
                if above.colder is not run:
                    run.move_below(above)
                above = run
        if above is not self._ring:
            self._runs.ends_with(above)

    def remove(self, key: BlockKey) -> None:
        """Forget a resident block."""
        self._runs.remove(key)

    def make_room(self, count: int, goes: Callable[[BlockKey], bool]) -> int:
        """Evict up to `count` blocks that may go, coldest first. Returns how many."""
        return sum(len(gone) for gone, _ in self._runs.make_room(self._ring, count, goes))

    def victims(self) -> Iterator[BlockKey]:
        """Yield blocks from the coldest on."""
        return self._runs.coldest_first(self._ring)

    def export(self) -> PolicyState:
        """Return the blocks in order of recency."""
        return PolicyState(tuple(joined.from_iterable(map(known_of, walk_runs(self._ring)))))

    def adopt(self, state: PolicyState) -> None:
        """Take over blocks in the order given."""
        for stretch, _ in chains_of(state.blocks, [0] * len(state.blocks)):
            first = stretch[0]
            run = Run([one.key for one in stretch], first.weight, first.parent, first.uses)
            run.link_below(self._ring)
            self._runs.add(run)

    @property
    def resident(self) -> Collection[BlockKey]:
        """The blocks that are there."""
        return self._runs.resident()

    def __len__(self) -> int:
        return self._runs.blocks
