"""First in, first out: the baseline. What is used plays no part.

The blocks of a request that come one after the other stand tail first, as everywhere. One that is
next to go while a later request's blocks continue it waits until they are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from ..core import BlockKey
from .base import EvictionPolicy, PolicyState
from .tree import TreeNode, eviction_order, plant, walk


class FIFO(EvictionPolicy):
    """FIFO over chains. Every operation is O(1) a block."""

    name: ClassVar[str] = "fifo"

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, TreeNode] = {}
        self._ring = TreeNode(b"", 0)
        self._newest: TreeNode | None = None

    def insert(self, keys: Sequence[BlockKey], weight: int, parent: BlockKey | None) -> None:
        """Take in blocks, one after the other."""
        for key in keys:
            self._insert(key, weight, parent)
            parent = key

    def _insert(self, key: BlockKey, weight: int, parent: BlockKey | None) -> None:
        """Take in a block as the newest, or just below its parent if that came right before."""
        assert key not in self._nodes, "a block is inserted once"
        above = None if parent is None else self._nodes.get(parent)
        node = self._nodes[key] = TreeNode(key, weight, parent)
        node.grow_from(above)
        follows = above is not None and above is self._newest and not above.parked
        node.link_below(above if above is not None and follows else self._ring)
        self._newest = node

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Do nothing: this is what makes it the baseline."""

    def remove(self, key: BlockKey) -> None:
        """Forget a block; a parent that waited for it takes its place."""
        node = self._nodes.pop(key)
        place = self._ring if node.parked else node.colder
        if (above := node.leave()) is not None:
            above.link_above(place)
        if node is self._newest:
            self._newest = None

    def victims(self) -> Iterator[BlockKey]:
        """Yield blocks without children, oldest first."""
        last = self._ring
        while (node := last.hotter) is not self._ring:
            if node.children:
                node.park()
                continue
            yield node.key
            if node.key in self._nodes:
                last = node

    def export(self) -> PolicyState:
        """Return the blocks in the order in which they would go."""
        return PolicyState(eviction_order(self._nodes, walk(self._ring)))

    def adopt(self, state: PolicyState) -> None:
        """Take over blocks in the order given."""
        self._nodes = plant(state.blocks, TreeNode)
        for node in self._nodes.values():
            node.link_below(self._ring)

    @property
    def resident(self) -> Collection[BlockKey]:
        """The blocks that are there."""
        return self._nodes
