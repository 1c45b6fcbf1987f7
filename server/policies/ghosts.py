"""What a policy remembers of blocks that it evicted: how often they had been used."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, repeat

from ..core import BlockKey

TRIMMED_AT_ONCE = 1024
"""Ghosts beyond the bound before the oldest are forgotten, so that this costs O(1) a ghost."""
SLACK_SHARE = 16
"""The same for few ghosts: the bound ÷ this."""


class Ghosts:
    """The uses of the blocks evicted last, in the order of eviction.

    Keys are kept as 64-bit hashes: two blocks that share one would share a count, which harms
    nothing but a guess. A ghost takes about 80 bytes.
    """

    __slots__ = ("_uses",)

    def __init__(self, uses: Iterable[tuple[int, int]] = ()) -> None:
        self._uses = dict(uses)

    def remember(self, key: BlockKey, uses: int, most: int) -> None:
        """Keep the `uses` (at least 1) of an evicted block, and about `most` ghosts in all."""
        ghosts = self._uses
        ghosts[hash(key)] = uses
        if len(ghosts) > most:
            self.trim(most)

    def remember_all(self, evicted: Iterable[BlockKey], uses: int) -> None:
        """Keep the `uses` of several evicted blocks; `trim` what is too many then."""
        self._uses.update(zip(map(hash, evicted), repeat(uses)))

    def trim(self, most: int) -> None:
        """Forget the oldest ghosts if there are clearly more than `most`."""
        ghosts = self._uses
        excess = len(ghosts) - most
        if excess > TRIMMED_AT_ONCE or excess > most // SLACK_SHARE:
            for oldest in list(islice(ghosts, excess)):
                del ghosts[oldest]

    def recall(self, key: BlockKey) -> int:
        """Return and forget how often a block had been used; 0 if it is no ghost."""
        return self._uses.pop(hash(key), 0)

    def recall_all(self, keys: Iterable[BlockKey]) -> list[int]:
        """Return and forget how often each block had been used."""
        forget = self._uses.pop
        return [forget(name, 0) for name in map(hash, keys)]

    def has_none_of(self, keys: Iterable[BlockKey]) -> bool:
        """Return whether none of the keys is a ghost."""
        return self._uses.keys().isdisjoint(map(hash, keys))

    def copy(self) -> Ghosts:
        """Return an independent copy."""
        return Ghosts(self._uses.items())

    def items(self) -> Iterable[tuple[int, int]]:
        """Return the hashes with their uses, oldest first."""
        return self._uses.items()

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: BlockKey) -> bool:
        return hash(key) in self._uses

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ghosts) and list(self.items()) == list(other.items())

    __hash__ = None  # type: ignore[assignment]
