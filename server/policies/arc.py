"""Adaptive replacement cache: blocks used once against blocks used again, with a moving border.

Two lists, each by recency: blocks used once, and blocks used at least twice. Ghosts of either say
which list was cut too short, and shift the `target` size of the first one. After Megiddo and
Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain as joined
from typing import ClassVar

from ..core import BlockKey
from .base import EvictionPolicy, PolicyState
from .ghosts import Ghosts
from .links import MOST_USES
from .tree import TreeNode, eviction_order, plant, walk

ONCE, AGAIN = 0, 1


class ARC(EvictionPolicy):
    """ARC. Every operation is O(1) a block. The target is in bytes, ghosts are counted."""

    name: ClassVar[str] = "arc"

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, _Node] = {}
        self._lists = (_Node(b"", 0), _Node(b"", 0))
        self._bytes = [0, 0]
        self._ghosts = (Ghosts(), Ghosts())
        self._target = 0.0
        """Bytes that blocks used once may take before they go first."""

    def insert(self, keys: Sequence[BlockKey], weight: int, parent: BlockKey | None) -> None:
        """Take in blocks, one after the other."""
        for key in keys:
            self._insert(key, weight, parent)
            parent = key

    def _insert(self, key: BlockKey, weight: int, parent: BlockKey | None) -> None:
        """Take in a block as used once; a ghost shifts the target and counts as used again."""
        nodes = self._nodes
        assert key not in nodes, "a block is inserted once"
        above = None if parent is None else nodes.get(parent)
        uses = self._recall(key, weight) + 1
        node = nodes[key] = _Node(key, weight, parent, min(uses, MOST_USES))
        node.grow_from(above)
        node.which = AGAIN if uses > 1 and (above is None or above.which == AGAIN) else ONCE
        self._bytes[node.which] += weight
        if above is None or above.which != node.which or above.parked:
            above = self._lists[node.which]
        node.link_below(above)

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Move the chain to the hot end of the blocks used again, its head above its tail."""
        above = self._lists[AGAIN]
        for node in map(self._nodes.get, chain):
            if node is None or node is above:
                continue
            if node.uses < MOST_USES:
                node.uses += 1
            if node.which == ONCE:
                node.which = AGAIN
                self._bytes[ONCE] -= node.weight
                self._bytes[AGAIN] += node.weight
            if above.colder is not node or node.parked:
                node.move_below(above)
            above = node

    def remove(self, key: BlockKey) -> None:
        """Forget a resident block."""
        self._take_out(key)

    def evict(self, key: BlockKey) -> None:
        """Take out a block and remember which list it was in."""
        most = len(self._nodes)
        held = self._bytes[ONCE] / sum(self._bytes)
        node = self._take_out(key)
        once, again = self._ghosts
        self._ghosts[node.which].remember(key, node.uses, most)
        once.trim(int(most * (1.0 - held)))
        again.trim(max(most - len(once), 0))

    def victims(self) -> Iterator[BlockKey]:
        """Yield blocks without children: the coldest of the list that is above its target."""
        before = -1
        while before != len(self._nodes):
            # A parent may enter below blocks that were passed over: it comes in the next round.
            before = len(self._nodes)
            last = [*self._lists]
            while (which := self._next_list(last)) is not None:
                node = last[which].hotter
                if node.children:
                    node.park()
                    continue
                yield node.key
                if node.key in self._nodes:
                    last[which] = node

    def export(self) -> PolicyState:
        """Return the blocks with their uses, those used once first, and the ghosts."""
        listed = joined(*map(walk, self._lists))
        order = eviction_order(self._nodes, listed, lambda node: node.uses if node.which else 1)
        ghosts = Ghosts(joined(*(ghosts.items() for ghosts in self._ghosts)))
        return PolicyState(order, ghosts, {"target": self._target})

    def adopt(self, state: PolicyState) -> None:
        """Take over blocks and ghosts, by their uses, and an ARC's target."""
        self._nodes = plant(state.blocks, _Node)
        for node in self._nodes.values():
            node.which = AGAIN if node.uses > 1 else ONCE
            node.link_below(self._lists[node.which])
            self._bytes[node.which] += node.weight
        seen = list(state.ghosts.items())
        self._ghosts = (
            Ghosts(ghost for ghost in seen if ghost[1] == 1),
            Ghosts(ghost for ghost in seen if ghost[1] > 1),
        )
        self._target = state.learnt.get("target", 0.0)

    @property
    def resident(self) -> Collection[BlockKey]:
        """The blocks that are there."""
        return self._nodes

    def _recall(self, key: BlockKey, weight: int) -> int:
        """Return a ghost's uses, and shift the target for it."""
        once, again = self._ghosts
        if uses := once.recall(key):
            step = weight * max(1.0, len(again) / (len(once) + 1))
            self._target = min(self._target + step, float(sum(self._bytes)))
        elif uses := again.recall(key):
            step = weight * max(1.0, len(once) / (len(again) + 1))
            self._target = max(self._target - step, 0.0)
        return uses

    def _next_list(self, last: Sequence[_Node]) -> int | None:
        """Return the list that the next victim is in, beyond the `last` that were passed over."""
        first = ONCE if self._bytes[ONCE] > self._target else AGAIN
        for which in (first, 1 - first):
            if last[which].hotter is not self._lists[which]:
                return which
        return None

    def _take_out(self, key: BlockKey) -> _Node:
        node = self._nodes.pop(key)
        self._bytes[node.which] -= node.weight
        place = None if node.parked else node.colder
        if (above := node.leave()) is not None:
            same = place is not None and above.which == node.which
            above.link_above(place if place and same else self._lists[above.which])
        return node


class _Node(TreeNode):
    """A block of ARC, and which of the two lists it belongs to."""

    __slots__ = ("which",)

    def __init__(
        self, key: BlockKey, weight: int, parent: BlockKey | None = None, uses: int = 1
    ) -> None:
        super().__init__(key, weight, parent, uses)
        self.which = ONCE
