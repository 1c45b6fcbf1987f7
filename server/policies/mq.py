"""Multi-queue (MQ): made for caches below another cache, where recency alone says little.

A block lies in queue log2(uses). The coldest block of a queue that was idle for longer than its
life moves down one queue. Evicted blocks are remembered with their uses, so that one that comes
back soon is not new. After Zhou, Philbin and Li, "The multi-queue replacement algorithm for second
level buffer caches" (USENIX 2001).

Read one after the other from the lowest queue on, the queues are one list from cold to hot, and
moving a queue's coldest block down only shifts a border in it. A child has at most the uses that
its parent has and is touched before it, so the list keeps children below their parents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import ClassVar, Self

from ..core import BlockKey
from .base import EvictionPolicy, Known, Parents, PolicyState, credited_uses
from .ghost_runs import GhostRuns
from .links import MOST_USES
from .runs import Run, Runs, chains_of, known_of, walk_runs

QUEUES = 8
LEVELS = [max(uses.bit_length() - 1, 0) for uses in range(MOST_USES + 1)]
"""Queue by number of uses."""
LIFE = 1.0
"""Block accesses for which a block keeps its queue unused, as a share of the resident blocks."""
GHOSTS_A_LIFE, GHOSTS_AT_LEAST, GHOSTS_AT_MOST = 4, 1, 4
"""Ghosts kept, as multiples of the resident blocks: a count counts for a few lives."""
SETTLED_AT_ONCE = 256
"""Runs that one call moves down from one queue at most, so that no call takes long."""
SETTLED_A_LIFE = 64
"""Times within a life that queues are looked through for what has been idle for longer."""
STAMP_ACCESSES = 64
"""Accesses that share one time stamp while nothing is touched."""


class MQ(EvictionPolicy):
    """MQ with 8 queues."""

    name: ClassVar[str] = "mq"

    def __init__(self, life: float = LIFE) -> None:
        self._runs: Runs[_Run] = Runs()
        self._queues = [_Run([], 0, None, 0) for _ in range(QUEUES)]
        self._ghosts = GhostRuns()
        self._now = 0
        """Block accesses so far: time, as far as lives are concerned."""
        self._stamp = 0
        """The time that accesses carry now: the same for some, so that they can be one run."""
        self._settled_until = 0
        self.life = life

    @property
    def life(self) -> float:
        """Life in force, as a share of the resident blocks. It can change at any time."""
        return self._life

    @life.setter
    def life(self, life: float) -> None:
        self._life = life
        self._settled_until = 0
        self._ghosts_share = ghosts_share(life)

    def follow(self, parents: Parents) -> None:
        """Keep few blocks in the index from now on."""
        super().follow(parents)
        self._runs.follow(parents)

    def insert(self, keys: Sequence[BlockKey], weight: int, parent: BlockKey | None) -> None:
        """Take in blocks at the hot ends of the queues of their uses, ghosts' uses included."""
        at, most = 0, MOST_USES
        above = None if parent is None else self._runs.ending_with(parent)
        if above is not None:
            most = above.uses
        for blocks, seen in self._ghosts.recall(keys):
            end = at + blocks
            most = min(seen + 1, most)
            run = _Run(list(keys[at:end]), weight, parent, most)
            above = self._insert(run, above)
            at, parent = end, keys[end - 1]

    def _insert(self, run: _Run, above: _Run | None) -> _Run:
        """Take in a run below the one that it continues. Returns the one that it is now."""
        level = LEVELS[run.uses]
        self._now += len(run.keys)
        if self._now - self._stamp > STAMP_ACCESSES:
            self._stamp = self._now
        if above is not None and above.level <= level:
            level = above.level
            if (above.uses, above.since, above.weight) == (run.uses, self._stamp, run.weight):
                self._runs.extend(above, run.keys)
                return above
        else:
            above = self._queues[level]
        run.level = level
        run.since = self._stamp
        run.link_below(above)
        self._runs.add(run)
        return run

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Move the chain's blocks to the hot ends of their queues, heads above tails."""
        self._settle()
        stamp, found = self._now, 0
        above, level = None, QUEUES
        at, end, run_of = 0, len(chain), self._runs.of.get
        while at < end:
            if (run := run_of(chain[at])) is None:
                at = self._runs.next_resident(chain, at)
                continue
            run = self._runs.cut_out(run, chain, at)
            blocks = len(run.keys)
            at += blocks
            if run is above:
                continue
            found += blocks
            uses = run.uses
            if uses < MOST_USES:
                run.uses = uses = uses + 1
            run.since = stamp
            if above is None or LEVELS[uses] < level:
                level = LEVELS[uses]
                above = self._queues[level]
            if above.colder is not run:
                run.move_below(above)
            run.level = level
            above = run
        if above is not None:
            self._runs.ends_with(above)
        self._now += found
        self._stamp = stamp

    def remove(self, key: BlockKey) -> None:
        """Forget a resident block."""
        self._runs.remove(key)
        self._ghosts.tear()

    def evict(self, key: BlockKey) -> None:
        """Take out a block and remember its uses."""
        most = int(self._ghosts_share * self._runs.blocks)
        run = self._runs.remove(key)
        self._ghosts.remember([key], run.uses, run.end())
        self._ghosts.trim(most)

    def make_room(self, count: int, goes: Callable[[BlockKey], bool]) -> int:
        """Evict up to `count` blocks that may go, coldest first. Returns how many."""
        self._settle()
        left = count
        for queue in self._queues:
            for gone, run in self._runs.make_room(queue, left, goes) if left else ():
                left -= len(gone)
                self._ghosts.remember(gone, run.uses, run.end())
        if left < count:  # As many as if the last one had gone by itself.
            self._ghosts.trim(int(self._ghosts_share * (self._runs.blocks + 1)))
        return count - left

    def victims(self) -> Iterator[BlockKey]:
        """Yield blocks from the lowest queue's coldest on."""
        self._settle()
        for queue in self._queues:
            yield from self._runs.coldest_first(queue)

    def export(self) -> PolicyState:
        """Return the blocks in order, with their uses, the ghosts, and what makes up the queues."""
        blocks: list[Known] = []
        learnt = {"life": self.life}
        for level, queue in enumerate(self._queues):
            before = len(blocks)
            learnt[f"idle {level}"] = self._now - queue.hotter.since
            for run in walk_runs(queue):
                blocks += known_of(run)
            learnt[f"length {level}"] = len(blocks) - before
        return PolicyState(tuple(blocks), self._ghosts.copy(), learnt)

    def adopt(self, state: PolicyState) -> None:
        """Take over order, uses and ghosts, and from another MQ its queues. The life stays ours."""
        lengths = [int(state.learnt.get(f"length {level}", 0)) for level in range(QUEUES)]
        if sum(lengths) == len(state.blocks):
            levels = [level for level in range(QUEUES) for _ in range(lengths[level])]
        else:
            levels = [LEVELS[uses] for uses in credited_uses(state.blocks)]
        for stretch, level in chains_of(state.blocks, levels):
            first = stretch[0]
            run = _Run([one.key for one in stretch], first.weight, first.parent, first.uses)
            run.level = level
            run.link_below(self._queues[level])
            self._runs.add(run)
        for level, length in enumerate(lengths):
            self._age(level, length, int(state.learnt.get(f"idle {level}", 0)))
        ghosts = state.ghosts
        self._ghosts = ghosts.copy() if isinstance(ghosts, GhostRuns) else GhostRuns(ghosts.items())

    @property
    def resident(self) -> Collection[BlockKey]:
        """The blocks that are there."""
        return self._runs.resident()

    def __len__(self) -> int:
        return self._runs.blocks

    def _age(self, level: int, length: int, idle: int) -> None:
        """Let the coldest run of a queue have been idle for `idle` accesses, and others less."""
        at = 0
        for run in walk_runs(self._queues[level]):
            run.since = self._now - idle * (length - at) // max(length, 1)
            at += len(run.keys)

    def _settle(self) -> None:
        """Move blocks that were idle for longer than their life down one queue."""
        if self._now < self._settled_until:
            return
        life = self._life * self._runs.blocks
        self._settled_until = self._now + int(life) // SETTLED_A_LIFE
        oldest = self._now - life
        for level in range(1, QUEUES):
            queue = self._queues[level]
            for _ in range(SETTLED_AT_ONCE):
                run = queue.hotter
                if run is queue or run.since >= oldest:
                    break
                run.move_below(self._queues[level - 1])
                run.level = level - 1
                run.since = self._now


def ghosts_share(life: float) -> float:
    """Return how many ghosts are kept with a life, as a multiple of the resident blocks."""
    return min(max(GHOSTS_A_LIFE * life, GHOSTS_AT_LEAST), GHOSTS_AT_MOST)


class _Run(Run):
    """A run of MQ: its queue, and the time of its last use or move down."""

    __slots__ = ("level", "since")

    def __init__(
        self, keys: list[BlockKey], weight: int, parent: BlockKey | None, uses: int
    ) -> None:
        super().__init__(keys, weight, parent, uses)
        self.level = 0
        self.since = 0

    def cut(self, at: int) -> Self:
        other = super().cut(at)
        other.level, other.since = self.level, self.since
        return other
