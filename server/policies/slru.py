"""Segmented LRU with ghosts: a block is on probation until its second use.

Used again, it is protected; when too much is protected, the coldest of it is back on probation.
An evicted block that is wanted again soon is protected at once. Probation and protected segment,
one after the other, are one list from cold to hot, as in MQ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from ..core import BlockKey
from .base import EvictionPolicy, Known, PolicyState, credited_uses
from .ghosts import Ghosts
from .links import MOST_USES, Node

PROTECTED_SHARE = 0.8
"""Share of the resident bytes that may be protected."""
GHOSTS_SHARE = 1
"""Ghosts kept, as a multiple of the resident blocks."""


class SLRU(EvictionPolicy):
    """SLRU with ghosts. Every operation is O(1) a block."""

    name: ClassVar[str] = "slru"

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, _Node] = {}
        self._probation = _Node(b"", 0)
        self._protected = _Node(b"", 0)
        self._ghosts = Ghosts()
        self._bytes = 0
        self._protected_bytes = 0

    def insert(self, keys: Sequence[BlockKey], weight: int, parent: BlockKey | None) -> None:
        """Take in blocks, one after the other."""
        for key in keys:
            self._insert(key, weight, parent)
            parent = key

    def _insert(self, key: BlockKey, weight: int, parent: BlockKey | None) -> None:
        """Take in a block on probation; a ghost is protected, unless its parent is not."""
        assert key not in self._nodes, "a block is inserted once"
        above = None if parent is None else self._nodes.get(parent)
        seen = self._ghosts.recall(key)
        node = self._nodes[key] = _Node(key, weight, parent, min(seen + 1, MOST_USES))
        self._bytes += weight
        node.protected = bool(seen) and (above is None or above.protected)
        if node.protected:
            self._protected_bytes += weight
        if above is None or above.protected != node.protected:
            above = self._protected if node.protected else self._probation
        node.link_below(above)

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Protect the chain, its head above its tail."""
        self._settle()
        above = self._protected
        for node in map(self._nodes.get, chain):
            if node is None or node is above:
                continue
            if node.uses < MOST_USES:
                node.uses += 1
            if not node.protected:
                node.protected = True
                self._protected_bytes += node.weight
            if above.colder is not node:
                node.unlink()
                node.link_below(above)
            above = node

    def remove(self, key: BlockKey) -> None:
        """Forget a resident block."""
        self._take_out(key)

    def evict(self, key: BlockKey) -> None:
        """Take out a block and remember its uses."""
        most = GHOSTS_SHARE * len(self._nodes)
        self._ghosts.remember(key, self._take_out(key).uses, most)

    def victims(self) -> Iterator[BlockKey]:
        """Yield blocks on probation from the coldest on, then the protected ones."""
        for segment in (self._probation, self._protected):
            node = segment.hotter
            while node is not segment:
                hotter = node.hotter
                yield node.key
                node = hotter

    def export(self) -> PolicyState:
        """Return the blocks in order, with their uses, and the ghosts."""
        nodes = map(self._nodes.__getitem__, self.victims())
        blocks = tuple(Known(n.key, n.weight, n.uses, n.parent) for n in nodes)
        return PolicyState(blocks, self._ghosts.copy())

    def adopt(self, state: PolicyState) -> None:
        """Take over order, uses and ghosts; the hottest that were all used twice are protected."""
        for known, credited in zip(state.blocks, credited_uses(state.blocks), strict=True):
            node = self._nodes[known.key] = _Node(*known.node())
            node.protected = credited > 1
            node.link_below(self._protected if node.protected else self._probation)
            self._bytes += node.weight
            self._protected_bytes += node.weight if node.protected else 0
        self._ghosts = Ghosts(state.ghosts.items())

    @property
    def resident(self) -> Collection[BlockKey]:
        """The blocks that are there."""
        return self._nodes

    def _take_out(self, key: BlockKey) -> _Node:
        node = self._nodes.pop(key)
        node.unlink()
        self._bytes -= node.weight
        if node.protected:
            self._protected_bytes -= node.weight
        return node

    def _settle(self) -> None:
        """Put the coldest protected blocks back on probation, while there are too many.

        Only at the next request: what came in for the last one is colder than they are.
        """
        most = PROTECTED_SHARE * self._bytes
        while self._protected_bytes > most:
            node = self._protected.hotter
            node.unlink()
            node.link_below(self._probation)
            node.protected = False
            self._protected_bytes -= node.weight


class _Node(Node):
    __slots__ = ("protected",)

    def __init__(
        self, key: BlockKey, weight: int, parent: BlockKey | None = None, uses: int = 1
    ) -> None:
        super().__init__(key, weight, parent, uses)
        self.protected = False
