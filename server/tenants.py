"""Who asked for what: totals by tenant, of which those of the whole server are the sum.

A tenant's totals go by its account, of which there is a bounded number. Runs on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from .accounts import Account, Accounts
from .core import Tier
from .tier_readings import TenantReading, TierTraffic


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

    account: Account
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
        used = dict(self.account.used)
        return TenantReading(
            self.account.tenant, self.lookups, self.traffic(), self.stored_blocks, used
        )


class Tenants:
    """The tallies of all tenants."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._tallies: dict[Account, Tally] = {}

    def tally(self, tenant: str) -> Tally:
        """Return the tally that a tenant's requests are counted in."""
        account = self._accounts.of(tenant)
        found = self._tallies.get(account)
        if found is None:
            found = self._tallies[account] = Tally(account)
        return found

    def below_device(self) -> tuple[int, int]:
        """Return the tokens that kvtier's tiers were asked for since the start, and served."""
        tallies = self._tallies.values()
        asked = sum(tally.asked[Tier.HOST] for tally in tallies)
        below = [tier for tier in Tier if tier is not Tier.DEVICE]
        return asked, sum(tally.hit[tier] for tally in tallies for tier in below)

    def readings(self) -> list[TenantReading]:
        """Return the totals of each tenant that was seen, nobody's first, then the shared ones."""
        tallies = [self._tallies[one] for one in self._accounts if one in self._tallies]
        return [tally.reading() for tally in tallies if tally != Tally(tally.account)]
