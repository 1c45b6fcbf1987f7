"""What a lookup gets, what it waits for, and what is being read for it."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from .accounts import Account
from .core import BlockKey, ReadOutcome, Tier
from .directory import Block, Namespace
from .lower import LowerTier
from .metrics import Metrics
from .sessions import Session
from .tiers.pool import Job
from .worth import LoadMode, Stretch, judge


class Use(NamedTuple):
    """A lookup that was answered, but is not counted yet."""

    space: Namespace
    keys: Sequence[BlockKey]
    start: int
    """Blocks that the device held."""
    blocks: list[Block]
    tenant: str


class Ready(NamedTuple):
    """What a lookup found at once."""

    slots: list[int]
    """Packed slots of the leased blocks; empty while the lookup waits."""
    absent: list[int]
    """Positions before the start that the host tier does not hold."""
    within: float
    """Seconds within which the rest is answered, as lower tiers have more; 0.0 for never."""


class Answer(NamedTuple):
    """What a lookup that waited gets: the packed slots of the blocks that it leases now."""

    slots: list[int]
    disk: int
    """Blocks of these that came from the disk tier for it."""
    redis: int


class Timer(Protocol):
    """A call that will be made, unless it is cancelled."""

    def cancel(self) -> None:
        """Do not make it."""


@dataclass(frozen=True, slots=True)
class PromotionOptions:
    """When lower tiers are used, and for how many seconds a lookup waits for them at most."""

    mode: LoadMode = LoadMode.AUTO
    wait_seconds: float = 5.0

    def block_seconds(self, session: Session) -> float | None:
        """Return what the engine takes to compute a block; None if that is not measured yet."""
        if self.mode is LoadMode.ALWAYS or session.engine.prefill_rate is None:
            return None
        return session.space.manifest.block_tokens / session.engine.prefill_rate

    def worth(self, session: Session, sources: Sequence[Source], metrics: Metrics) -> int:
        """Return how many of the blocks to await, and count those that are computed instead."""
        if self.mode is LoadMode.ALWAYS:
            return len(sources)
        offered = list(stretches(sources, session.space.pool.slot_bytes))
        verdict = judge(offered, self.block_seconds(session))
        for tier, blocks in verdict.skipped.items():
            if tier is not Tier.HOST:
                metrics.skipped_blocks.labels(tier).inc(blocks)
                metrics.skipped_seconds.labels(tier).inc(verdict.saved_seconds[tier])
        return verdict.blocks


@dataclass(slots=True, eq=False)
class Waiting:
    """A lookup that waits. Positions count blocks of its request."""

    session: Session
    lease: int
    keys: Sequence[BlockKey]
    start: int
    end: int
    """Positions from `start` up to here have come, or are awaited."""
    done: Callable[[Answer], None]
    began: float
    owner: Account
    """Who asks."""
    blocks: dict[int, Block] = field(default_factory=dict)
    """Leased for it."""
    origins: dict[int, Tier] = field(default_factory=dict)
    awaited: dict[int, Incoming] = field(default_factory=dict)
    todo: deque[tuple[int, LowerTier]] = field(default_factory=deque)
    """Where blocks lie whose reads have not begun."""
    asking: bool = False
    asked: int = 0
    cut: bool = False
    timer: Timer | None = None


@dataclass(slots=True, eq=False)
class Incoming:
    """A block that is being read into a slot."""

    space: Namespace
    key: BlockKey
    parent: BlockKey
    slot: int
    source: LowerTier
    owner: Account
    """Whom it will be charged to."""
    job: Job[ReadOutcome] | None = None
    waiters: dict[Waiting, int] = field(default_factory=dict)
    """Who waits for it, and at which position."""
    then: list[Callable[[Block | None], None]] = field(default_factory=list)
    """Who else is told of the block, or that it did not come."""
    discarded: bool = False


Source: TypeAlias = Block | Incoming | LowerTier
"""Where a block is: in the host tier, on its way there, or in a lower tier."""


def stretches(sources: Sequence[Source], size: int) -> Iterator[Stretch]:
    """Yield the stretches that sources of blocks of `size` bytes make up.

    A tier's latency, and what is queued there, counts in the first of its stretches.
    """
    moved: Counter[Tier] = Counter()
    took: dict[Tier, float] = {}
    for tier, group in itertools.groupby(sources, key=_tier):
        members = list(group)
        seconds = 0.0
        if isinstance(lower := members[0], LowerTier):
            moved[tier] += len(members) * size
            whole = lower.measures.expected(moved[tier]) or 0.0
            seconds, took[tier] = whole - took.get(tier, 0.0), whole
        yield Stretch(tier, len(members), seconds)


def _tier(source: Source) -> Tier:
    return source.tier if isinstance(source, LowerTier) else Tier.HOST
