"""The tiers as one cache: lookup, lease, reserve, commit, evict.

All state is owned by one event loop; no call here blocks or awaits. A block exists when it is
committed, not before: reserve a slot, copy, commit. A leased block is never evicted, and neither
is one that a resident block continues, so that a chain loses its tail before its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .core import (
    BlockKey,
    EvictReason,
    Manifest,
    NamespaceReading,
    Role,
    SessionReading,
    SlotState,
    StoreOutcome,
    TenantReading,
    Tier,
    TierReading,
    Traffic,
)
from .directory import Directory, Namespace
from .eviction import Evictor
from .metrics import Metrics
from .sessions import Engine, Limbo, Session
from .tenants import NOBODY, Asked, Tenants
from .tiers.host import HostTier

STOCK_SHARE = 8
"""The stocks of free slots of all sessions together are at most the pool's slots ÷ this."""


class _Use(NamedTuple):
    """A lookup that was answered, but is not counted yet."""

    space: Namespace
    keys: Sequence[BlockKey]
    slots: list[int]
    tenant: str


class Hierarchy:
    """The cache. `clock` gives seconds, for ages only."""

    def __init__(self, host: HostTier, metrics: Metrics, clock: Callable[[], float]) -> None:
        self.host = host
        self.directory = Directory()
        self.engines: dict[str, Engine] = {}
        self._metrics = metrics
        self._clock = clock
        self._evictor = Evictor(host, self.directory, metrics)
        self._sessions_opened = 0
        self._tenants = Tenants()
        self._stores = dict.fromkeys(StoreOutcome, 0)
        self._late: _Use | None = None

    # Sessions.

    def open_session(
        self, role: Role, engine: str, rank: int, pid: int, manifest: Manifest
    ) -> Session:
        """Begin a session in the manifest's namespace. Raises HelloRefused."""
        space = self._namespace(manifest)
        if (home := self.engines.get(engine)) is None:
            home = self.engines[engine] = Engine(engine, released=self._sessions_opened)
        self._sessions_opened += 1
        session = Session(self._sessions_opened, role, home, rank, pid, space, self._clock())
        home.sessions[session.number] = session
        space.sessions += 1
        return session

    def close_session(self, session: Session) -> None:
        """End a session: its leases and reservations end, or wait in limbo for its workers."""
        engine = session.engine
        del engine.sessions[session.number]
        session.space.sessions -= 1
        leased = [block for blocks in session.leases.values() for block in blocks]
        if leased or session.reserved:
            engine.limbo.append(Limbo(session.number, session.space, leased, session.reserved))
        session.leases, session.reserved = {}, set()
        if not any(other.role is Role.WORKER for other in engine.sessions.values()):
            self._leave_limbo(engine, before=self._sessions_opened + 1)
        if not engine.sessions:
            del self.engines[engine.name]

    def settle(self, session: Session) -> None:
        """No worker copies for earlier sessions of this engine any more: free what they held."""
        self._leave_limbo(session.engine, before=session.number)

    # The life of a block.

    def lookup(
        self,
        session: Session,
        lease: int,
        keys: Sequence[BlockKey],
        start: int,
        tenant: str = NOBODY,
    ) -> tuple[list[int], list[int]]:
        """Lease the longest prefix of `keys` from `start` on, under a number that is not in use.

        Returns the packed slots of the leased blocks, and the positions before `start` that the
        host tier does not hold. There is no lease if there are no slots. Call `record_use` when
        the answer is on its way; whatever could evict a block calls it first.
        """
        assert lease not in session.leases, "a lease's number is used once"
        self.record_use()
        space = session.space
        found = space.prefix(keys, start)
        slots = []
        for block in found:
            block.leases += 1
            slots.append(block.slot)
        if found:
            session.leases[lease] = found
        self._late = _Use(space, keys, slots, tenant)
        return slots, [at for at in range(start) if keys[at] not in space.blocks]

    def record_use(self) -> None:
        """Count the latest lookup, and tell its use to the policy and to the slabs."""
        if (use := self._late) is None:
            return
        self._late = None
        self._tenants.tally(use.tenant).lookups += 1
        self._metrics.lookups.inc()
        use.space.pool.policy.touch(use.keys)
        self._evictor.use(use.space.pool, use.slots)

    def release(self, session: Session, lease: int) -> None:
        """End a lease, if there is one of that number."""
        self._evictor.unlease(session.space, session.leases.pop(lease, ()))

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
                self._evictor.drop(space, block, EvictReason.UNREADABLE)

    def touch(self, session: Session, keys: Sequence[BlockKey]) -> None:
        """Record the use of a chain that the device held."""
        self.record_use()
        session.space.pool.policy.touch(keys)
        blocks = session.space.blocks
        self._evictor.use(session.space.pool, [blocks[key].slot for key in keys if key in blocks])

    def reserve(
        self, session: Session, need: int, stock: int, above: Iterable[Sequence[BlockKey]] = ()
    ) -> list[int]:
        """Promise slots to the session: `need` by eviction if there is no other way.

        More are promised, up to `stock` held in all, as far as that evicts nothing. May return
        fewer than `need` when the pool is leased, reserved or not allocated yet. What is resident
        of the chains `above` is not evicted for this: it is the head of what is to be stored.
        """
        self.record_use()
        heads = [session.space.prefix(keys, 0) for keys in above]
        kept = [head[-1] for head in heads if head]  # What it continues stays with it.
        for block in kept:
            block.leases += 1
        granted = self._reserve(session, need, stock)
        self._evictor.unlease(session.space, kept)
        return granted

    def _reserve(self, session: Session, need: int, stock: int) -> list[int]:
        space = session.space
        pool = space.pool
        granted: list[int] = []
        while len(granted) < need:
            if (slot := self._evictor.make_room(space, need - len(granted))) is None:
                self._count_store(StoreOutcome.NO_SLOT, need - len(granted))
                break
            granted.append(slot)
        held = sum(len(one.reserved) for one in self._all_sessions() if one.space is space)
        most = (pool.total + self.host.growable(pool)) // STOCK_SHARE
        room = min(stock - len(session.reserved), most - held) - len(granted)
        for _ in range(min(room, self._evictor.spare(pool))):
            slot = self.host.take(pool)
            assert slot is not None, "the pool has this many slots to spare"
            granted.append(slot)
        session.reserved.update(granted)
        self._evictor.evict_ahead(space)
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
        reserved by this session.
        """
        self.record_use()
        space, reserved = session.space, session.reserved
        insert, weight = space.pool.policy.insert, space.pool.slot_bytes
        outcomes = dict.fromkeys(StoreOutcome, 0)
        for key, slot in zip(keys, slots, strict=True):
            if slot not in reserved:
                outcomes[StoreOutcome.UNKNOWN_SLOT] += 1
            elif key in space.blocks:
                reserved.discard(slot)
                self.host.give_back(space.pool, slot)
                outcomes[StoreOutcome.DUPLICATE] += 1
            else:
                reserved.discard(slot)
                space.add(key, parent, slot)
                insert(key, weight, parent or None)
                outcomes[StoreOutcome.COMMITTED] += 1
            parent = key
        self._evictor.use(space.pool, slots)
        self._tenants.tally(tenant).stored_blocks += outcomes[StoreOutcome.COMMITTED]
        for outcome, blocks in outcomes.items():
            if blocks:
                self._count_store(outcome, blocks)

    def abort(self, session: Session, slots: Iterable[int]) -> None:
        """Give back reserved slots whose blocks never became visible."""
        for slot in slots:
            if slot in session.reserved:
                session.reserved.discard(slot)
                self.host.give_back(session.space.pool, slot)
                self._count_store(StoreOutcome.ABORTED)
            else:
                self._count_store(StoreOutcome.UNKNOWN_SLOT)

    def count(self, session: Session, asked: Asked) -> None:
        """Count the blocks that prompts could have reused, and those that each tier served."""
        tally = self._tenants.tally(asked.tenant)
        added = tally.count(asked, session.space.manifest.block_tokens)
        for tier, (asked_here, hit_here) in added.items():
            self._metrics.tokens_asked.labels(tier).inc(asked_here)
            self._metrics.tokens_hit.labels(tier).inc(hit_here)

    def reset(self, space: Namespace) -> int:
        """Drop all blocks of a namespace; a leased one stays readable until released."""
        self.record_use()
        blocks = list(space.blocks.values())
        for block in blocks:
            self._evictor.drop(space, block, EvictReason.RESET)
        return len(blocks)

    # Readings.

    def tiers(self) -> list[TierReading]:
        """Return the state of each tier of this server."""
        options = self.host.options
        reading = TierReading(
            tier=Tier.HOST,
            policy=options.policy,
            capacity_bytes=options.capacity_bytes,
            used_bytes=sum(_used_bytes(space) for space in self.directory.namespaces.values()),
            blocks=len(self.directory),
            slots=self._slot_states(),
            high_watermark=options.high_watermark,
            low_watermark=options.low_watermark,
            evictions=self._evictor.evictions,
            huge_pages=self.host.huge,
        )
        return [reading]

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
            for space in self.directory.namespaces.values()
        ]

    def sessions(self) -> list[SessionReading]:
        """Return the open sessions."""
        now = self._clock()
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
            for session in self._all_sessions()
        ]

    def tenants(self) -> list[TenantReading]:
        """Return the totals of each tenant since the start."""
        self.record_use()
        return self._tenants.readings()

    def traffic(self) -> Traffic:
        """Return the totals since the start."""
        tenants = self.tenants()
        return Traffic(
            lookups=sum(tenant.lookups for tenant in tenants),
            device_tokens_asked=sum(tenant.device_tokens_asked for tenant in tenants),
            device_tokens_hit=sum(tenant.device_tokens_hit for tenant in tenants),
            host_tokens_asked=sum(tenant.host_tokens_asked for tenant in tenants),
            host_tokens_hit=sum(tenant.host_tokens_hit for tenant in tenants),
            stores=dict(self._stores),
        )

    def refresh_metrics(self) -> None:
        """Set the gauges from the present state."""
        metrics = self._metrics
        for reading in self.tiers():
            metrics.capacity_bytes.labels(reading.tier).set(reading.capacity_bytes)
            metrics.used_bytes.labels(reading.tier).set(reading.used_bytes)
            metrics.blocks.labels(reading.tier).set(reading.blocks)
            for state, count in reading.slots.items():
                metrics.slots.labels(state).set(count)
        for role in Role:
            open_now = sum(session.role is role for session in self._all_sessions())
            metrics.sessions.labels(role).set(open_now)

    def _leave_limbo(self, engine: Engine, before: int) -> None:
        for lost in engine.limbo:
            if lost.session < before:
                self._evictor.unlease(lost.space, lost.leased)
                for slot in lost.reserved:
                    self.host.give_back(lost.space.pool, slot)
                engine.released = max(engine.released, lost.session)
        engine.limbo = [lost for lost in engine.limbo if lost.session >= before]

    def _namespace(self, manifest: Manifest) -> Namespace:
        digest = manifest.digest()
        space = self.directory.namespaces.get(digest)
        if space is None:
            pool = self.host.open_pool(digest, manifest.slot_bytes)
            space = self.directory.namespaces[digest] = Namespace(manifest, pool)
        return space

    def _all_sessions(self) -> list[Session]:
        return [session for engine in self.engines.values() for session in engine.sessions.values()]

    def _count_store(self, outcome: StoreOutcome, blocks: int = 1) -> None:
        self._stores[outcome] += blocks
        self._metrics.stores.labels(outcome).inc(blocks)

    def _slot_states(self) -> dict[SlotState, int]:
        spaces = self.directory.namespaces.values()
        limbo = [lost for engine in self.engines.values() for lost in engine.limbo]
        return {
            SlotState.FREE: sum(len(space.pool.free) for space in spaces),
            SlotState.COMMITTED: sum(len(space.blocks) + len(space.doomed) for space in spaces),
            SlotState.RESERVED: sum(len(session.reserved) for session in self._all_sessions()),
            SlotState.LIMBO: sum(len(lost.reserved) for lost in limbo),
        }


def _used_bytes(space: Namespace) -> int:
    return len(space.blocks) * space.pool.slot_bytes
