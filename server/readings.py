"""What the cache says of itself: tiers, namespaces, sessions, tenants, and the gauges.

Reads the state that the event loop owns, and changes nothing of it. Runs on the event loop.
"""

from __future__ import annotations

from .core import Role, SlotState, StoreOutcome, Tier
from .directory import Namespace
from .hierarchy import Hierarchy
from .lower import LowerTier
from .tier_readings import (
    HostDetails,
    LowerDetails,
    NamespaceReading,
    SessionReading,
    TenantReading,
    TierReading,
    TierTraffic,
)


class Readings:
    """The readings of one hierarchy."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._cache = hierarchy

    def tiers(self) -> list[TierReading]:
        """Return the state of each tier of this server, the upper ones first."""
        return [self._host(), *map(_lower, self._cache.lowers)]

    def namespaces(self) -> list[NamespaceReading]:
        """Return the state of each namespace."""
        return [
            NamespaceReading(
                digest=space.digest,
                manifest=space.manifest,
                blocks=len(space.blocks),
                used_bytes=_used_bytes(space),
                slots=space.pool.total,
                sessions=space.sessions,
            )
            for space in self._spaces()
        ]

    def sessions(self) -> list[SessionReading]:
        """Return the open sessions."""
        now = self._cache.clock()
        return [
            SessionReading(
                session=session.number,
                role=session.role,
                engine=session.engine.name,
                rank=session.rank,
                pid=session.pid,
                namespace=session.space.digest,
                age_seconds=now - session.opened,
                leased_blocks=sum(map(len, session.leases.values())),
                reserved_slots=len(session.reserved),
            )
            for session in self._cache.roster
        ]

    def tenants(self) -> list[TenantReading]:
        """Return the totals of each tenant since the start."""
        self._cache.record_use()
        return self._cache.tenants.readings()

    def traffic(self) -> list[TierTraffic]:
        """Return what each tier was asked for and served since the start."""
        asked, hit = dict.fromkeys(Tier, 0), dict.fromkeys(Tier, 0)
        for tenant in self.tenants():
            for one in tenant.traffic:
                asked[one.tier] += one.tokens_asked
                hit[one.tier] += one.tokens_hit
        here = (Tier.DEVICE, Tier.HOST, *(lower.tier for lower in self._cache.lowers))
        return [TierTraffic(tier, asked[tier], hit[tier]) for tier in here]

    def stores(self) -> dict[StoreOutcome, int]:
        """Return what became of the blocks that engines offered."""
        return dict(self._cache.stores)

    def refresh_metrics(self) -> None:
        """Set the gauges from the present state."""
        metrics = self._cache.metrics
        for reading in self.tiers():
            metrics.capacity_bytes.labels(reading.tier).set(reading.capacity_bytes)
            metrics.used_bytes.labels(reading.tier).set(reading.used_bytes)
            metrics.blocks.labels(reading.tier).set(reading.blocks)
            if reading.host is not None:
                metrics.pinned_bytes.set(reading.host.pinned_bytes)
            for state, count in (reading.host.slots if reading.host else {}).items():
                metrics.slots.labels(state).set(count)
            if (lower := reading.lower) is not None:
                metrics.tier_up.labels(reading.tier).set(lower.up)
                metrics.tier_read_rate.labels(reading.tier).set(lower.read_bandwidth or 0.0)
                metrics.tier_latency_seconds.labels(reading.tier).set(lower.latency or 0.0)
                metrics.queued_bytes.labels(reading.tier, "read").set(lower.queued_read_bytes)
                metrics.queued_bytes.labels(reading.tier, "write").set(lower.queued_write_bytes)
        for role in Role:
            open_now = sum(session.role is role for session in self._cache.roster)
            metrics.sessions.labels(role).set(open_now)

    def _host(self) -> TierReading:
        host = self._cache.host
        options = host.options
        return TierReading(
            tier=Tier.HOST,
            policy=options.policy,
            capacity_bytes=options.capacity_bytes,
            used_bytes=sum(map(_used_bytes, self._spaces())),
            blocks=len(self._cache.directory),
            evictions=self._cache.evictor.evictions,
            host=HostDetails(
                slots=self._slot_states(),
                high_watermark=options.high_watermark,
                low_watermark=options.low_watermark,
                huge_pages=host.huge,
                pinned_bytes=self._cache.pins.pinned_bytes,
                pins_at_most_bytes=self._cache.pins.budget_bytes,
            ),
        )

    def _slot_states(self) -> dict[SlotState, int]:
        spaces = self._spaces()
        sessions = self._cache.roster
        limbo = [lost for engine in self._cache.roster.engines.values() for lost in engine.limbo]
        return {
            SlotState.FREE: sum(len(space.pool.free) for space in spaces),
            SlotState.COMMITTED: sum(len(space.blocks) + len(space.doomed) for space in spaces),
            SlotState.RESERVED: sum(len(session.reserved) for session in sessions),
            SlotState.PROMOTING: len(self._cache.promotions.incoming),
            SlotState.LIMBO: sum(len(lost.reserved) for lost in limbo),
        }

    def _spaces(self) -> list[Namespace]:
        return list(self._cache.directory.namespaces.values())


def _lower(lower: LowerTier) -> TierReading:
    return TierReading(
        tier=lower.tier,
        policy=lower.options.policy,
        capacity_bytes=lower.options.capacity_bytes,
        used_bytes=lower.used_bytes,
        blocks=len(lower),
        evictions=lower.evictions,
        lower=LowerDetails(
            up=lower.health.up,
            write_mode=lower.options.write_mode,
            breaker=lower.health.breaker.state,
            scanned=lower.scanned,
            queued_read_bytes=lower.measures.queued_read_bytes,
            queued_write_bytes=lower.queued_write_bytes,
            read_bandwidth=lower.measures.speed.bandwidth,
            latency=lower.measures.speed.latency,
        ),
    )


def _used_bytes(space: Namespace) -> int:
    return len(space.blocks) * space.pool.slot_bytes
