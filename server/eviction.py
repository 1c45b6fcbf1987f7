"""Making room in the host tier: which blocks go, and which slabs move.

Above the high watermark blocks go until the low one is reached; leased blocks and blocks that
others continue are passed over. When another namespace has a slab that was used longer ago than
any of one's own, that slab is emptied and moves. Tenants above a soft limit give up blocks before
the policy is asked, and a tenant at a hard one makes room for its own. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from .accounts import Account
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
        self.elsewhere: Callable[[Account, int], object] = _no_tier
        """Lets lower tiers give up what a tenant has too much of in all, with so much more."""
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

    def fits(self, space: Namespace, owner: Account, blocks: int = 1) -> bool:
        """Return whether a tenant's quota lets it have so many more blocks here.

        Its own coldest blocks go for them: here first, then in other namespaces, and last in lower
        tiers, as far as a limit of all tiers is the one that it is at.
        """
        more = blocks * space.pool.slot_bytes
        if owner.above("hard", Tier.HOST, more) <= 0:
            return True
        others = [one for one in self._directory.namespaces.values() if one is not space]
        for one in (space, *others):
            over = owner.above("hard", Tier.HOST, more)
            self.give_up(one, owner, min(-(-over // one.pool.slot_bytes), EVICTIONS_AHEAD))
        if owner.above_all("hard", more) > 0:
            self.elsewhere(owner, more)
        return owner.above("hard", Tier.HOST, more) <= 0

    def admits(self, space: Namespace, owner: Account, parent: BlockKey) -> bool:
        """Return whether a tenant's quota lets it have a block here that continues `parent`.

        Its own coldest blocks go for it, but not the one that it continues. Nothing goes for what
        continues nothing that is there. What is refused is counted.
        """
        above = space.blocks.get(parent)
        if above is not None:
            above.leases += 1
        useful = above is not None or not parent
        fits = (
            self.fits(space, owner)
            if useful
            else owner.above("hard", Tier.HOST, space.pool.slot_bytes) <= 0
        )
        if above is not None:
            above.leases -= 1
        owner.refused += not fits
        return fits

    def give_up(
        self, space: Namespace, owner: Account, count: int, heir: Heir | None = None
    ) -> int:
        """Let up to `count` of a tenant's own blocks go, coldest first. Returns how many.

        What the heir wants stays until the heir has it.
        """
        gone = passed = 0
        for key in space.orders.coldest(owner) if count > 0 else ():
            block = space.blocks[key]
            if block.leases or space.continued(block):
                passed += 1
                if passed > PASSED_AT_MOST:
                    self.held_up(space)
                    break
                continue
            if heir is None or not heir.demote(space, block):
                self.drop(space, block, EvictReason.QUOTA)
            owner.evicted += 1
            gone += 1
            if gone == count:
                break
        return gone

    def drop(self, space: Namespace, block: Block, reason: EvictReason) -> None:
        """Make a block invisible; its slot is free at once, or when its last lease ends."""
        if reason.for_room:
            space.pool.policy.evict(block.key)
        else:
            space.pool.policy.remove(block.key)
        self._leave(space, block, reason)
        self._count(space, reason, 1)

    def _leave(self, space: Namespace, block: Block, reason: EvictReason) -> None:
        """A block goes from everywhere but the policy."""
        space.remove(block)
        if self._demand is not None:
            if reason.for_room:
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
        above_soft = self._above_soft(space, count, None)
        passed = 0

        def goes(key: BlockKey) -> bool:
            nonlocal passed
            block = blocks[key]
            if block.leases or continued(block):
                passed += 1
                return False
            self._leave(space, block, EvictReason.CAPACITY)
            return True

        evicted = space.pool.policy.make_room(max(count - above_soft, 0), goes)
        self._count(space, EvictReason.CAPACITY, evicted)
        if passed > PASSED_AT_MOST:
            self.held_up(space)
        return above_soft + evicted

    def _above_soft(self, space: Namespace, count: int, heir: Heir | None) -> int:
        """Let tenants above a soft limit give up blocks, `count` at most. Returns how many."""
        gone = 0
        for owner in list(self._directory.accounts.above_soft):
            over = owner.above("soft", Tier.HOST)
            most = min(-(-over // space.pool.slot_bytes), count - gone)
            gone += self.give_up(space, owner, most, heir)
        return gone

    def _hand_down(self, heir: Heir, space: Namespace, count: int) -> int:
        """Let up to `count` blocks go, coldest first. Returns how many there were.

        What the heir wants stays until the heir has it.
        """
        gone, passed = self._above_soft(space, count, heir), 0
        for key in space.pool.policy.victims() if count > gone else ():
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


def _no_tier(owner: Account, more: int) -> None:
    """There is no lower tier."""
