"""The totals that `/v1/stats` serves and `kvtier status` shows."""

from __future__ import annotations

from dataclasses import dataclass

from . import __version__
from .core import StoreOutcome
from .readings import Readings
from .tier_readings import TierTraffic


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since the server started. Ratios are 0.0 to 1.0, and 0.0 over nothing."""

    version: str
    ready: bool
    """Whether all memory is allocated; before that, fewer blocks can be kept."""
    lookups: int
    traffic: list[TierTraffic]
    """Upper tiers first. A tier was asked for what the tiers above it did not hold."""
    total_hit_ratio: float
    """Tokens that any tier served, over all prompt tokens in whole blocks."""
    stores: dict[StoreOutcome, int]


def read_stats(readings: Readings, *, ready: bool) -> Stats:
    """Return the totals at this moment."""
    traffic = readings.traffic()
    tokens = traffic[0].tokens_asked
    return Stats(
        version=__version__,
        ready=ready,
        lookups=sum(tenant.lookups for tenant in readings.tenants()),
        traffic=traffic,
        total_hit_ratio=sum(one.tokens_hit for one in traffic) / tokens if tokens else 0.0,
        stores=readings.stores(),
    )
