"""Least recently used, tail first.

A linked list from cold to hot. A request's chain is touched from tail to head, and a new block
takes the place just below its parent, so that a child is never hotter than its parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from ..core import BlockKey
from .base import EvictionPolicy, PolicyState


class LRU(EvictionPolicy):
    """Tail-first LRU. Every operation is O(1) a block."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, _Node] = {}
        self._ring = _Node(b"", 0)
        """Sentinel: `_ring.hotter` is the coldest block, `_ring.colder` the hottest."""

    def insert(self, key: BlockKey, weight: int, parent: BlockKey | None) -> None:
        """Take in a new block just below its parent, or as the hottest if there is none."""
        assert key not in self._nodes, "a block is inserted once"
        above = self._ring if parent is None else self._nodes.get(parent, self._ring)
        node = self._nodes[key] = _Node(key, weight)
        node.link_below(above)

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Make the chain the hottest, its head above its tail."""
        nodes, ring = self._nodes, self._ring
        for key in reversed(chain):
            if (node := nodes.get(key)) is not None:
                node.unlink()
                node.link_below(ring)

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
        return PolicyState(tuple((key, self._nodes[key].weight) for key in self.victims()))

    def adopt(self, state: PolicyState) -> None:
        """Take over blocks in the order given."""
        for key, weight in state.blocks:
            self.insert(key, weight, None)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes


class _Node:
    __slots__ = ("colder", "hotter", "key", "weight")

    def __init__(self, key: BlockKey, weight: int) -> None:
        self.key = key
        self.weight = weight
        self.colder = self
        self.hotter = self

    def link_below(self, above: _Node) -> None:
        self.hotter, self.colder = above, above.colder
        above.colder.hotter = self
        above.colder = self

    def unlink(self) -> None:
        self.colder.hotter = self.hotter
        self.hotter.colder = self.colder
