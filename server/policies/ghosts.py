"""What a policy remembers of blocks that it evicted: how often they had been used."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

from ..core import BlockKey

TRIMMED_AT_ONCE = 1024
"""Ghosts beyond the bound before the oldest are forgotten, so that this costs O(1) a ghost."""
SLACK_SHARE = 16
"""The same for few ghosts: the bound ÷ this."""

NAME_BYTES = 8


class Ghosts:
    """The uses of the blocks evicted last, in the order of eviction.

    Keys are kept as 64-bit names: two blocks that share one would share a count, which harms
    nothing but a guess. A ghost takes about 80 bytes.
    """

    __slots__ = ("_uses",)

    def __init__(self, uses: Iterable[tuple[int, int]] = ()) -> None:
        self._uses = dict(uses)

    def remember(self, key: BlockKey, uses: int, most: int) -> None:
        """Keep the `uses` (at least 1) of an evicted block, and about `most` ghosts in all."""
        ghosts = self._uses
        ghosts[name_of(key)] = uses
        if len(ghosts) > most:
            self.trim(most)

    def trim(self, most: int) -> None:
        """Forget the oldest ghosts if there are clearly more than `most`."""
        ghosts = self._uses
        excess = len(ghosts) - most
        if too_many(excess, most):
            for oldest in list(islice(ghosts, excess)):
                del ghosts[oldest]

    def recall(self, key: BlockKey) -> int:
        """Return and forget how often a block had been used; 0 if it is no ghost."""
        return self._uses.pop(name_of(key), 0)

    def copy(self) -> Ghosts:
        """Return an independent copy."""
        return Ghosts(self._uses.items())

    def items(self) -> Iterable[tuple[int, int]]:
        """Return the names with their uses, oldest first."""
        return self._uses.items()

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: BlockKey) -> bool:
        return name_of(key) in self._uses

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ghosts) and list(self.items()) == list(other.items())

    __hash__ = None  # type: ignore[assignment]


def too_many(excess: int, most: int) -> bool:
    """Return whether ghosts beyond the bound of `most` are worth forgetting yet."""
    return excess > TRIMMED_AT_ONCE or excess > most // SLACK_SHARE


def name_of(key: BlockKey) -> int:
    """Return the last 64 bits of a key, which is a hash."""
    return int.from_bytes(key[-NAME_BYTES:], sys.byteorder, signed=True)


def names_of(keys: Sequence[BlockKey]) -> array[int]:
    """Return the names of keys; it is faster where these are equally long."""
    size, joined = len(keys[0]), b"".join(keys)
    if size % NAME_BYTES or len(joined) != size * len(keys):
        return array("q", map(name_of, keys))
    words = size // NAME_BYTES
    return array("q", joined)[words - 1 :: words]
