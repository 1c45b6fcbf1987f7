"""Who asked for what: totals by tenant, of which those of the whole server are the sum.

A request names its tenant, so their number is not ours to choose: the first so many have totals of
their own, and all later ones share one. Runs on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .core import TenantReading, Tier

TENANTS_AT_MOST = 1000
OTHER = "other"
"""Where tenants beyond that number are counted."""
NOBODY = ""
"""The tenant of requests that name none."""


class Asked(Protocol):
    """Blocks that prompts could have reused; of these, so many came from the two tiers."""

    tenant: str
    asked: int
    device: int
    host: int


@dataclass(slots=True)
class Tally:
    """The totals of one tenant."""

    tenant: str
    lookups: int = 0
    device_tokens_asked: int = 0
    device_tokens_hit: int = 0
    host_tokens_asked: int = 0
    host_tokens_hit: int = 0
    stored_blocks: int = 0

    def count(self, asked: Asked, block_tokens: int) -> dict[Tier, tuple[int, int]]:
        """Add what was asked and served. Returns the tokens that were added, by tier.

        A tier is asked for what the tiers above it did not hold.
        """
        device = (asked.asked * block_tokens, asked.device * block_tokens)
        host = (max(asked.asked - asked.device, 0) * block_tokens, asked.host * block_tokens)
        self.device_tokens_asked += device[0]
        self.device_tokens_hit += device[1]
        self.host_tokens_asked += host[0]
        self.host_tokens_hit += host[1]
        return {Tier.DEVICE: device, Tier.HOST: host}

    def reading(self) -> TenantReading:
        """Return the totals at this moment."""
        return TenantReading(
            tenant=self.tenant,
            lookups=self.lookups,
            device_tokens_asked=self.device_tokens_asked,
            device_tokens_hit=self.device_tokens_hit,
            host_tokens_asked=self.host_tokens_asked,
            host_tokens_hit=self.host_tokens_hit,
            stored_blocks=self.stored_blocks,
        )


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

    def readings(self) -> list[TenantReading]:
        """Return the totals of each tenant that was seen, in the order of their first requests."""
        tallies = [*self._shared.values(), *self._named.values()]
        return [tally.reading() for tally in tallies if tally != Tally(tally.tenant)]
