"""What the control plane says of tiers, namespaces, sessions and tenants, and what commands read.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from .core import Manifest, Role, SlotState, Tier, WriteMode


@dataclass(frozen=True, slots=True)
class HostDetails:
    """What only the host tier has."""

    slots: dict[SlotState, int]
    high_watermark: float
    low_watermark: float
    huge_pages: bool
    pinned_bytes: int = 0
    """Of blocks that pins keep, and what these may take in all."""
    pins_at_most_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LowerDetails:
    """What only a lower tier has."""

    up: bool
    """Whether it is asked now; it is left alone while it fails."""
    write_mode: WriteMode
    breaker: str
    scanned: bool
    """Whether all that it held at the start is known by now."""
    queued_read_bytes: int
    queued_write_bytes: int
    read_bandwidth: float | None
    """Bytes a second, as measured lately."""
    latency: float | None
    """Seconds for a question without payload, as measured lately."""


@dataclass(frozen=True, slots=True)
class TierReading:
    """State of one tier at one moment. Sizes in bytes."""

    tier: Tier
    policy: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    evictions: int
    host: HostDetails | None = None
    lower: LowerDetails | None = None


@dataclass(frozen=True, slots=True)
class NamespaceReading:
    """State of one namespace. `digest` is the full 64 hex digits."""

    digest: str
    manifest: Manifest
    blocks: int
    used_bytes: int
    slots: int
    sessions: int


@dataclass(frozen=True, slots=True)
class SessionReading:
    """State of one data-plane session. Ages in seconds, counted by the server's clock."""

    session: int
    role: Role
    engine: str
    rank: int
    pid: int
    namespace: str
    age_seconds: float
    leased_blocks: int
    reserved_slots: int


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Prompt tokens in whole blocks: what a tier was asked for since the start, and served.

    Only blocks that a prompt could have reused count. A tier was asked for what the tiers above it
    did not hold; the device was asked for everything.
    """

    tier: Tier
    tokens_asked: int
    tokens_hit: int

    @property
    def hit_ratio(self) -> float:
        """Served over asked; 0.0 when nothing was asked."""
        return self.tokens_hit / self.tokens_asked if self.tokens_asked else 0.0


@dataclass(frozen=True, slots=True)
class TenantReading:
    """Totals of one tenant since the start; `tenant` is empty for requests that name none."""

    tenant: str
    lookups: int
    traffic: list[TierTraffic]
    """Upper tiers first."""
    stored_blocks: int
    used_bytes: dict[Tier, int]
    """Bytes of its blocks in each tier that kvtier keeps."""


@dataclass(frozen=True, slots=True)
class QuotaReading:
    """One tenant with a quota, at one moment. Sizes in bytes."""

    tenant: str
    quota: dict[str, int]
    """By limit, such as `hard` or `disk_soft`."""
    used_bytes: dict[Tier, int]
    fullness: float
    """The largest share of a hard limit that is taken."""
    evicted_blocks: int
    refused_blocks: int
