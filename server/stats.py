"""The totals that `/v1/stats` serves and `kvtier status` shows."""

from __future__ import annotations

from dataclasses import dataclass

from . import __version__
from .core import StoreOutcome, Tier
from .hierarchy import Hierarchy


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Prompt tokens in whole blocks: what a tier was asked for since the start, and served."""

    tier: Tier
    tokens_asked: int
    tokens_hit: int

    @property
    def hit_ratio(self) -> float:
        """Served over asked; 0.0 when nothing was asked."""
        return self.tokens_hit / self.tokens_asked if self.tokens_asked else 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since the server started. Ratios are 0.0 to 1.0, and 0.0 over nothing."""

    version: str
    ready: bool
    """Whether all memory is allocated; before that, fewer blocks can be kept."""
    lookups: int
    traffic: list[TierTraffic]
    """Upper tiers first. A tier was asked for what the tiers above it did not hold."""
    host_hit_ratio: float
    """Tokens that the host tier served, over those that it was asked for."""
    total_hit_ratio: float
    """Tokens that any tier served, over all prompt tokens in whole blocks."""
    stores: dict[StoreOutcome, int]


def read_stats(hierarchy: Hierarchy, *, ready: bool) -> Stats:
    """Return the totals at this moment."""
    traffic = hierarchy.traffic()
    return Stats(
        version=__version__,
        ready=ready,
        lookups=traffic.lookups,
        traffic=[
            TierTraffic(Tier.DEVICE, traffic.device_tokens_asked, traffic.device_tokens_hit),
            TierTraffic(Tier.HOST, traffic.host_tokens_asked, traffic.host_tokens_hit),
        ],
        host_hit_ratio=traffic.host_hit_ratio,
        total_hit_ratio=traffic.total_hit_ratio,
        stores=traffic.stores,
    )
