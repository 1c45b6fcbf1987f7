"""Drives policies and admission with recorded requests, as the server would: lookup, use, store,
write, evict; but without bytes.

Only the contiguous prefix of a request counts as hit, from whichever tiers it comes. What a request
hit is leased while it is served; what it brought is evicted like anything else, once the host tier
is above its capacity. Lower tiers get their copies by their write modes, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..admission import Price, judge
from ..core import AdmissionMode, AdmitOutcome, BlockKey, Tier, WriteMode
from ..demand import Demand
from ..policies import POLICIES, EvictionPolicy
from .trace import Trace

REQUESTS_BETWEEN_REPORTS = 64

Advance = Callable[[int], None]
"""Is told how many more requests have been served."""


@dataclass(frozen=True, slots=True)
class LowerSetup:
    """One lower tier: its capacity in blocks, and when it takes which."""

    tier: Tier
    capacity: int
    policy: str
    write_mode: WriteMode = WriteMode.THROUGH
    admission: AdmissionMode = AdmissionMode.ALWAYS


@dataclass(frozen=True, slots=True)
class Setup:
    """What requests are served from. The host tier's capacity is in blocks."""

    policy: str
    capacity: int
    lowers: tuple[LowerSetup, ...] = ()
    price: Price = field(default=Price(None, None, None))
    """What the admission `cost` goes by."""


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """What became of one tier. All but the capacity are counts of blocks over the whole trace."""

    tier: Tier
    capacity: int
    hit_blocks: int
    written_blocks: int
    evictions: int
    refused_blocks: int = 0
    """Offers that admission turned down."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tiers made of a trace, the host tier first."""

    tiers: tuple[TierOutcome, ...]

    @property
    def hit_blocks(self) -> int:
        """Blocks of leading prefixes that came from any tier."""
        return sum(tier.hit_blocks for tier in self.tiers)

    def hit_ratio(self, trace: Trace) -> float:
        """Return the share of all prompt tokens that came from the cache."""
        return self.hit_blocks * trace.block_tokens / trace.tokens if trace.tokens else 0.0


def replay(trace: Trace, setup: Setup, advance: Advance | None = None) -> Outcome:
    """Serve all requests of a trace."""
    cache = Hierarchy(setup)
    keys = trace.keys
    for served, blocks in enumerate(trace.requests(), 1):
        cache.serve([keys[number] for number in blocks])
        if advance is not None and not served % REQUESTS_BETWEEN_REPORTS:
            advance(REQUESTS_BETWEEN_REPORTS)
    return cache.outcome()


class Cache:
    """One tier without bytes: `capacity` blocks under a policy, and its counts."""

    def __init__(self, policy: EvictionPolicy, capacity: int, tier: Tier = Tier.HOST) -> None:
        self.policy = policy
        self.capacity = capacity
        self.tier = tier
        self.hit_blocks = 0
        self.written_blocks = 0
        self.evictions = 0
        self.refused_blocks = 0

    def prefix(self, chain: Sequence[BlockKey]) -> int:
        """Return how many blocks of the chain are there, from the first one on."""
        return self.policy.leading(chain)

    def store(self, chain: Sequence[BlockKey], start: int) -> None:
        """Take in what is not there of a chain from `start` on, as far as the tier can hold it."""
        self.written_blocks += self.policy.fill(chain[: self.capacity], start, 1)

    def evict(self, kept: Sequence[BlockKey], leaves: Callable[[BlockKey], None] | None) -> None:
        """Evict down to the capacity, but nothing of `kept`. `leaves` is told before each goes."""
        excess = len(self.policy) - self.capacity
        if excess <= 0:
            return
        leased = set(kept)

        def goes(key: BlockKey) -> bool:
            if key in leased:
                return False
            if leaves is not None:
                leaves(key)
            return True

        self.evictions += self.policy.make_room(excess, goes)

    def outcome(self) -> TierOutcome:
        """Return the counts at this moment."""
        return TierOutcome(
            self.tier,
            self.capacity,
            self.hit_blocks,
            self.written_blocks,
            self.evictions,
            self.refused_blocks,
        )


class Hierarchy:
    """The host tier, and lower tiers with their copies."""

    def __init__(self, setup: Setup) -> None:
        self.host = Cache(POLICIES[setup.policy](), setup.capacity)
        self.lowers = [_Lower(lower) for lower in setup.lowers]
        self._demand = Demand()
        self._price = setup.price
        self._parents: dict[BlockKey, BlockKey] = {}
        """Of the blocks in the host tier, for those that are written when they leave."""

    def serve(self, chain: list[BlockKey]) -> int:
        """Serve one request. Returns how many blocks of its prefix were there, in any tier."""
        host = self.host
        here = hits = host.prefix(chain)
        if self.lowers:
            hits = self._find_below(chain, here)
            self._demand.used(chain)
            for lower in self.lowers:
                lower.policy.touch(chain)
        host.hit_blocks += here
        host.policy.touch(chain)
        for at in range(here if self.lowers else 0):
            self._offer(chain[at], chain[at - 1] if at else b"", WriteMode.ON_REUSE)
        if here < len(chain):
            self._store(chain, here, hits)
        return hits

    def outcome(self) -> Outcome:
        """Return the counts at this moment."""
        return Outcome(tuple(tier.outcome() for tier in (self.host, *self.lowers)))

    def _find_below(self, chain: Sequence[BlockKey], here: int) -> int:
        """Count what lower tiers have of a chain from `here` on. Returns where that ends."""
        at = here
        for key in chain[here : self.host.capacity]:
            if key not in self.host.policy:
                holder = next((lower for lower in self.lowers if key in lower.policy), None)
                if holder is None:
                    break
                holder.hit_blocks += 1
            else:
                self.host.hit_blocks += 1
            at += 1
        return at

    def _store(self, chain: Sequence[BlockKey], here: int, hits: int) -> None:
        host = self.host
        if not self.lowers:
            host.store(chain, here)
            host.evict(chain[:hits], None)
            return
        new = [at for at in range(here, len(chain)) if chain[at] not in host.policy]
        host.store(chain, here)
        for at in new:
            key, parent = chain[at], chain[at - 1] if at else b""
            if key in host.policy:
                self._parents[key] = parent
                self._demand.stored(key, parent)
                self._offer(key, parent, WriteMode.THROUGH)
        host.evict(chain[:hits], self._leaves)

    def _leaves(self, key: BlockKey) -> None:
        self._offer(key, self._parents.pop(key), WriteMode.ON_EVICT)
        self._demand.left(key)

    def _offer(self, key: BlockKey, parent: BlockKey, event: WriteMode) -> None:
        """Offer a block to the tiers that write at this event; see `cascade.py`."""
        for lower in self.lowers:
            due = lower.setup.write_mode is event or (
                event is WriteMode.ON_REUSE and lower.setup.write_mode is WriteMode.THROUGH
            )
            if due and key not in lower.policy:
                outcome = judge(lower.setup.admission, self._demand, key, lambda: self._price)
                if outcome is AdmitOutcome.ADMITTED:
                    lower.write(key, parent)
                else:
                    lower.refused_blocks += 1


class _Lower(Cache):
    """A lower tier, which makes room before it writes."""

    def __init__(self, setup: LowerSetup) -> None:
        super().__init__(POLICIES[setup.policy](), setup.capacity, setup.tier)
        self.setup = setup

    def write(self, key: BlockKey, parent: BlockKey) -> None:
        if len(self.policy) >= self.capacity:
            self.evictions += self.policy.make_room(1, lambda _: True)
        self.policy.insert([key], 1, parent or None)
        self.written_blocks += 1
