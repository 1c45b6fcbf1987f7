"""Whose blocks take how many bytes of which tier, and how many they may take.

A block is charged to the tenant that stored it first, in each tier that holds it. A request names
its tenant, so that their number is not ours to choose: the first so many have accounts of their own
and all later ones share one. Only a tenant with a quota has an order of its blocks, from which its
own ones go first. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from .core import BlockKey, Tier
from .policies.lru import LRU

TENANTS_AT_MOST = 1000
NOBODY = ""
"""The tenant of requests that name none."""
OTHER = "other"
"""Where tenants beyond that number are counted."""
ANYBODY = "*"
"""Stands for each tenant that names itself and has no quota of its own."""
TIERS = (Tier.HOST, Tier.DISK, Tier.REDIS)
LIMITS = ("soft", "hard")
QUOTA_KEYS = (*LIMITS, *(f"{tier}_{limit}" for tier in TIERS for limit in LIMITS))
NO_LIMIT = 1 << 62

Quota: TypeAlias = Mapping[str, int]
"""Bytes by `QUOTA_KEYS`; those without a tier count all tiers together. Empty: no quota."""
Limit: TypeAlias = Literal["soft", "hard"]


class Account:
    """One tenant's bytes. `number` is small, and names the account in a lower tier's index."""

    __slots__ = ("_judge", "evicted", "number", "promised", "quota", "refused", "tenant", "used")

    def __init__(self, tenant: str, number: int, judge: Callable[[Account], None]) -> None:
        self.tenant = tenant
        self.number = number
        self.quota: Quota = {}
        self.used = dict.fromkeys(TIERS, 0)
        self.promised = dict.fromkeys(TIERS, 0)
        """Bytes of writes under way."""
        self.evicted = 0
        """Blocks that went for its quota."""
        self.refused = 0
        """Blocks that its quota had no room for."""
        self._judge = judge

    def charge(self, tier: Tier, size: int) -> None:
        """Count a block that came, or went if `size` is negative."""
        self.used[tier] += size
        if self.quota:
            self._judge(self)

    def above_all(self, limit: Limit, more: int = 0) -> int:
        """Return the bytes above the limit of all tiers together, with so many more."""
        taken = sum(self.used.values()) + sum(self.promised.values())
        return taken + more - self.quota.get(limit, NO_LIMIT)

    def above(self, limit: Limit, tier: Tier, more: int = 0) -> int:
        """Return the bytes of a tier that are too many, with so many more; 0 or less for none.

        What is under way to a tier counts as there.
        """
        if not self.quota:
            return 0
        taken = self.used[tier] + self.promised[tier]
        here = taken + more - self.quota.get(f"{tier}_{limit}", NO_LIMIT)
        return max(here, self.above_all(limit, more))

    def fullness(self) -> float:
        """Return the largest share of a hard limit that is taken; 0.0 without one."""
        shares = [self.used[tier] / self.quota.get(f"{tier}_hard", NO_LIMIT) for tier in TIERS]
        return max(*shares, sum(self.used.values()) / self.quota.get("hard", NO_LIMIT))


class Accounts:
    """The accounts of all tenants, and their quotas."""

    def __init__(self) -> None:
        self.quotas: Mapping[str, Quota] = {}
        self.above_soft: dict[Account, None] = {}
        """Accounts above a soft limit, which give up blocks first."""
        self._all: list[Account] = []
        self._by_name: dict[str, Account] = {}
        self._unlisted = 0
        self.nobody = self._open(NOBODY)
        self._other = self._open(OTHER)

    def __iter__(self) -> Iterator[Account]:
        return iter(list(self._all))

    def of(self, tenant: str) -> Account:
        """Return the account that a tenant's blocks are charged to."""
        found = self._by_name.get(tenant)
        if found is None:
            if tenant not in self.quotas:
                if self._unlisted >= TENANTS_AT_MOST:
                    return self._other
                self._unlisted += 1
            found = self._open(tenant)
        return found

    def numbered(self, number: int) -> Account:
        """Return an account by its number."""
        return self._all[number]

    def limit(self, quotas: Mapping[str, Quota]) -> None:
        """Let other quotas count from now on; who is above one by then is not seen to here."""
        self.quotas = quotas
        for account in self._all:
            account.quota = self.quota_in(quotas, account.tenant)
            self._judge(account)

    def quota_in(self, quotas: Mapping[str, Quota], tenant: str) -> Quota:
        """Return a tenant's quota by such quotas."""
        default = {} if tenant == NOBODY else quotas.get(ANYBODY, {})
        return default if tenant == ANYBODY else quotas.get(tenant, default)

    def _open(self, tenant: str) -> Account:
        account = self._by_name[tenant] = Account(tenant, len(self._all), self._judge)
        account.quota = self.quota_in(self.quotas, tenant)
        self._all.append(account)
        return account

    def _judge(self, account: Account) -> None:
        """Take note of whether an account is above a soft limit."""
        if any(account.above("soft", tier) > 0 for tier in TIERS):
            self.above_soft[account] = None
        else:
            self.above_soft.pop(account, None)


class Orders:
    """The blocks of tenants with quotas in one place, each tenant's from cold to hot."""

    def __init__(self) -> None:
        self._orders: dict[Account, LRU] = {}

    def __bool__(self) -> bool:
        return bool(self._orders)

    def add(self, owner: Account, key: BlockKey, weight: int, parent: BlockKey | None) -> None:
        """Take in a block, unless it is known already or its owner has no quota."""
        if owner.quota:
            order = self._orders.get(owner)
            if order is None:
                order = self._orders[owner] = LRU()
            if key not in order:
                order.insert([key], weight, parent)

    def remove(self, owner: Account, key: BlockKey) -> None:
        """Forget a block, if it is known."""
        order = self._orders.get(owner)
        if order is not None and key in order:
            order.remove(key)

    def touch(self, chain: Sequence[BlockKey], owner_of: Callable[[BlockKey], object]) -> None:
        """Record one request's use of a chain."""
        owners = {owner_of(key) for key in chain}
        for owner, order in self._orders.items():
            if owner in owners:
                order.touch(chain)

    def coldest(self, owner: Account) -> Iterator[BlockKey]:
        """Yield an owner's blocks, the coldest first; see `EvictionPolicy.victims`."""
        order = self._orders.get(owner)
        return iter(()) if order is None else order.victims()

    def known(self, owner: Account) -> set[BlockKey]:
        """Return an owner's blocks as far as they are known here. O(blocks)."""
        order = self._orders.get(owner)
        return set() if order is None else set(order.resident)

    def prune(self) -> None:
        """Forget the orders of tenants that have no quota any more."""
        for owner in [owner for owner in self._orders if not owner.quota]:
            del self._orders[owner]
