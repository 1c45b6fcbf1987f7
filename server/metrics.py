"""Every metric of the server, declared once.

Prefix `kvtier_`, base units, closed label sets; every label combination starts at 0, so that a
rate over it is defined from the first scrape. Runs on the event loop; an increment takes about a
microsecond.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from . import __version__
from .core import EvictReason, Role, SlotState, StoreOutcome, Tier

LATENCY_BUCKETS = (
    50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 1.0, 5.0,
)  # fmt: skip
"""50 µs to 5 s."""

OPERATIONS = ("hello", "lookup", "step", "map", "reset", "bye")
CLOSE_REASONS = (
    "bye", "disconnect", "malformed", "oversized", "unexpected", "refused", "slow_reader",
    "peer", "shutdown", "error",
)  # fmt: skip


class Metrics:
    """The metrics of one server in a registry of its own. Pass it where it is counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        reg = self.registry
        info = Gauge("kvtier_build_info", "Version of kvtier.", ["version"], registry=reg)
        info.labels(__version__).set(1)

        self.lookups = Counter("kvtier_lookups", "Prefix lookups by engines.", registry=reg)
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

        self.stores = Counter(
            "kvtier_stores", "Blocks offered by engines, by outcome.", ["outcome"], registry=reg
        )
        for outcome in StoreOutcome:
            self.stores.labels(outcome)
        self.evictions = Counter(
            "kvtier_evictions", "Blocks that left a tier.", ["tier", "reason"], registry=reg
        )
        for evicted in EvictReason:
            self.evictions.labels(Tier.HOST, evicted)

        self.capacity_bytes = Gauge(
            "kvtier_capacity_bytes", "Byte budget of a tier.", ["tier"], registry=reg
        )
        self.used_bytes = Gauge(
            "kvtier_used_bytes", "Bytes of committed blocks in a tier.", ["tier"], registry=reg
        )
        self.blocks = Gauge("kvtier_blocks", "Committed blocks in a tier.", ["tier"], registry=reg)
        self.slots = Gauge("kvtier_slots", "Host slots by state.", ["state"], registry=reg)
        for state in SlotState:
            self.slots.labels(state)

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
        self.frame_seconds = Histogram(
            "kvtier_frame_seconds",
            "Time the server took to handle one data-plane frame.",
            ["op"],
            buckets=LATENCY_BUCKETS,
            registry=reg,
        )
        for op in OPERATIONS:
            self.frame_seconds.labels(op)
        self.loop_lag_seconds = Histogram(
            "kvtier_loop_lag_seconds",
            "How late the event loop ran a timer.",
            buckets=LATENCY_BUCKETS,
            registry=reg,
        )

    def exposition(self) -> bytes:
        """Return the text format that Prometheus scrapes."""
        return generate_latest(self.registry)
