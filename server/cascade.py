"""The cascade: which blocks of the host tier are written to which lower tier, and when.

By a tier's write mode: when a block is committed, when it is used again, or when it leaves the host
tier for room; and by its admission, which may turn a block down. What a tier that writes `through`
has not got, for whatever reason, is offered to it again when it is used. A block that is being
written is leased by the cascade, and its slot stays what it is. A tier that can't keep up is not
waited for: what comes is dropped, and counted. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from .admission import Price, judge
from .core import AdmitOutcome, EvictReason, Tier, WriteMode, WriteOutcome
from .demand import Demand
from .directory import Block, Namespace
from .eviction import Evictor
from .lower import LowerTier
from .metrics import Metrics
from .waiting import Timer

OFFERED_AT_ONCE = 8
"""Blocks that are offered to a tier in one turn of the loop, so that it is not held for long."""
AT_USE = (WriteMode.THROUGH, WriteMode.ON_REUSE)
"""Modes in which a tier is offered what is used again."""


class Cascade:
    """All writes of blocks to lower tiers."""

    def __init__(
        self,
        evictor: Evictor,
        lowers: Sequence[LowerTier],
        demand: Demand,
        metrics: Metrics,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self.writing: set[tuple[Tier, Block]] = set()
        """Blocks that are being written to a tier: each is leased for that."""
        self._evictor = evictor
        self._lowers = lowers
        self._demand = demand
        self._clock = clock
        self._later = later
        self._counted = {
            (lower.tier, outcome): metrics.admissions.labels(lower.tier, outcome)
            for lower in lowers
            for outcome in AdmitOutcome
        }
        self._leaving: set[Block] = set()
        """Go from the host tier as soon as they are written."""
        evictor.heir = self

    def committed(self, space: Namespace, blocks: Sequence[Block]) -> None:
        """Blocks became visible in the host tier."""
        for lower in self._in_mode(WriteMode.THROUGH):
            self._offer_all(lower, space, blocks)

    def used(self, space: Namespace, blocks: Sequence[Block]) -> None:
        """Blocks of the host tier were used again."""
        for lower in self._in_mode(*AT_USE):
            if lower.takes(space.records, space.pool.slot_bytes):
                self._offer_all(lower, space, lower.lacking(space.records, blocks))

    @property
    def inherits(self) -> bool:
        """Whether a tier gets blocks when they leave the host tier."""
        return bool(self._in_mode(WriteMode.ON_EVICT))

    def demote(self, space: Namespace, block: Block) -> bool:
        """Keep a block that is to leave the host tier until it was written.

        Returns False where no tier wants it: it may go at once.
        """
        begun = [self._offer(lower, space, block) for lower in self._in_mode(WriteMode.ON_EVICT)]
        if any(begun):
            self._leaving.add(block)
            space.leaving += 1
        return any(begun)

    def flush(self, spaces: Iterable[Namespace]) -> Iterator[LowerTier]:
        """Write what tiers would get when it leaves the host tier, which ends: the hottest first.

        Yields each tier before a block is offered to it, for the caller to wait until it can take
        one. A tier gets no more than it can hold.
        """
        for lower in self._in_mode(WriteMode.ON_EVICT):
            left = lower.options.capacity_bytes
            for space in spaces:
                for key in reversed(list(space.pool.policy.victims())):
                    if (block := space.blocks.get(key)) is None or left < space.pool.slot_bytes:
                        continue
                    if lower.lacking(space.records, [block]):
                        yield lower
                        if self._offer(lower, space, block):
                            left -= space.pool.slot_bytes

    def _in_mode(self, *modes: WriteMode) -> list[LowerTier]:
        return [lower for lower in self._lowers if lower.options.write_mode in modes]

    def _offer_all(self, lower: LowerTier, space: Namespace, blocks: Sequence[Block]) -> None:
        """Offer blocks to a tier, the rest in a later turn of the loop."""
        for block in blocks[:OFFERED_AT_ONCE]:
            self._offer(lower, space, block)
        if rest := blocks[OFFERED_AT_ONCE:]:
            self._later(0.0, partial(self._offer_all, lower, space, rest))

    def _offer(self, lower: LowerTier, space: Namespace, block: Block) -> bool:
        """Write a block to a tier that has not got it, if it takes it. Returns whether that began.

        One that is not visible any more has no slot: its use may be told late.
        """
        one = (lower.tier, block)
        if space.blocks.get(block.key) is not block:
            return False
        if one in self.writing or lower.holds(space.records, block.key):
            return False
        if self._refused(lower, space, block):
            return False
        parent = block.parent.key if block.parent is not None else b""
        payload = self._evictor.host.memory(block.slot, space.pool)
        done = partial(self._written, space, one)
        if lower.write(space.records, block.key, parent, payload, block.owner, done) is not None:
            return False
        block.leases += 1
        self.writing.add(one)
        return True

    def _refused(self, lower: LowerTier, space: Namespace, block: Block) -> bool:
        """Ask for admission, and count the answer."""
        size = space.pool.slot_bytes
        price = partial(_price, lower, space)
        outcome = judge(lower.options.admission, self._demand, block.key, price)
        admitted = outcome is AdmitOutcome.ADMITTED
        if admitted and not lower.throttle.lets(size, self._clock()):
            outcome = AdmitOutcome.THROTTLED
        self._counted[lower.tier, outcome].inc()
        return outcome is not AdmitOutcome.ADMITTED

    def _written(self, space: Namespace, one: tuple[Tier, Block], _: WriteOutcome) -> None:
        self.writing.discard(one)
        block = one[1]
        self._evictor.unlease(space, [block])
        elsewhere = any((lower.tier, block) in self.writing for lower in self._lowers)
        if block in self._leaving and not elsewhere:
            self._leaving.discard(block)
            space.leaving -= 1
            unwanted = not block.leases and not space.continued(block)
            if unwanted and space.blocks.get(block.key) is block:
                self._evictor.drop(space, block, EvictReason.CAPACITY)


def _price(lower: LowerTier, space: Namespace) -> Price:
    load, write = lower.measures.price(space.pool.slot_bytes)
    return Price(space.block_seconds, load, write)
