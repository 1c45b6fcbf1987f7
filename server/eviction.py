"""Making room in the host tier: which blocks go, and which slabs move.

Above the high watermark blocks go until the low one is reached; leased blocks and blocks that
others continue are passed over. When another namespace has a slab that was used longer ago than
any of one's own, that slab is emptied and moves. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from .core import SLOT_INDEX_BITS, BlockKey, EvictReason, Tier
from .demand import Demand
from .directory import Block, Directory, Namespace
from .metrics import Metrics
from .tiers.host import HostTier, OwnedSlab, Pool

EVICTIONS_AHEAD = 64
"""Blocks evicted at once beyond what is needed now, so that the loop is never held for long."""
PASSED_AT_MOST = 1024
"""Blocks that one eviction may pass over before it says so."""


ROUNDING = 1e-9
"""So that 100 slots at 0.98 keep 2 free, whatever 1 - 0.98 is in binary."""


class Heir(Protocol):
    """Lower tiers, which get blocks that leave the host tier."""

    @property
    def inherits(self) -> bool:
        """Whether any of them wants such blocks at present."""

    def demote(self, space: Namespace, block: Block) -> bool:
        """Return whether a block stays for now, because a lower tier gets it first."""


class Evictor:
    """Takes blocks out of the host tier. `evictions` counts them; `demand` is told of each."""

    def __init__(
        self, host: HostTier, directory: Directory, metrics: Metrics, demand: Demand | None = None
    ) -> None:
        self.evictions = 0
        self.host = host
        self.heir: Heir | None = None
        """Who may want blocks that are to leave."""
        self.held_up: Callable[[Namespace], object] = _nobody
        """Is told of a namespace in which eviction passed over many blocks that may not go."""
        self._directory = directory
        self._demand = demand
        self._tick = 0
        self._counted = metrics.evictions_from(Tier.HOST)

    def make_room(self, space: Namespace, wanted: int) -> int | None:
        """Return a taken slot of the namespace's pool, or None if nothing may go.

        `wanted` is how many slots are needed in a row, so that eviction happens once for all.
        """
        pool = space.pool
        while not pool.free and not self.host.grow(pool):
            if not self._take_over_slab(space) and not self._evict(space, wanted):
                return None
        return self.host.take(pool)

    def exchange(self, space: Namespace) -> int | None:
        """Evict one block of the namespace and return a taken slot, or None if nothing may go."""
        return self.host.take(space.pool) if self._evict(space, 1) else None

    def spare(self, pool: Pool) -> int:
        """Return how many free slots can be taken without passing the high watermark."""
        return self._spare(pool, self.host.options.high_watermark)

    def evict_ahead(self, space: Namespace) -> None:
        """Evict from the high watermark down to the low one, a bounded number at a time."""
        pool = space.pool
        if self.spare(pool) < 0:
            pool.draining = True
        if pool.draining:
            short = -self._spare(pool, self.host.options.low_watermark) - space.leaving
            evict = self._evict
            if self.heir is not None and self.heir.inherits:
                evict = partial(self._hand_down, self.heir)
            gone = evict(space, min(short, EVICTIONS_AHEAD))
            pool.draining = 0 < gone < short

    def drop(self, space: Namespace, block: Block, reason: EvictReason) -> None:
        """Make a block invisible; its slot is free at once, or when its last lease ends."""
        if reason in (EvictReason.CAPACITY, EvictReason.SLAB_MOVE):
            space.pool.policy.evict(block.key)
        else:
            space.pool.policy.remove(block.key)
        self._leave(space, block, reason)
        self._count(space, reason, 1)

    def _leave(self, space: Namespace, block: Block, reason: EvictReason) -> None:
        """A block goes from everywhere but the policy."""
        space.remove(block)
        if self._demand is not None:
            if reason in (EvictReason.CAPACITY, EvictReason.SLAB_MOVE):
                self._demand.left(block.key)
            else:
                self._demand.dropped(block.key)
        if block.leases:
            space.doomed.add(block)
        else:
            self.host.give_back(space.pool, block.slot)

    def _count(self, space: Namespace, reason: EvictReason, blocks: int) -> None:
        self.evictions += blocks
        self._counted[space.pool.policy.deciding, reason].inc(blocks)

    def unlease(self, space: Namespace, blocks: Iterable[Block]) -> None:
        """End one lease of each block."""
        for block in blocks:
            block.leases -= 1
            assert block.leases >= 0, "a lease is released once"
            if not block.leases and space.doomed and block in space.doomed:
                space.doomed.discard(block)
                self.host.give_back(space.pool, block.slot)

    def use(self, pool: Pool, slots: Iterable[int]) -> None:
        """Record that blocks in these slots were used, for the choice of a slab to move."""
        self._tick += 1
        for number in {slot >> SLOT_INDEX_BITS for slot in slots}:
            if (owned := pool.slabs.get(number)) is not None:
                owned.last_used = self._tick

    def _spare(self, pool: Pool, watermark: float) -> int:
        growable = self.host.growable(pool)
        kept_free = int((pool.total + growable) * (1.0 - watermark) + ROUNDING)
        return len(pool.free) + growable - kept_free

    def _evict(self, space: Namespace, count: int) -> int:
        """Evict up to `count` blocks, coldest first. Returns how many there were."""
        blocks, continued = space.blocks, space.continued
        passed = 0

        def goes(key: BlockKey) -> bool:
            nonlocal passed
            block = blocks[key]
            if block.leases or continued(block):
                passed += 1
                return False
            self._leave(space, block, EvictReason.CAPACITY)
            return True

        evicted = space.pool.policy.make_room(max(count, 0), goes)
        self._count(space, EvictReason.CAPACITY, evicted)
        if passed > PASSED_AT_MOST:
            self.held_up(space)
        return evicted

    def _hand_down(self, heir: Heir, space: Namespace, count: int) -> int:
        """Let up to `count` blocks go, coldest first. Returns how many there were.

        What the heir wants stays until the heir has it.
        """
        gone = passed = 0
        for key in space.pool.policy.victims() if count > 0 else ():
            block = space.blocks[key]
            if block.leases or space.continued(block):
                passed += 1
                continue
            if not heir.demote(space, block):
                self.drop(space, block, EvictReason.CAPACITY)
            gone += 1
            if gone == count:
                break
        if passed > PASSED_AT_MOST:
            self.held_up(space)
        return gone

    def _take_over_slab(self, space: Namespace) -> bool:
        """Empty another pool's slab for this one, if it is colder than all slabs here.

        A slab that just came says nothing yet: no block in it has been used.
        """
        kept = [slab.last_used for slab in space.pool.slabs.values() if not slab.closing]
        own = min(filter(None, kept), default=self._tick + 1)
        for other, number, owned in self._others(space):
            if owned.last_used >= own:
                return False
            blocks = other.in_slab(number)
            if len(blocks) == owned.used and not any(block.leases for block in blocks):
                for block in blocks:
                    self.drop(other, block, EvictReason.SLAB_MOVE)
                other.leave_slab(number)
                self.host.shrink(other.pool, number)
                return True
        return False

    def _others(self, space: Namespace) -> list[tuple[Namespace, int, OwnedSlab]]:
        """Return the slabs of other pools that one of our slots fits into, coldest first."""
        slabs = [
            (other, number, owned)
            for other in self._directory.namespaces.values()
            if other is not space
            for number, owned in other.pool.slabs.items()
            if owned.slab.size >= space.pool.slot_bytes and not owned.closing
        ]
        return sorted(slabs, key=lambda found: found[2].last_used)


def _nobody(space: Namespace) -> None:
    """Nobody keeps blocks there."""
