"""Who asked for what: totals by tenant, of which those of the whole server are the sum.

A request names its tenant, so their number is not ours to choose: the first so many have totals of
their own, and all later ones share one. Runs on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from .core import TenantReading, Tier, TierTraffic
from .metrics import OTHER_TENANT

TENANTS_AT_MOST = 1000
OTHER = OTHER_TENANT
"""Where tenants beyond that number are counted."""
NOBODY = ""
"""The tenant of requests that name none."""


class Asked(Protocol):
    """Blocks that prompts could have reused; of these, so many came from each tier."""

    tenant: str
    asked: int
    device: int
    host: int
    disk: int
    redis: int


@dataclass(slots=True)
class Tally:
    """The totals of one tenant, in tokens by tier."""

    tenant: str
    lookups: int = 0
    asked: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    hit: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    stored_blocks: int = 0

    def count(self, asked: Asked, block_tokens: int) -> dict[Tier, tuple[int, int]]:
        """Add what was asked and served. Returns the tokens that were added, by tier.

        A tier is asked for what the tiers above it did not hold.
        """
        added: dict[Tier, tuple[int, int]] = {}
        left = asked.asked
        hits = (asked.device, asked.host, asked.disk, asked.redis)
        for tier, hit in zip(Tier, hits, strict=True):
            added[tier] = (max(left, 0) * block_tokens, hit * block_tokens)
            self.asked[tier] += added[tier][0]
            self.hit[tier] += added[tier][1]
            left -= hit
        return added

    def traffic(self) -> list[TierTraffic]:
        """Return what each tier was asked for and served, the upper ones first."""
        return [TierTraffic(tier, self.asked[tier], self.hit[tier]) for tier in Tier]

    def reading(self) -> TenantReading:
        """Return the totals at this moment."""
        return TenantReading(self.tenant, self.lookups, self.traffic(), self.stored_blocks)


class Tenants:
    """The tallies of all tenants."""

    def __init__(self) -> None:
        self._named: dict[str, Tally] = {}
        self._shared = {NOBODY: Tally(NOBODY), OTHER: Tally(OTHER)}

    def tally(self, tenant: str) -> Tally:
        """Return the tally that a tenant's requests are counted in."""
        found = self._named.get(tenant) or self._shared.get(tenant)
        if found is None:
            if len(self._named) >= TENANTS_AT_MOST:
                return self._shared[OTHER]
            found = self._named[tenant] = Tally(tenant)
        return found

    def below_device(self) -> tuple[int, int]:
        """Return the tokens that kvtier's tiers were asked for since the start, and served."""
        tallies = [*self._shared.values(), *self._named.values()]
        asked = sum(tally.asked[Tier.HOST] for tally in tallies)
        below = [tier for tier in Tier if tier is not Tier.DEVICE]
        return asked, sum(tally.hit[tier] for tally in tallies for tier in below)

    def readings(self) -> list[TenantReading]:
        """Return the totals of each tenant that was seen, in the order of their first requests."""
        tallies = [*self._shared.values(), *self._named.values()]
        return [tally.reading() for tally in tallies if tally != Tally(tally.tenant)]
