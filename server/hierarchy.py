"""The tiers as one cache: lookup, lease, reserve, commit, evict.

All state is owned by one event loop; no call here blocks or awaits. A block exists when it is
committed, not before: reserve a slot, copy, commit. A leased block is never evicted, and neither
is one that a resident block continues, so that a chain loses its tail before its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from .accounts import NOBODY, Account
from .cascade import Cascade
from .core import BlockKey, EvictReason, Manifest, Role, StoreOutcome
from .demand import Demand
from .directory import Block, Directory, Namespace
from .eviction import Evictor
from .lower import LowerTier
from .metrics import Metrics
from .pins import Pins
from .policies import EvictionPolicy
from .prefetch import Prefetches
from .promotion import Promotions
from .recording import Recorder
from .sessions import Limbo, Roster, Session
from .tenants import Asked, Tenants
from .tiers.host import HostTier
from .waiting import Answer, Ready, Timer, Use

STOCK_SHARE = 8
"""The stocks of free slots of all sessions together are at most the pool's slots ÷ this."""


class Hierarchy:
    """The cache. `clock` gives seconds; `later` makes calls for lookups that wait.

    `lowers` are the tiers below the host tier, the faster first.
    """

    def __init__(
        self,
        host: HostTier,
        metrics: Metrics,
        clock: Callable[[], float],
        lowers: Sequence[LowerTier] = (),
        later: Callable[[float, Callable[[], None]], Timer] | None = None,
    ) -> None:
        assert later is not None or not lowers, "a lookup waits for a lower tier"
        self.host = host
        self.lowers = lowers
        self.directory = Directory()
        self.accounts = self.directory.accounts
        self.roster = Roster()
        self.metrics = metrics
        self.clock = clock
        self.demand = Demand()
        """Knows nothing where no lower tier asks."""
        self.evictor = Evictor(host, self.directory, metrics, self.demand if lowers else None)
        self.evictor.elsewhere = self._give_up_below
        for lower in lowers:
            lower.index.accounts = self.accounts
        timers = _never if later is None else later
        self.promotions = Promotions(self.evictor, lowers, metrics, clock, timers)
        self.promotions.promoted = self._stored
        self.cascade = Cascade(self.evictor, lowers, self.demand, metrics, clock, timers)
        self.pins = Pins(self.evictor, clock, later or _never)
        self.prefetches = Prefetches(self.promotions, self.evictor)
        self.recorder: Recorder | None = None
        """Is told of each lookup, if it is there."""
        self.tenants = Tenants(self.accounts)
        metrics.add_tenants(self.tenants.readings)
        self.stores = dict.fromkeys(StoreOutcome, 0)
        self._late: Use | None = None

    # Sessions.

    def open_session(
        self, role: Role, engine: str, rank: int, pid: int, manifest: Manifest
    ) -> Session:
        """Begin a session in the manifest's namespace. Raises HelloRefused."""
        return self.roster.open(role, engine, rank, pid, self._namespace(manifest), self.clock())

    def close_session(self, session: Session) -> None:
        """End a session: its leases and reservations end, or wait in limbo for its workers."""
        self.promotions.forget_session(session)
        self._free(self.roster.close(session))

    def settle(self, session: Session) -> None:
        """No worker copies for earlier sessions of this engine any more: free what they held."""
        self._free(session.engine.past(session.number))

    # The life of a block.

    def lookup(
        self,
        session: Session,
        lease: int,
        keys: Sequence[BlockKey],
        start: int,
        tenant: str = NOBODY,
        done: Callable[[Answer], None] | None = None,
    ) -> Ready:
        """Lease the longest prefix of `keys` from `start` on, under a number that is not in use.

        There is no lease if there are no slots. If lower tiers have more of it, nothing is answered
        now, and `done` gets the answer; without `done`, lower tiers are left out. Call `record_use`
        when the answer is on its way; whatever could evict a block calls it first.
        """
        assert not self.leased(session, lease), "a lease's number is used once"
        self.record_use()
        space = session.space
        found = space.prefix(keys, start)
        for block in found:
            block.leases += 1
        if found:
            session.leases[lease] = found
        self._late = Use(space, keys, start, [*found], tenant)
        absent = [at for at in range(start) if keys[at] not in space.blocks]
        if done is not None and self.lowers:
            owner = self.accounts.of(tenant)
            within = self.promotions.begin(session, lease, keys, start, done, owner)
            if within:
                return Ready([], absent, within)
        return Ready([block.slot for block in session.leases.get(lease, ())], absent, 0.0)

    def leased(self, session: Session, lease: int) -> bool:
        """Return whether the session has such a lease, or waits for it."""
        return lease in session.leases or self.promotions.waits(session, lease)

    def record_use(self) -> None:
        """Count the latest lookup, and tell its use to the policies and to the slabs."""
        use, self._late = self._late, None
        if use is None:
            return
        self.tenants.tally(use.tenant).lookups += 1
        self.metrics.lookups.inc()
        self._use(use.space, use.keys, use.start, use.blocks)

    def forget_use(self) -> None:
        """The latest lookup was a part of another one's use: count and tell nothing."""
        self._late = None

    def _use(
        self, space: Namespace, keys: Sequence[BlockKey], device: int, blocks: Sequence[Block]
    ) -> None:
        space.touch(keys)
        if keys and keys[0] in space.blocks:
            space.uses[keys[0]] = space.uses.get(keys[0], 0) + 1
        self.evictor.use(space.pool, [block.slot for block in blocks])
        if self.recorder is not None:
            block = (space.manifest.block_tokens, space.pool.slot_bytes)
            self.recorder.record(space.digest, block, keys, device)
        if self.lowers:
            self.demand.used(keys)
            for lower in self.lowers:
                lower.touch(space.records, keys)
            self.cascade.used(space, blocks)

    def release(self, session: Session, lease: int) -> None:
        """End a lease, if there is one of that number."""
        self.promotions.forget(session, lease)
        self.evictor.unlease(session.space, session.leases.pop(lease, ()))

    def unreadable(self, session: Session, slots: Iterable[int]) -> None:
        """Drop the blocks in slots that the session leases and found other bytes in.

        It must not be able to drop others, so that a slot that it does not lease is only counted.
        """
        self.record_use()
        space = session.space
        leased = {block.slot: block for blocks in session.leases.values() for block in blocks}
        for slot in slots:
            if (block := leased.get(slot)) is None:
                self._count_store(StoreOutcome.UNKNOWN_SLOT)
            elif space.blocks.get(block.key) is block:
                self._drop(space, [block.key], EvictReason.UNREADABLE)

    def drop(self, session: Session, keys: Sequence[BlockKey]) -> int:
        """Drop blocks that the engine does not want any more. Returns how many were here.

        A leased one stays readable until released. What a thread is writing to a lower tier now may
        stay there.
        """
        self.record_use()
        for key in keys:
            self.promotions.cut_off(session.space, key)
            if (one := self.promotions.coming(session.space, key)) is not None:
                one.discarded = True
        return self._drop(session.space, keys, EvictReason.ENGINE)

    def _drop(self, space: Namespace, keys: Sequence[BlockKey], reason: EvictReason) -> int:
        here = [space.blocks[key] for key in dict.fromkeys(keys) if key in space.blocks]
        self.pins.cut(space, set(here))
        for block in here:
            self.evictor.drop(space, block, reason)
        for lower in self.lowers:
            lower.drop(space.records, keys, reason)
        return len(here)

    def touch(self, session: Session, keys: Sequence[BlockKey]) -> None:
        """Record the use of a chain that the device held."""
        self.record_use()
        blocks = session.space.blocks
        here = [blocks[key] for key in keys if key in blocks]
        self._use(session.space, keys, len(keys), here)

    def reserve(
        self,
        session: Session,
        need: int,
        stock: int,
        above: Iterable[Sequence[BlockKey]] = (),
        tenants: Mapping[str, int] = MappingProxyType({}),
    ) -> list[int]:
        """Promise slots to the session: `need` by eviction if there is no other way.

        More are promised, up to `stock` held in all, as far as that evicts nothing. May return
        fewer than `need` when the pool is leased, reserved or not allocated yet. What is resident
        of the chains `above` is not evicted for this: it is the head of what is to be stored.
        `tenants` says how many of `need` are whose: who is at a quota makes room with its own.
        """
        self.record_use()
        heads = [session.space.prefix(keys, 0) for keys in above]
        kept = [head[-1] for head in heads if head]  # What it continues stays with it.
        for block in kept:
            block.leases += 1
        for tenant, blocks in tenants.items():
            self.evictor.fits(session.space, self.accounts.of(tenant), blocks)
        granted = self._reserve(session, need, stock)
        self.evictor.unlease(session.space, kept)
        return granted

    def _reserve(self, session: Session, need: int, stock: int) -> list[int]:
        space = session.space
        pool = space.pool
        granted: list[int] = []
        while len(granted) < need:
            if (slot := self.evictor.make_room(space, need - len(granted))) is None:
                self._count_store(StoreOutcome.NO_SLOT, need - len(granted))
                break
            granted.append(slot)
        held = sum(len(one.reserved) for one in self.roster if one.space is space)
        most = (pool.total + self.host.growable(pool)) // STOCK_SHARE
        room = min(stock - len(session.reserved), most - held) - len(granted)
        for _ in range(min(room, self.evictor.spare(pool))):
            slot = self.host.take(pool)
            assert slot is not None, "the pool has this many slots to spare"
            granted.append(slot)
        session.reserved.update(granted)
        self.evictor.evict_ahead(space)
        return granted

    def commit(
        self,
        session: Session,
        parent: BlockKey,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        tenant: str = NOBODY,
    ) -> None:
        """Make consecutive blocks visible; each lies in a slot that the session had reserved.

        A block that is there already gives its slot back, and so does nothing that was not
        reserved by this session. Where the tenant's quota has no room for one, it and all that
        continue it give theirs back too.
        """
        self.record_use()
        space = session.space
        policy, weight = space.pool.policy, space.pool.slot_bytes
        outcomes = dict.fromkeys(StoreOutcome, 0)
        fresh: list[Block] = []
        first = 0
        """Of `fresh`, from here on the policy does not know them yet: they follow each other."""
        above = parent
        owner = self.accounts.of(tenant)
        for key, slot in zip(keys, slots, strict=True):
            outcome = self._take_in(session, owner, parent, key, slot)
            outcomes[outcome] += 1
            if outcome is StoreOutcome.COMMITTED:
                fresh.append(self._stored(space.add(key, parent, slot, owner), parent))
            else:
                self._order(policy, fresh[first:], weight, above)
                first, above = len(fresh), key
            parent = key
        self._order(policy, fresh[first:], weight, above)
        self.evictor.use(space.pool, slots)
        self.tenants.tally(tenant).stored_blocks += len(fresh)
        for outcome, blocks in outcomes.items():
            if blocks:
                self._count_store(outcome, blocks)
        self.cascade.committed(space, fresh)

    def abort(self, session: Session, slots: Iterable[int]) -> None:
        """Give back reserved slots whose blocks never became visible."""
        for slot in slots:
            if slot in session.reserved:
                session.reserved.discard(slot)
                self.host.give_back(session.space.pool, slot)
                self._count_store(StoreOutcome.ABORTED)
            else:
                self._count_store(StoreOutcome.UNKNOWN_SLOT)

    def computed(self, session: Session, tokens: int, seconds: float) -> None:
        """Take note of prompt tokens that an engine computed, and of the time that they took."""
        session.engine.computed(tokens, seconds)
        if (rate := session.engine.prefill_rate) is not None:
            session.space.block_seconds = session.space.manifest.block_tokens / rate

    def flush(self) -> Iterator[LowerTier]:
        """Write what lower tiers have not got yet, before the host tier ends: see the cascade."""
        self.record_use()
        return self.cascade.flush(list(self.directory.namespaces.values()))

    def count(self, session: Session, asked: Asked) -> None:
        """Count the blocks that prompts could have reused, and those that each tier served."""
        added = self.tenants.tally(asked.tenant).count(asked, session.space.manifest.block_tokens)
        for tier, (asked_here, hit_here) in added.items():
            self.metrics.tokens_asked.labels(tier).inc(asked_here)
            self.metrics.tokens_hit.labels(tier).inc(hit_here)

    def reset(self, space: Namespace) -> int:
        """Drop all blocks of a namespace; a leased one stays readable until released.

        Lower tiers drop theirs too, and are not asked for any of it until they have.
        """
        self.record_use()
        self.pins.discard(space)
        self.promotions.discard(space)
        for lower in self.lowers:
            lower.wipe(space.records)
        blocks = list(space.blocks.values())
        for block in reversed(blocks):  # Tails before heads: the policy has the least to do then.
            self.evictor.drop(space, block, EvictReason.RESET)
        return len(blocks)

    def _take_in(
        self, session: Session, owner: Account, parent: BlockKey, key: BlockKey, slot: int
    ) -> StoreOutcome:
        """Take a slot from the session for a block, or give it back and say why."""
        if slot not in session.reserved:
            return StoreOutcome.UNKNOWN_SLOT
        session.reserved.discard(slot)
        if key in session.space.blocks:
            outcome = StoreOutcome.DUPLICATE
        elif owner.quota and not self.evictor.admits(session.space, owner, parent):
            outcome = StoreOutcome.QUOTA
        else:
            return StoreOutcome.COMMITTED
        self.host.give_back(session.space.pool, slot)
        return outcome

    def _give_up_below(self, owner: Account, more: int) -> None:
        """Let lower tiers, the slowest first, give up what a tenant has too much of in all."""
        for lower in reversed(self.lowers):
            if (over := owner.above_all("hard", more)) > 0:
                lower.make_way(owner, over)

    def _order(
        self, policy: EvictionPolicy, blocks: Sequence[Block], weight: int, parent: BlockKey
    ) -> None:
        """Tell the policy of new blocks that follow each other."""
        if blocks:
            policy.insert([block.key for block in blocks], weight, parent or None)

    def _stored(self, block: Block, parent: BlockKey) -> Block:
        """A block became visible: remember it."""
        if self.lowers:
            self.demand.stored(block.key, parent)
        return block

    def _free(self, gone: Iterable[Limbo]) -> None:
        """End the leases and reservations of sessions that nobody copies for any more."""
        for lost in gone:
            self.evictor.unlease(lost.space, lost.leased)
            for slot in lost.reserved:
                self.host.give_back(lost.space.pool, slot)

    def _namespace(self, manifest: Manifest) -> Namespace:
        digest = manifest.digest()
        space = self.directory.namespaces.get(digest)
        if space is None:
            pool = self.host.open_pool(digest, manifest.slot_bytes)
            space = self.directory.namespaces[digest] = Namespace(manifest, pool)
        return space

    def held_slots(self, space: Namespace) -> list[int]:
        """Return the slots of a namespace that are not free, each once. O(blocks)."""
        held = [block.slot for block in (*space.blocks.values(), *space.doomed)]
        held += self.roster.reserved(space)
        held += [one.slot for one in self.promotions.incoming if one.space is space]
        return held

    def _count_store(self, outcome: StoreOutcome, blocks: int = 1) -> None:
        self.stores[outcome] += blocks
        self.metrics.stores.labels(outcome).inc(blocks)


def _never(seconds: float, call: Callable[[], None]) -> Timer:  # noqa: ARG001
    raise AssertionError("nothing waits where there is no lower tier")
