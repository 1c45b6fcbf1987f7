"""Least recently used, tail first.

A linked list from cold to hot. A request's chain goes to its hot end with the head above the tail,
and a new block takes the place just below its parent, so that a child is never hotter than its
parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from ..core import BlockKey
from .base import EvictionPolicy, Known, PolicyState
from .links import MOST_USES, Node


class LRU(EvictionPolicy):
    """Tail-first LRU. Every operation is O(1) a block. Counts uses, but only for a successor."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, Node] = {}
        self._ring = Node(b"", 0)

    def insert(self, key: BlockKey, weight: int, parent: BlockKey | None) -> None:
        """Take in a new block just below its parent, or as the hottest if there is none."""
        assert key not in self._nodes, "a block is inserted once"
        above = self._ring if parent is None else self._nodes.get(parent, self._ring)
        node = self._nodes[key] = Node(key, weight, parent)
        node.link_below(above)

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Make the chain the hottest, its head above its tail."""
        above = self._ring
        for node in map(self._nodes.get, chain):
            # A chain mostly lies in one piece already, of which only the ends have to move.
            if node is not None and node is not above:
                if node.uses < MOST_USES:
                    node.uses += 1
                if above.colder is not node:
                    node.unlink()
                    node.link_below(above)
                above = node

    def remove(self, key: BlockKey) -> None:
        """Forget a resident block."""
        self._nodes.pop(key).unlink()

    def victims(self) -> Iterator[BlockKey]:
        """Yield blocks from the coldest on."""
        node = self._ring.hotter
        while node is not self._ring:
            hotter = node.hotter
            yield node.key
            node = hotter

    def export(self) -> PolicyState:
        """Return the blocks in order of recency."""
        nodes = map(self._nodes.__getitem__, self.victims())
        return PolicyState(tuple(Known(n.key, n.weight, n.uses, n.parent) for n in nodes))

    def adopt(self, state: PolicyState) -> None:
        """Take over blocks in the order given."""
        for known in state.blocks:
            node = self._nodes[known.key] = Node(*known.node())
            node.link_below(self._ring)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes
