"""The prefixes of the host tier: heads of chains, with all that continues them.

A walk climbs from the end of each chain to its head, and goes no further up than to where an
earlier climb came along. Work in pieces (`walking.py`): what changes meanwhile may be counted twice
or not at all. Runs on the event loop.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from .block_readings import PrefixReading
from .core import BlockKey
from .directory import Block, Namespace
from .errors import KVTierError
from .walking import AT_ONCE, NEXT_TURN, Work, walk

_CURSOR = re.compile(r"(\d{1,18})-([0-9a-f]{64})")


class Order(StrEnum):
    """Which prefixes come first: those with the most of it."""

    BYTES = "bytes"
    USES = "uses"


class BadCursor(KVTierError):
    """A cursor that no page has given."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some prefixes, and the cursor to ask for what follows them."""

    total: int
    prefixes: list[PrefixReading]
    next: str | None


@dataclass(slots=True)
class _Tree:
    head: Block
    blocks: int = 0
    depth: int = 0
    ends: int = 0


def list_prefixes(
    space: Namespace, pinned: Iterable[BlockKey], order: Order, limit: int, cursor: str | None
) -> Work[Page]:
    """Return the next `limit` prefixes in order; `pinned` are heads of pins. Raises BadCursor."""
    after = None if cursor is None else _after(cursor)
    trees = yield from _trees(space)
    heads = set(pinned)

    def rank(tree: _Tree) -> tuple[int, str]:
        uses = space.uses.get(tree.head.key, 0)
        return -(uses if order is Order.USES else tree.blocks), tree.head.key.hex()

    ranked = [(rank(tree), tree) for tree in trees]
    left = [one for one in ranked if after is None or one[0] > after]
    first = heapq.nsmallest(limit, left, key=lambda one: one[0])
    last = first[-1][0] if len(first) < len(left) else None
    return Page(
        total=len(trees),
        prefixes=[_reading(space, tree, tree.head.key in heads) for _, tree in first],
        next=None if last is None else f"{-last[0]}-{last[1]}",
    )


def _after(cursor: str) -> tuple[int, str]:
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise BadCursor("The cursor is none that a page gave: ask without one for the first page.")
    return -int(match[1]), match[2]


def _reading(space: Namespace, tree: _Tree, pinned: bool) -> PrefixReading:
    parent = tree.head.parent
    return PrefixReading(
        head=tree.head.key.hex(),
        parent=None if parent is None else parent.key.hex(),
        blocks=tree.blocks,
        bytes=tree.blocks * space.pool.slot_bytes,
        depth=tree.depth,
        ends=tree.ends,
        uses=space.uses.get(tree.head.key, 0),
        pinned=pinned,
    )


def _trees(space: Namespace) -> Work[list[_Tree]]:
    trees: dict[BlockKey, _Tree] = {}
    forks: dict[Block, tuple[_Tree, int]] = {}
    """Where chains part: the tree, and the depth there."""
    for blocks in walk(space):
        steps = 0
        for block in blocks:
            if space.blocks.get(block.key) is block and not space.continued(block):
                steps += _climb(space, block, trees, forks)
                if steps > AT_ONCE:
                    steps = 0
                    yield NEXT_TURN
        yield NEXT_TURN
    return list(trees.values())


def _climb(
    space: Namespace,
    end: Block,
    trees: dict[BlockKey, _Tree],
    forks: dict[Block, tuple[_Tree, int]],
) -> int:
    """Count what leads to the end of a chain, as far as it is not counted. Returns how much."""
    path: list[Block] = []
    at: Block | None = end
    while at is not None and at not in forks:
        path.append(at)
        at = None if at.parent is None else space.blocks.get(at.parent.key)
    if at is not None:
        tree, depth = forks[at]
    else:
        head = path[-1]
        tree, depth = trees.setdefault(head.key, _Tree(head)), 0
    for block in reversed(path):
        depth += 1
        if space.anchors.get(block.key, block).children > 1:
            forks[block] = tree, depth
    tree.blocks += len(path)
    tree.depth = max(tree.depth, depth)
    tree.ends += 1
    return len(path)
