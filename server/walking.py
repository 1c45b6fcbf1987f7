"""Walking over the blocks of a namespace, a bounded number in one turn of the event loop.

A walk is a generator of pauses: whoever drives it waits for so many seconds after each, and others
change what is walked over meanwhile. A block that is visible all the while is met; one that comes
or goes meanwhile may be.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeAlias, TypeVar

from .directory import Block, Namespace

T = TypeVar("T")
AT_ONCE = 512
"""Blocks that are looked at in one turn of the loop."""
NEXT_TURN = 0.0

Work: TypeAlias = Generator[float, None, T]
"""Yields seconds to wait for, returns a result."""


def walk(space: Namespace) -> Iterator[list[Block]]:
    """Yield the visible blocks, in the order of their slots."""
    for row in list(space.by_slab.values()):
        for at in range(0, len(row), AT_ONCE):
            yield [block for block in row[at : at + AT_ONCE] if block is not None]


def above(space: Namespace, block: Block) -> Block | None:
    """Return what a block continues: the visible one, or else what is known of one that went."""
    parent = block.parent
    return None if parent is None else space.blocks.get(parent.key, parent)
