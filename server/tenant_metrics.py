"""Metrics of tenants, which are read at each scrape: their number and names are not ours to choose.

At most `TENANT_LABELS_AT_MOST` tenants have labels of their own. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .accounts import OTHER
from .core import Tier
from .tier_readings import QuotaReading, TenantReading

TENANT_LABELS_AT_MOST = 200
ASKED, STORED = "asked", "stored"


class TenantTotals(Collector):
    """Totals by tenant. Those beyond `TENANT_LABELS_AT_MOST` are one, `other`.

    `tiers` are those that the server has: of others no bytes are told.
    """

    def __init__(
        self, read: Callable[[], Sequence[TenantReading]], tiers: Collection[Tier]
    ) -> None:
        self._read = read
        self._tiers = tiers

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of all tenants."""
        asked = CounterMetricFamily(
            "kvtier_tenant_tokens_asked",
            "Prompt tokens in whole blocks, by tenant; empty for requests that name none.",
            labels=["tenant"],
        )
        hit = CounterMetricFamily(
            "kvtier_tenant_tokens_hit",
            "Prompt tokens that each tier served, by tenant.",
            labels=["tenant", "tier"],
        )
        stored = CounterMetricFamily(
            "kvtier_tenant_stored_blocks", "Blocks stored, by tenant.", labels=["tenant"]
        )
        taken = GaugeMetricFamily(
            "kvtier_tenant_bytes",
            "Bytes of blocks that are charged to a tenant, by tier.",
            labels=["tenant", "tier"],
        )
        used: dict[tuple[str, Tier], int] = {}
        totals: dict[str, dict[str, int]] = {}
        for name, reading in _labelled(self._read()):
            _add(totals.setdefault(name, dict.fromkeys((ASKED, STORED, *Tier), 0)), reading)
            for tier in self._tiers:
                used[name, tier] = used.get((name, tier), 0) + reading.used_bytes[tier]
        for name, counts in totals.items():
            asked.add_metric([name], counts.pop(ASKED))
            stored.add_metric([name], counts.pop(STORED))
            for tier_name, tokens in counts.items():
                hit.add_metric([name, tier_name], tokens)
        for labels, size in used.items():
            taken.add_metric(labels, size)
        return [asked, hit, stored, taken]


def _labelled(readings: Iterable[TenantReading]) -> Iterator[tuple[str, TenantReading]]:
    """Yield readings, each with the name that its tenant has as a label."""
    names: set[str] = set()
    for reading in readings:
        name = reading.tenant
        if name not in names and len(names) >= TENANT_LABELS_AT_MOST:
            name = OTHER
        names.add(name)
        yield name, reading


def _add(totals: dict[str, int], reading: TenantReading) -> None:
    totals[STORED] += reading.stored_blocks
    for traffic in reading.traffic:
        totals[traffic.tier] += traffic.tokens_hit
        if traffic.tier is Tier.DEVICE:
            totals[ASKED] += traffic.tokens_asked


class QuotaStates(Collector):
    """Tenants with quotas, `TENANT_LABELS_AT_MOST` of them at most: the fullest."""

    def __init__(self, read: Callable[[], Sequence[QuotaReading]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of all quotas."""
        limits = GaugeMetricFamily(
            "kvtier_tenant_quota_bytes",
            "Limits of a tenant's blocks; tier all counts all tiers together.",
            labels=["tenant", "tier", "limit"],
        )
        full = GaugeMetricFamily(
            "kvtier_tenant_quota_used_ratio",
            "Largest share of a hard limit that a tenant's blocks take.",
            labels=["tenant"],
        )
        evicted = CounterMetricFamily(
            "kvtier_tenant_quota_evicted_blocks",
            "Blocks that went for the quota of their tenant.",
            labels=["tenant"],
        )
        refused = CounterMetricFamily(
            "kvtier_tenant_quota_refused_blocks",
            "Blocks that the quota of their tenant had no room for.",
            labels=["tenant"],
        )
        fullest = sorted(self._read(), key=lambda one: -one.fullness)
        for one in fullest[:TENANT_LABELS_AT_MOST]:
            for key, size in one.quota.items():
                tier, _, limit = key.rpartition("_")
                limits.add_metric([one.tenant, tier or "all", limit], size)
            full.add_metric([one.tenant], one.fullness)
            evicted.add_metric([one.tenant], one.evicted_blocks)
            refused.add_metric([one.tenant], one.refused_blocks)
        return [limits, full, evicted, refused]
