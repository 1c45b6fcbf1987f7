"""Room in a lower tier: which records go for others, and whether a tenant may have one more.

Tenants above a soft limit give up records before the tier's policy is asked, and a tenant at a hard
one makes room for its own. What goes leaves the index here; the caller removes it from the medium.
Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .accounts import Account
from .core import BlockKey, EvictReason, Tier
from .metrics import Metrics
from .records import Record, RecordIndex

DROPS_AT_ONCE = 64
"""Records that go at once."""
PASSED_AT_MOST = 1024
"""Records of a tenant that may not go and are passed over at once."""


class Way(NamedTuple):
    """What went for one more record of a tenant."""

    gone: list[Record]
    fits: bool
    """Whether its quota has room for it now."""


class Room:
    """Names what goes. `evictions` counts it."""

    def __init__(self, tier: Tier, index: RecordIndex, metrics: Metrics) -> None:
        self.evictions = 0
        self._tier = tier
        self._index = index
        self._counted = metrics.evictions_from(tier)

    def evict(self, size: int) -> list[Record]:
        """Take victims of `size` bytes out of the index, a bounded number."""
        gone: list[Record] = []
        freed = 0
        for owner in list(self._index.accounts.above_soft) if size > 0 else ():
            over = min(owner.above("soft", self._tier), size - freed)
            own = self.give_up(owner, over, None, DROPS_AT_ONCE - len(gone))
            gone += own
            freed += _bytes(own)
        own_count = len(gone)
        if freed < size and own_count < DROPS_AT_ONCE:
            for one in self._index.coldest():
                gone.append(one)
                freed += one.record_bytes
                if freed >= size or len(gone) == DROPS_AT_ONCE:
                    break
        self.count(len(gone) - own_count, EvictReason.CAPACITY)
        return gone

    def give_up(
        self, owner: Account, size: int, parent: bytes | None, at_most: int = DROPS_AT_ONCE
    ) -> list[Record]:
        """Take `size` bytes of a tenant's own coldest records out of the index, but not `parent`.

        A record that another one continues stays.
        """
        gone: list[Record] = []
        freed = passed = 0
        for one in self._index.own_coldest(owner, parent) if size > 0 and at_most > 0 else ():
            if one is None:
                passed += 1
                if passed > PASSED_AT_MOST:
                    break
                continue
            gone.append(one)
            freed += one.record_bytes
            if freed >= size or len(gone) == at_most:
                break
        owner.evicted += len(gone)
        self.count(len(gone), EvictReason.QUOTA)
        return gone

    def admit(self, owner: Account, size: int, parent: bytes | None) -> Way:
        """Let a tenant's own coldest records go for one more that continues `parent`."""
        if not owner.quota:
            return Way([], fits=True)
        gone = self.give_up(owner, owner.above("hard", self._tier, size), parent)
        fits = owner.above("hard", self._tier, size) <= 0
        owner.refused += not fits
        return Way(gone, fits)

    def count(self, records: int, reason: EvictReason) -> None:
        """Count what went."""
        self.evictions += records
        self._counted[self._index.policy.deciding, reason].inc(records)


def by_namespace(records: Iterable[Record]) -> dict[str, list[BlockKey]]:
    """Return the keys of records by namespace."""
    found: dict[str, list[BlockKey]] = {}
    for one in records:
        found.setdefault(one.namespace, []).append(one.key)
    return found


def _bytes(records: Iterable[Record]) -> int:
    return sum(one.record_bytes for one in records)
