"""Every metric of the server, declared once.

Prefix `kvtier_`, base units, closed label sets; every label combination starts at 0, so that a
rate over it is defined from the first scrape. Runs on the event loop; an increment takes about a
microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest

from . import __version__
from .core import (
    LOWER_TIERS,
    AdmitOutcome,
    EvictReason,
    Fault,
    PromoteOutcome,
    ReadOutcome,
    Role,
    SlotState,
    StoreOutcome,
    Tier,
    WaitOutcome,
    WriteOutcome,
)
from .http_section import Refusal
from .policies import POLICIES
from .tenant_metrics import QuotaStates, TenantTotals
from .tier_readings import QuotaReading, TenantReading

LATENCY_BUCKETS = (
    50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 1.0, 5.0,
)  # fmt: skip
"""50 µs to 5 s."""

OPERATIONS = ("hello", "lookup", "step", "map", "reset", "drop", "sizes", "bye")
HOLDS = ("frame", "lower")
"""What holds the loop: an engine's frame, or something that lower tiers hand to it."""
CLOSE_REASONS = (
    "bye", "disconnect", "malformed", "oversized", "unexpected", "refused", "slow_reader",
    "peer", "shutdown", "error",
)  # fmt: skip


class Metrics:
    """The metrics of one server in a registry of its own. Pass it where it is counted.

    `lowers` are the lower tiers that it has: of others nothing is exported.
    """

    def __init__(self, lowers: Iterable[Tier] = LOWER_TIERS) -> None:
        self._tiers = (Tier.HOST, *lowers)
        self.registry = CollectorRegistry()
        reg = self.registry
        ProcessCollector(registry=reg)
        info = Gauge("kvtier_build_info", "Version of kvtier.", ["version"], registry=reg)
        info.labels(__version__).set(1)

        self._add_traffic(reg)
        self._add_blocks(reg, lowers)
        self._add_health(reg)
        self._add_lower_io(reg)
        self._add_codec(reg)
        self._add_promotion(reg)
        for tier in lowers:
            self._begin_lower(tier)
        self._add_sessions(reg)
        self._add_loop(reg)
        self._add_http(reg)

    def _add_traffic(self, reg: CollectorRegistry) -> None:
        self.lookups = Counter("kvtier_lookups", "Prefix lookups by engines.", registry=reg)
        self.recorded_lookups = Counter(
            "kvtier_recorded_lookups", "Lookups that were to be recorded, by outcome.",
            ["outcome"], registry=reg,
        )  # fmt: skip
        for recorded in ("recorded", "dropped"):
            self.recorded_lookups.labels(recorded)
        self.tokens_asked = Counter(
            "kvtier_tokens_asked",
            "Prompt tokens in whole blocks that each tier was asked for.",
            ["tier"],
            registry=reg,
        )
        self.tokens_hit = Counter(
            "kvtier_tokens_hit", "Prompt tokens that each tier served.", ["tier"], registry=reg
        )
        for tier in Tier:
            self.tokens_asked.labels(tier)
            self.tokens_hit.labels(tier)

    def _add_blocks(self, reg: CollectorRegistry, lowers: Iterable[Tier]) -> None:
        self.stores = Counter(
            "kvtier_stores", "Blocks offered by engines, by outcome.", ["outcome"], registry=reg
        )
        for outcome in StoreOutcome:
            self.stores.labels(outcome)
        self.evictions = Counter(
            "kvtier_evictions", "Blocks that left a tier, by the policy that it had.",
            ["tier", "policy", "reason"], registry=reg,
        )  # fmt: skip
        for tier in (Tier.HOST, *lowers):
            self.evictions_from(tier)

        self.capacity_bytes = Gauge(
            "kvtier_capacity_bytes", "Byte budget of a tier.", ["tier"], registry=reg
        )
        self.used_bytes = Gauge(
            "kvtier_used_bytes", "Bytes of committed blocks in a tier.", ["tier"], registry=reg
        )
        self.blocks = Gauge("kvtier_blocks", "Committed blocks in a tier.", ["tier"], registry=reg)
        self.pinned_bytes = Gauge(
            "kvtier_pinned_bytes", "Bytes of the host tier that pins keep.", registry=reg
        )
        self.slots = Gauge("kvtier_slots", "Host slots by state.", ["state"], registry=reg)
        for state in SlotState:
            self.slots.labels(state)

    def _add_sessions(self, reg: CollectorRegistry) -> None:
        self.sessions = Gauge(
            "kvtier_sessions", "Open data-plane sessions.", ["role"], registry=reg
        )
        for role in Role:
            self.sessions.labels(role)
        self.session_closes = Counter(
            "kvtier_session_closes", "Data-plane sessions that ended.", ["reason"], registry=reg
        )
        for reason in CLOSE_REASONS:
            self.session_closes.labels(reason)

    def _add_loop(self, reg: CollectorRegistry) -> None:
        self.frame_seconds = Histogram(
            "kvtier_frame_seconds",
            "Time the server took to handle one data-plane frame.",
            ["op"],
            buckets=LATENCY_BUCKETS,
            registry=reg,
        )
        for op in OPERATIONS:
            self.frame_seconds.labels(op)
        self.loop_hold_seconds = Histogram(
            "kvtier_loop_hold_seconds",
            "CPU time for which one piece of work held the event loop.",
            ["work"],
            buckets=LATENCY_BUCKETS,
            registry=reg,
        )
        for work in HOLDS:
            self.loop_hold_seconds.labels(work)
        self.loop_lag_seconds = Histogram(
            "kvtier_loop_lag_seconds",
            "How late the event loop ran a timer.",
            buckets=LATENCY_BUCKETS,
            registry=reg,
        )

    def _add_http(self, reg: CollectorRegistry) -> None:
        self.http_refusals = Counter(
            "kvtier_http_refusals", "HTTP requests that were not let in, by why not.", ["reason"],
            registry=reg,
        )  # fmt: skip
        for reason in Refusal:
            self.http_refusals.labels(reason)

    # What only the tiers below the host tier have.

    def _add_health(self, reg: CollectorRegistry) -> None:
        self.tier_up = Gauge(
            "kvtier_tier_up", "1 while a tier is asked, 0 while it is left alone.", ["tier"],
            registry=reg,
        )  # fmt: skip
        self.breaker_openings = Counter(
            "kvtier_breaker_openings", "How often a tier began to be left alone.", ["tier"],
            registry=reg,
        )  # fmt: skip
        self.tier_faults = Counter(
            "kvtier_tier_faults", "Failures of a tier as a whole.", ["tier", "fault"], registry=reg
        )

    def _add_lower_io(self, reg: CollectorRegistry) -> None:
        self.reads = Counter(
            "kvtier_reads", "Blocks read from a tier, by outcome.", ["tier", "outcome"],
            registry=reg,
        )  # fmt: skip
        self.writes = Counter(
            "kvtier_writes", "Blocks to be written to a tier, by outcome.", ["tier", "outcome"],
            registry=reg,
        )  # fmt: skip
        self.admissions = Counter(
            "kvtier_admissions", "Blocks offered to a tier, by what admission said.",
            ["tier", "outcome"], registry=reg,
        )  # fmt: skip
        self.read_bytes = Counter(
            "kvtier_read_bytes", "Bytes of blocks read from a tier.", ["tier"], registry=reg
        )
        self.written_bytes = Counter(
            "kvtier_written_bytes", "Bytes that a tier took for blocks.", ["tier"], registry=reg
        )
        self.tier_seconds = Histogram(
            "kvtier_tier_seconds",
            "Time that one operation took a tier's thread, without coding.",
            ["tier", "op"],
            buckets=LATENCY_BUCKETS,
            registry=reg,
        )
        self.queued_bytes = Gauge(
            "kvtier_queued_bytes", "Bytes of blocks that wait for a tier.", ["tier", "op"],
            registry=reg,
        )  # fmt: skip

        self.tier_read_rate = Gauge(
            "kvtier_tier_read_bytes_per_second",
            "Bandwidth of a tier's reads, as measured lately; 0 before the first ones.",
            ["tier"], registry=reg,
        )  # fmt: skip
        self.tier_latency_seconds = Gauge(
            "kvtier_tier_latency_seconds",
            "Time of a question without payload, as measured lately; 0 before the first one.",
            ["tier"], registry=reg,
        )  # fmt: skip

    def _add_codec(self, reg: CollectorRegistry) -> None:
        self.codec_raw_bytes = Counter(
            "kvtier_codec_raw_bytes", "Bytes of blocks that were to be compressed.", ["tier"],
            registry=reg,
        )  # fmt: skip
        self.codec_stored_bytes = Counter(
            "kvtier_codec_stored_bytes", "What was stored of them.", ["tier"], registry=reg
        )
        self.codec_seconds = Counter(
            "kvtier_codec_seconds", "Time that compressing and decompressing took threads.",
            ["tier", "op"], registry=reg,
        )  # fmt: skip

    def _add_promotion(self, reg: CollectorRegistry) -> None:
        self.skipped_blocks = Counter(
            "kvtier_loads_skipped_blocks",
            "Blocks that a tier has and that are computed instead, because that is faster.",
            ["tier"],
            registry=reg,
        )
        self.skipped_seconds = Counter(
            "kvtier_loads_skipped_seconds",
            "Seconds that computing instead of loading was expected to save.",
            ["tier"],
            registry=reg,
        )
        self.promotions = Counter(
            "kvtier_promotions", "Blocks copied from a tier to the host tier, by what became of "
            "it.", ["tier", "outcome"], registry=reg,
        )  # fmt: skip
        self.waits = Counter(
            "kvtier_waits", "Lookups that waited for lower tiers, by how that ended.",
            ["outcome"], registry=reg,
        )  # fmt: skip
        self.wait_seconds = Histogram(
            "kvtier_wait_seconds",
            "How long lookups waited for lower tiers.",
            buckets=LATENCY_BUCKETS,
            registry=reg,
        )
        for ended in WaitOutcome:
            self.waits.labels(ended)

    def _begin_lower(self, tier: Tier) -> None:
        """Let every label combination of one tier start at 0."""
        for gauge in (
            self.capacity_bytes,
            self.used_bytes,
            self.blocks,
            self.tier_up,
            self.tier_read_rate,
            self.tier_latency_seconds,
        ):
            gauge.labels(tier)
        for counter in (
            self.breaker_openings,
            self.read_bytes,
            self.written_bytes,
            self.codec_raw_bytes,
            self.codec_stored_bytes,
            self.skipped_blocks,
            self.skipped_seconds,
        ):
            counter.labels(tier)
        for op in ("find", "read", "write"):
            self.tier_seconds.labels(tier, op)
        for op in ("read", "write"):
            self.queued_bytes.labels(tier, op)
        for op in ("encode", "decode"):
            self.codec_seconds.labels(tier, op)
        labels: list[tuple[Counter, Iterable[str]]] = [
            (self.tier_faults, Fault),
            (self.reads, (*ReadOutcome, "failed")),
            (self.writes, WriteOutcome),
            (self.promotions, PromoteOutcome),
            (self.admissions, AdmitOutcome),
        ]
        for counter, values in labels:
            for value in values:
                counter.labels(tier, value)

    def evictions_from(self, tier: Tier) -> dict[tuple[str, EvictReason], Counter]:
        """Return what counts a tier's evictions, by policy and reason."""
        return {
            (policy, reason): self.evictions.labels(tier, policy, reason)
            for policy in POLICIES
            for reason in EvictReason
        }

    def add_tenants(self, read: Callable[[], Sequence[TenantReading]]) -> None:
        """Show the totals of tenants, which are read at each scrape."""
        self.registry.register(TenantTotals(read, self._tiers))

    def add_quotas(self, read: Callable[[], Sequence[QuotaReading]]) -> None:
        """Show the tenants with quotas, which are read at each scrape."""
        self.registry.register(QuotaStates(read))

    def exposition(self) -> bytes:
        """Return the text format that Prometheus scrapes."""
        return generate_latest(self.registry)
