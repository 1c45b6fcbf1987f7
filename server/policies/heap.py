"""A heap of nodes that know their places in it, so that one can be moved or taken out.

Nothing is left behind that somebody has to clear away later: each step is O(log n), also the worst.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

NOWHERE = -1
"""Place of a node that is in no heap."""


class Placed(Protocol):
    """What a heap holds."""

    place: int


N = TypeVar("N", bound=Placed)


class Heap(Generic[N]):
    """Nodes by rank, the least first. No two have the same rank."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, int], N]] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first(self) -> N:
        """The node of the least rank."""
        return self._entries[0][1]

    def put(self, node: N, rank: tuple[float, int]) -> None:
        """Put a node in, or give it another rank."""
        entry = (rank, node)
        if node.place == NOWHERE:
            node.place = len(self._entries)
            self._entries.append(entry)
        self._settle(entry, node.place)

    def take(self, node: N) -> None:
        """Take a node out."""
        place = node.place
        assert place != NOWHERE, "a node is taken out once"
        node.place = NOWHERE
        last = self._entries.pop()
        if last[1] is not node:
            self._settle(last, place)

    def _settle(self, entry: tuple[tuple[float, int], N], place: int) -> None:
        """Let an entry rise or sink from a place to its own."""
        entries, rank = self._entries, entry[0]
        while place and rank < (above := entries[(place - 1) >> 1])[0]:
            entries[place] = above
            above[1].place = place
            place = (place - 1) >> 1
        size = len(entries)
        while (below := 2 * place + 1) < size:
            if below + 1 < size and entries[below + 1][0] < entries[below][0]:
                below += 1
            lower = entries[below]
            if rank < lower[0]:
                break
            entries[place] = lower
            lower[1].place = place
            place = below
        entries[place] = entry
        entry[1].place = place
