"""Nodes that know their parents, for policies whose order alone does not keep chains whole.

Such a policy names no block that has children. One that is next to go while it has some is
*parked*, in no list, until the last of them went: each step stays O(1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Self, TypeVar

from ..core import BlockKey
from .base import Known
from .links import Node


class TreeNode(Node):
    """A block's place in a list and in the tree of chains."""

    __slots__ = ("above", "children", "parked")

    def __init__(
        self, key: BlockKey, weight: int, parent: BlockKey | None = None, uses: int = 1
    ) -> None:
        super().__init__(key, weight, parent, uses)
        self.above: Self | None = None
        """The parent, where it was resident when this block came."""
        self.children = 0
        self.parked = False

    def grow_from(self, above: Self | None) -> None:
        """Become a child of `above`, if there is one."""
        self.above = above
        if above is not None:
            above.children += 1

    def park(self) -> None:
        """Leave the list while children last."""
        self.unlink()
        self.parked = True

    def move_below(self, above: Self) -> None:
        """Go to the place below `above`, from wherever it is."""
        if self.parked:
            self.parked = False
        else:
            self.unlink()
        self.link_below(above)

    def leave(self) -> Self | None:
        """Leave list and tree. Returns the parent if it was parked and has no child any more."""
        if self.parked:
            self.parked = False
        else:
            self.unlink()
        above = self.above
        if above is not None:
            above.children -= 1
            if above.parked and not above.children:
                above.parked = False
                return above
        return None


T = TypeVar("T", bound=TreeNode)


def walk(ring: T) -> Iterator[T]:
    """Yield the nodes of a list, coldest first."""
    node = ring.hotter
    while node is not ring:
        yield node
        node = node.hotter


def eviction_order(
    nodes: Mapping[BlockKey, T], listed: Iterable[T], uses: Callable[[T], int] | None = None
) -> tuple[Known, ...]:
    """Return all blocks as they would go: as `listed`, but each parent right after its children.

    `nodes` are all blocks; one that is not listed has children. `uses` says what to state as a
    block's uses.
    """
    left = {key: node.children for key, node in nodes.items()}
    in_turn = list(listed)
    waits = nodes.keys() - {node.key for node in in_turn}
    order: list[Known] = []
    for each in in_turn:
        node: T | None = each
        while node is not None:
            if left[node.key]:
                waits.add(node.key)
                break
            stated = node.uses if uses is None else uses(node)
            order.append(Known(node.key, node.weight, stated, node.parent))
            above, node = node.above, None
            if above is not None and nodes.get(above.key) is above:
                left[above.key] -= 1
                node = above if above.key in waits and not left[above.key] else None
    return tuple(order)


def plant(
    blocks: Sequence[Known], make: Callable[[BlockKey, int, BlockKey | None, int], T]
) -> dict[BlockKey, T]:
    """Return nodes for blocks that were handed over, in their order, each with its parent."""
    nodes = {known.key: make(*known.node()) for known in blocks}
    for node in nodes.values():
        if node.parent is not None:
            node.grow_from(nodes.get(node.parent))
    return nodes
