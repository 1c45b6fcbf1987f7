"""Linked lists from cold to hot, which the policies are made of."""

from __future__ import annotations

from typing import Self

from ..core import BlockKey

MOST_USES = 255
"""Counts of uses stop here: nothing looks at more, and integers up to here take no memory."""


class Link:
    """A place in a list, or a list's sentinel.

    From a sentinel, `hotter` is the coldest of its list and `colder` the hottest.
    """

    __slots__ = ("colder", "hotter")
    colder: Self
    hotter: Self

    def __init__(self: Self) -> None:
        self.colder = self
        self.hotter = self

    def link_below(self, above: Self) -> None:
        """Enter a list as the next colder of `above`; below its sentinel is the hottest place."""
        self.hotter, self.colder = above, above.colder
        above.colder.hotter = self
        above.colder = self

    def link_above(self, below: Self) -> None:
        """Enter a list as the next hotter of `below`; above its sentinel is the coldest place."""
        self.colder, self.hotter = below, below.hotter
        below.hotter.colder = self
        below.hotter = self

    def move_below(self, above: Self) -> None:
        """Leave a list, and enter one as the next colder of `above`."""
        self.colder.hotter, self.hotter.colder = self.hotter, self.colder
        self.hotter, self.colder = above, above.colder
        above.colder.hotter = self
        above.colder = self

    def unlink(self) -> None:
        """Leave a list. The links of this one stay, so that a walk may go on from it."""
        self.colder.hotter = self.hotter
        self.hotter.colder = self.colder


class Node(Link):
    """One block in a list."""

    __slots__ = ("key", "parent", "uses", "weight")

    def __init__(
        self, key: BlockKey, weight: int, parent: BlockKey | None = None, uses: int = 1
    ) -> None:
        super().__init__()
        self.key = key
        self.weight = weight
        self.parent = parent
        self.uses = uses
