"""Quotas of tenants while the server runs: what counts from now on, and who is above it.

A tenant whose quota is lower than what its blocks take gives up its own coldest ones, those of the
slowest tier first, some of them in each turn of the loop. What is leased is waited for. Runs on the
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .accounts import ANYBODY, TIERS, Account
from .core import BlockKey, Tier
from .directory import Namespace
from .eviction import EVICTIONS_AHEAD
from .hierarchy import Hierarchy
from .lower import LowerTier
from .policies.base import Known
from .quota_section import QuotaMap
from .tier_readings import QuotaReading

KNOWN_AT_ONCE = 1024
"""Blocks that are put in their tenant's order in one turn of the loop."""
WAIT_SECONDS = 0.25
"""Between looks at blocks that may not go yet."""


class _Place(NamedTuple):
    """Where blocks have owners: a namespace of the host tier, or a lower tier."""

    known: tuple[Known, ...]
    owner_of: Callable[[BlockKey], Account | None]
    enter: Callable[[Account, Known], None]


class QuotaKeeper:
    """Brings tenants within their quotas, whatever those are by now."""

    def __init__(self, cache: Hierarchy) -> None:
        self._cache = cache
        self._accounts = cache.accounts
        self._ordered: set[Account] = set()
        """Tenants whose blocks are all in their orders."""
        self._changed = asyncio.Event()
        cache.metrics.add_quotas(self.readings)

    def set(self, quotas: QuotaMap) -> None:
        """Let these quotas count from now on; `run` sees to who is above them."""
        self._accounts.limit(quotas)
        for space in self._spaces():
            space.orders.prune()
        for lower in self._cache.lowers:
            lower.index.prune()
        self._ordered = {account for account in self._ordered if account.quota}
        self._changed.set()

    async def run(self) -> None:
        """Follow the quotas until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            for _ in self.settle():
                await asyncio.sleep(0)
            if self._above():
                await asyncio.sleep(WAIT_SECONDS)
                self._changed.set()

    def settle(self) -> Iterator[None]:
        """Put in order what quotas concern, and let go what is too much: a step each time."""
        yield from self._order()
        while sum(self._reduce(account) for account in self._above()):
            yield

    def readings(self) -> list[QuotaReading]:
        """Return the state of all tenants with quotas: listed ones first, then who is not."""
        listed = [self._accounts.of(name) for name in self._accounts.quotas if name != ANYBODY]
        rest = [one for one in self._accounts if one.quota and one not in listed]
        return [quota_reading(account) for account in (*listed, *rest)]

    def excess(self, quotas: QuotaMap) -> dict[Tier, int]:
        """Return the bytes of each tier that would have to go for other quotas."""
        found = dict.fromkeys(TIERS, 0)
        for account in self._accounts:
            quota = self._accounts.quota_in(quotas, account.tenant)
            left = dict(account.used)
            for tier in reversed(TIERS):
                over = left[tier] - quota.get(f"{tier}_hard", left[tier])
                all_over = sum(left.values()) - quota.get("hard", sum(left.values()))
                goes = min(max(over, all_over, 0), left[tier])
                left[tier] -= goes
                found[tier] += goes
        return found

    def _spaces(self) -> list[Namespace]:
        return list(self._cache.directory.namespaces.values())

    def _above(self) -> list[Account]:
        return [
            account
            for account in self._accounts
            if account.quota and any(account.above("hard", tier) > 0 for tier in TIERS)
        ]

    def _reduce(self, account: Account) -> int:
        """Let one tenant give up some blocks of one tier. Returns how many."""
        for lower in reversed(self._cache.lowers):
            if (over := account.above("hard", lower.tier)) > 0:
                gone = lower.make_way(account, over)
                if gone:
                    return gone
        self._cache.record_use()
        for space in self._spaces():
            if (over := account.above("hard", Tier.HOST)) > 0:
                most = min(-(-over // space.pool.slot_bytes), EVICTIONS_AHEAD)
                if gone := self._cache.evictor.give_up(space, account, most):
                    return gone
        return 0

    def _order(self) -> Iterator[None]:
        """Put the blocks of tenants in order whose quotas are new, as their policies have them."""
        fresh = {one for one in self._accounts if one.quota and one not in self._ordered}
        self._ordered |= fresh
        if not any(sum(one.used.values()) for one in fresh):
            return
        for place in self._places():
            for at in range(0, len(place.known), KNOWN_AT_ONCE):
                for known in place.known[at : at + KNOWN_AT_ONCE]:
                    if (owner := place.owner_of(known.key)) is not None:
                        place.enter(owner, known)
                yield

    def _places(self) -> Iterator[_Place]:
        for space in self._spaces():
            yield _in_host(space)
        for lower in self._cache.lowers:
            yield _in_lower(lower)


def quota_reading(account: Account) -> QuotaReading:
    """Return where a tenant stands."""
    return QuotaReading(
        tenant=account.tenant,
        quota=dict(account.quota),
        used_bytes=dict(account.used),
        fullness=account.fullness(),
        evicted_blocks=account.evicted,
        refused_blocks=account.refused,
    )


def _in_host(space: Namespace) -> _Place:
    def enter(owner: Account, known: Known) -> None:
        space.orders.add(owner, known.key, known.weight, known.parent)

    return _Place(space.policy.export().blocks, space.owner_of, enter)


def _in_lower(lower: LowerTier) -> _Place:
    index = lower.index

    def enter(owner: Account, known: Known) -> None:
        index.enter(owner, known.key, known.weight, known.parent)

    return _Place(index.policy.export().blocks, index.owner_of, enter)
