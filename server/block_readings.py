"""What the control plane says of blocks, prefixes and pins, and what the commands read.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from .core import Tier


@dataclass(frozen=True, slots=True)
class TierHolding:
    """Which blocks of a prompt one tier holds."""

    tier: Tier
    blocks: int
    ranges: list[tuple[int, int]]
    """Blocks from the first number on, up to and without the second."""
    known: bool
    """Whether the tier could say so now; one that is left alone can't."""


@dataclass(frozen=True, slots=True)
class LookupReading:
    """Where the blocks of a prompt lie."""

    namespace: str
    block_tokens: int
    blocks: int
    """Whole blocks of the prompt."""
    matched_blocks: int
    """The prefix that all tiers have together."""
    matched_tokens: int
    tiers: list[TierHolding]


@dataclass(slots=True)
class Gone:
    """What went, or would go, from one tier."""

    tier: Tier
    blocks: int = 0
    bytes: int = 0

    def add(self, blocks: int, size: int) -> None:
        """Count more."""
        self.blocks += blocks
        self.bytes += size


@dataclass(frozen=True, slots=True)
class DropReading:
    """What was dropped so far, or with `dry_run` would be."""

    namespace: str
    done: bool
    dry_run: bool
    gone: list[Gone]


@dataclass(frozen=True, slots=True)
class PrefetchReading:
    """What was begun. A lookup of the same prompt tells when it is there."""

    namespace: str
    blocks: int
    """Whole blocks of the prompt."""
    on_their_way: int


@dataclass(frozen=True, slots=True)
class PinReading:
    """One pin."""

    id: str
    name: str
    namespace: str
    blocks: int
    bytes: int
    tokens: int
    expires_in_seconds: float


@dataclass(frozen=True, slots=True)
class PinList:
    """All pins. Their bytes count blocks that several hold once."""

    pinned_bytes: int
    pins_at_most_bytes: int
    pins: list[PinReading]


@dataclass(frozen=True, slots=True)
class PrefixReading:
    """One head with all that continues it. Keys are hex digits."""

    head: str
    parent: str | None
    """What the head continues and the host tier has not got; None at the head of a prompt."""
    blocks: int
    bytes: int
    depth: int
    """Blocks of its longest chain."""
    ends: int
    """Chains that differ in their ends."""
    uses: int
    """Lookups that began with it since it came."""
    pinned: bool


@dataclass(frozen=True, slots=True)
class PrefixList:
    """A page of prefixes of the host tier."""

    namespace: str
    block_tokens: int
    total: int
    prefixes: list[PrefixReading]
    next: str | None
    """The cursor of the next page; None on the last one."""
