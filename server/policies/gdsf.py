"""Greedy dual with size and frequency (GDSF), over the leaves of the tree of chains.

A block's worth is its uses times what it costs to compute for each byte, on top of the worth of
what was evicted last, so that what is not used any more is overtaken. Computing a block costs more
the further it stands from the head, because attention reads all before it. Only a block without
children can go. After Cherkasova, "Improving WWW proxies performance with greedy-dual-size-
frequency caching policy" (HP, 1998).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from ..core import BlockKey
from .base import EvictionPolicy, Known, PolicyState, credited_uses
from .heap import NOWHERE, Heap
from .links import MOST_USES
from .tree import TreeNode, plant

DOUBLE_COST_DEPTH = 2048
"""Blocks before a block that make it cost twice as much as the first one."""


class GDSF(EvictionPolicy):
    """Leaf GDSF. Every operation is O(log n) a block, and the first step of a walk over the victims
    takes back what the last one passed over.
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, _Node] = {}
        self._leaves: Heap[_Node] = Heap()
        """By worth, and by when they came to have it."""
        self._passed: list[_Node] = []
        """What a walk over the victims took out of there. Some may be gone by now."""
        self._entries = 0
        self._floor = 0.0
        """Worth of the block that was evicted last."""
        self._requests = 0

    def insert(self, keys: Sequence[BlockKey], weight: int, parent: BlockKey | None) -> None:
        """Take in blocks, one after the other."""
        for key in keys:
            self._insert(key, weight, parent)
            parent = key
        if keys:
            self._enter(self._nodes[keys[-1]])

    def _insert(self, key: BlockKey, weight: int, parent: BlockKey | None) -> None:
        """Take in a block, which may be a leaf; its parent is none any more."""
        assert key not in self._nodes, "a block is inserted once"
        above = None if parent is None else self._nodes.get(parent)
        node = self._nodes[key] = _Node(key, weight, parent)
        node.grow_from(above)
        if above is not None:
            node.depth = above.depth + 1
            above.entry = 0
            if above.place != NOWHERE:
                self._leaves.take(above)
        node.request = self._requests
        node.worth = self._floor + node.density()

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Raise the worth of the chain's blocks."""
        floor = self._floor
        self._requests += 1
        for node in reversed([*map(self._nodes.get, chain)]):
            if node is not None:
                if node.uses < MOST_USES:
                    node.uses += 1
                node.worth = floor + node.density()
                if not node.children:
                    self._enter(node)

    def remove(self, key: BlockKey) -> None:
        """Forget a block; its parent may be a leaf now."""
        node = self._nodes.pop(key)
        if node.place != NOWHERE:
            self._leaves.take(node)
        above = node.above
        if above is not None:
            above.children -= 1
            if not above.children and self._nodes.get(above.key) is above:
                self._enter(above)

    def evict(self, key: BlockKey) -> None:
        """Take out a block; what comes in from now on is worth more than it was."""
        self._floor = max(self._floor, self._nodes[key].worth)
        self.remove(key)

    def victims(self) -> Iterator[BlockKey]:
        """Yield leaves, the one of least worth first."""
        leaves = self._leaves
        for node in self._passed:
            gone = self._nodes.get(node.key) is not node or node.children
            if not gone and node.place == NOWHERE:
                leaves.put(node, (node.worth, node.entry))
        self._passed = []
        while leaves:
            node = leaves.first
            if node.request == self._requests and node.worth < self._floor + node.density():
                # It came after what went for it, wherever the tier made room first.
                node.worth = self._floor + node.density()
                self._enter(node)
                continue
            leaves.take(node)
            self._passed.append(node)  # Before the caller has it: a walk may end at any time.
            yield node.key

    def export(self) -> PolicyState:
        """Return the blocks in the order in which they would go, with their uses."""
        going = {key: node.worth for key, node in self._nodes.items()}
        for node in sorted(self._nodes.values(), key=lambda node: -node.depth):
            if node.parent in going:
                going[node.parent] = max(going[node.parent], going[node.key])
        order = sorted(
            self._nodes.values(), key=lambda node: (going[node.key], -node.depth, node.entry)
        )
        return PolicyState(tuple(Known(n.key, n.weight, n.uses, n.parent) for n in order))

    def adopt(self, state: PolicyState) -> None:
        """Take over blocks and uses; none is worth more than one that stood above it."""
        self._nodes = plant(state.blocks, _Node)
        for node in reversed(self._nodes.values()):
            node.depth = 0 if node.above is None else node.above.depth + 1
        credited = credited_uses(state.blocks)
        alike, before = Counter(credited), 0
        for at, (node, uses) in enumerate(zip(self._nodes.values(), credited, strict=True)):
            if at and credited[at - 1] != uses:
                before = at
            # Blocks of equal uses differ in age: they share the range that one use spans.
            aged = uses - 1 + (at - before + 1) / alike[uses]
            node.worth = node.density() * aged / node.uses
            if not node.children:
                self._enter(node)

    @property
    def resident(self) -> Collection[BlockKey]:
        """The blocks that are there."""
        return self._nodes

    def _enter(self, node: _Node) -> None:
        """Put a leaf where its worth belongs, instead of where it was."""
        self._entries += 1
        node.entry = self._entries
        self._leaves.put(node, (node.worth, node.entry))


class _Node(TreeNode):
    """A block of GDSF.

    `entry` counts when it came to be a leaf of its worth, `place` is its place among the leaves;
    `request` is the number of the request that brought it.
    """

    __slots__ = ("depth", "entry", "place", "request", "worth")

    def __init__(
        self, key: BlockKey, weight: int, parent: BlockKey | None = None, uses: int = 1
    ) -> None:
        super().__init__(key, weight, parent, uses)
        self.depth = 0
        self.entry = 0
        self.place = NOWHERE
        self.request = 0
        self.worth = 0.0

    def density(self) -> float:
        """Return what its uses are worth for each byte."""
        return self.uses * (1.0 + self.depth / DOUBLE_COST_DEPTH) / max(self.weight, 1)
