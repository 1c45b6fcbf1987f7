"""S3-FIFO: a small queue that new blocks must survive, and a main queue, both first in first out.

A block that is used while it is in the small queue moves to the main one when its turn to go
comes; in the main queue each use, up to three, earns one more round. One that went from the small
queue is remembered, and goes to the main queue if it comes back soon. After Yang et al., "FIFO
queues are all you need for cache eviction" (SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from ..core import BlockKey
from .base import EvictionPolicy, PolicyState
from .ghosts import Ghosts
from .tree import TreeNode, eviction_order, plant, walk

SMALL, MAIN = 0, 1
SMALL_SHARE = 1 / 8
"""Share of the resident bytes above which the small queue goes first."""
ROUNDS = 3
"""Rounds in the main queue that a block can have in hand."""
GHOSTS_SHARE = 1
"""Ghosts kept, as a multiple of the resident blocks."""


class S3FIFO(EvictionPolicy):
    """S3-FIFO. Every operation is O(1) a block, amortised over the rounds."""

    name: ClassVar[str] = "s3fifo"

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, _Node] = {}
        self._queues = (_Node(b"", 0), _Node(b"", 0))
        self._bytes = [0, 0]
        self._ghosts = Ghosts()
        self._newest: _Node | None = None

    def insert(self, keys: Sequence[BlockKey], weight: int, parent: BlockKey | None) -> None:
        """Take in blocks, one after the other."""
        for key in keys:
            self._insert(key, weight, parent)
            parent = key

    def _insert(self, key: BlockKey, weight: int, parent: BlockKey | None) -> None:
        """Take in a block as the newest of the small queue, or of the main one if it is a ghost.

        A request's blocks that come one after the other stand tail first.
        """
        assert key not in self._nodes, "a block is inserted once"
        above = None if parent is None else self._nodes.get(parent)
        node = self._nodes[key] = _Node(key, weight, parent)
        node.grow_from(above)
        node.queue = MAIN if self._ghosts.recall(key) else SMALL
        self._bytes[node.queue] += weight
        if node.queue == MAIN:
            self._promote_above(node)
        newest = self._newest
        if newest is None or newest is not above or newest.queue != node.queue or newest.parked:
            newest = self._queues[node.queue]
        node.link_below(newest)
        self._newest = node

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Give each block one more round."""
        for node in map(self._nodes.get, chain):
            if node is not None and node.rounds < ROUNDS:
                node.rounds += 1

    def remove(self, key: BlockKey) -> None:
        """Forget a resident block."""
        self._take_out(key)

    def evict(self, key: BlockKey) -> None:
        """Take out a block, and remember it if it never left the small queue."""
        most = GHOSTS_SHARE * len(self._nodes)
        if self._take_out(key).queue == SMALL:
            self._ghosts.remember(key, 1, most)

    def victims(self) -> Iterator[BlockKey]:
        """Yield blocks without children whose turn it is; others get their rounds on the way."""
        last = [*self._queues]
        while (queue := self._next_queue(last)) is not None:
            node = last[queue].hotter
            if node.rounds:
                if queue == SMALL:
                    self._promote(node)
                else:
                    node.rounds -= 1
                    node.move_below(self._queues[MAIN])
            elif node.children:
                node.park()
            else:
                yield node.key
                if node.key in self._nodes:
                    last[queue] = node

    def export(self) -> PolicyState:
        """Return the blocks as they would go; uses stand for queue and rounds in hand."""
        small, main = ([*walk(queue)] for queue in self._queues)
        survive = [node for node in small if node.rounds]
        listed = [*(node for node in small if not node.rounds), *main, *survive]
        return PolicyState(eviction_order(self._nodes, listed, _credit), self._ghosts.copy())

    def adopt(self, state: PolicyState) -> None:
        """Take over blocks and ghosts: what was used twice is in the main queue."""
        self._nodes = plant(state.blocks, _Node)
        for node in self._nodes.values():
            node.queue = MAIN if node.uses > 1 else SMALL
            node.rounds = min(max(node.uses - 2, 0), ROUNDS)
            node.link_below(self._queues[node.queue])
            self._bytes[node.queue] += node.weight
        self._ghosts = Ghosts(state.ghosts.items())

    @property
    def resident(self) -> Collection[BlockKey]:
        """The blocks that are there."""
        return self._nodes

    def _next_queue(self, last: Sequence[_Node]) -> int | None:
        """Return the queue that is next to give a block, beyond the `last` that were passed."""
        small = self._bytes[SMALL] > SMALL_SHARE * sum(self._bytes)
        for queue in (SMALL, MAIN) if small else (MAIN, SMALL):
            if last[queue].hotter is not self._queues[queue]:
                return queue
        return None

    def _promote(self, node: _Node) -> None:
        node.move_below(self._queues[MAIN])
        node.queue, node.rounds = MAIN, 0
        self._bytes[SMALL] -= node.weight
        self._bytes[MAIN] += node.weight

    def _promote_above(self, node: _Node) -> None:
        """Let no parent be in the small queue while its child is in the main one."""
        above = node.above
        while above is not None and above.queue == SMALL and self._nodes.get(above.key) is above:
            self._promote(above)
            above = above.above

    def _take_out(self, key: BlockKey) -> _Node:
        node = self._nodes.pop(key)
        self._bytes[node.queue] -= node.weight
        if (above := node.leave()) is not None:
            # It served its children until now.
            above.link_below(self._queues[above.queue])
        if node is self._newest:
            self._newest = None
        return node


class _Node(TreeNode):
    """A block of S3-FIFO: its queue, and the rounds in the main queue that it has in hand."""

    __slots__ = ("queue", "rounds")

    def __init__(
        self, key: BlockKey, weight: int, parent: BlockKey | None = None, uses: int = 1
    ) -> None:
        super().__init__(key, weight, parent, uses)
        self.queue = SMALL
        self.rounds = 0


def _credit(node: _Node) -> int:
    if node.queue == SMALL:
        return 2 if node.rounds else 1
    return 2 + node.rounds
