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

from collections.abc import Iterator, Sequence
from typing import ClassVar

from ..core import BlockKey
from .base import EvictionPolicy, Known, PolicyState, credited_uses
from .ghosts import Ghosts
from .links import MOST_USES, Node

QUEUES = 8
LEVELS = [max(uses.bit_length() - 1, 0) for uses in range(MOST_USES + 1)]
"""Queue by number of uses."""
LIFE = 1.0
"""Block accesses for which a block keeps its queue unused, as a share of the resident blocks."""
GHOSTS_A_LIFE, GHOSTS_AT_LEAST, GHOSTS_AT_MOST = 4, 1, 4
"""Ghosts kept, as multiples of the resident blocks: a count counts for a few lives."""
SETTLED_AT_ONCE = 256
"""Blocks that one call moves down from one queue at most, so that no call takes long."""
STAMP_ACCESSES = 64
"""Accesses that share one time stamp while nothing is touched."""


class MQ(EvictionPolicy):
    """MQ with 8 queues. Every operation is O(1) a block."""

    name: ClassVar[str] = "mq"

    def __init__(self, life: float = LIFE) -> None:
        self._nodes: dict[BlockKey, _Node] = {}
        self._queues = [_Node(b"", 0) for _ in range(QUEUES)]
        self._ghosts = Ghosts()
        self._now = 0
        """Block accesses so far: time, as far as lives are concerned."""
        self._stamp = 0
        """The time that accesses carry now: one integer for many blocks, to save memory."""
        self.life = life

    @property
    def life(self) -> float:
        """Life in force, as a share of the resident blocks. It can change at any time."""
        return self._life

    @life.setter
    def life(self, life: float) -> None:
        self._life = life
        self._ghosts_share = min(max(GHOSTS_A_LIFE * life, GHOSTS_AT_LEAST), GHOSTS_AT_MOST)

    def insert(self, key: BlockKey, weight: int, parent: BlockKey | None) -> None:
        """Take in a block at the hot end of the queue of its uses, ghosts' uses included."""
        nodes = self._nodes
        assert key not in nodes, "a block is inserted once"
        above = None if parent is None else nodes.get(parent)
        seen = self._ghosts.recall(key)
        uses, level = 1, 0
        if seen:
            uses = min(seen + 1, MOST_USES if above is None else above.uses)
            level = LEVELS[uses]
        if above is not None and above.level <= level:
            level = above.level
        else:
            above = self._queues[level]
        self._now += 1
        if self._now - self._stamp > STAMP_ACCESSES:
            self._stamp = self._now
        node = nodes[key] = _Node(key, weight, parent, uses)
        node.level = level
        node.since = self._stamp
        node.link_below(above)

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Move the chain's blocks to the hot ends of their queues, heads above tails."""
        self._settle()
        stamp, found = self._now, 0
        above, level = None, QUEUES
        for node in map(self._nodes.get, chain):
            if node is None or node is above:
                continue
            found += 1
            uses = node.uses
            if uses < MOST_USES:
                node.uses = uses = uses + 1
            node.since = stamp
            if above is None or LEVELS[uses] < level:
                level = LEVELS[uses]
                above = self._queues[level]
            if above.colder is not node:
                node.unlink()
                node.link_below(above)
            node.level = level
            above = node
        self._now += found
        self._stamp = stamp

    def remove(self, key: BlockKey) -> None:
        """Forget a resident block."""
        self._nodes.pop(key).unlink()

    def evict(self, key: BlockKey) -> None:
        """Take out a block and remember its uses."""
        most = int(self._ghosts_share * len(self._nodes))
        node = self._nodes.pop(key)
        node.unlink()
        self._ghosts.remember(key, node.uses, most)

    def victims(self) -> Iterator[BlockKey]:
        """Yield blocks from the lowest queue's coldest on."""
        self._settle()
        for queue in self._queues:
            node = queue.hotter
            while node is not queue:
                hotter = node.hotter
                yield node.key
                node = hotter

    def export(self) -> PolicyState:
        """Return the blocks in order, with their uses, the ghosts, and what makes up the queues."""
        blocks: list[Known] = []
        learnt = {"life": self.life}
        for level, queue in enumerate(self._queues):
            before = len(blocks)
            node = queue.hotter
            learnt[f"idle {level}"] = self._now - node.since
            while node is not queue:
                blocks.append(Known(node.key, node.weight, node.uses, node.parent))
                node = node.hotter
            learnt[f"length {level}"] = len(blocks) - before
        return PolicyState(tuple(blocks), self._ghosts.copy(), learnt)

    def adopt(self, state: PolicyState) -> None:
        """Take over order, uses and ghosts, and from another MQ its queues. The life stays ours."""
        lengths = [int(state.learnt.get(f"length {level}", 0)) for level in range(QUEUES)]
        if sum(lengths) == len(state.blocks):
            levels = [level for level in range(QUEUES) for _ in range(lengths[level])]
        else:
            levels = [LEVELS[uses] for uses in credited_uses(state.blocks)]
        for known, level in zip(state.blocks, levels, strict=True):
            node = self._nodes[known.key] = _Node(*known.node())
            node.level = level
            node.link_below(self._queues[level])
        for level, length in enumerate(lengths):
            self._age(level, length, int(state.learnt.get(f"idle {level}", 0)))
        self._ghosts = state.ghosts.copy()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def _age(self, level: int, length: int, idle: int) -> None:
        """Let the coldest block of a queue have been idle for `idle` accesses, and others less."""
        node = self._queues[level].hotter
        for at in range(length):
            node.since = self._now - idle * (length - at) // length
            node = node.hotter

    def _settle(self) -> None:
        """Move blocks that were idle for longer than their life down one queue."""
        oldest = self._now - self._life * len(self._nodes)
        for level in range(1, QUEUES):
            queue = self._queues[level]
            for _ in range(SETTLED_AT_ONCE):
                node = queue.hotter
                if node is queue or node.since >= oldest:
                    break
                node.unlink()
                node.link_below(self._queues[level - 1])
                node.level = level - 1
                node.since = self._now


class _Node(Node):
    """A block of MQ: its queue, and the time of its last use or move down."""

    __slots__ = ("level", "since")

    def __init__(
        self, key: BlockKey, weight: int, parent: BlockKey | None = None, uses: int = 1
    ) -> None:
        super().__init__(key, weight, parent, uses)
        self.level = 0
        self.since = 0
