"""The hierarchy against a dict model: store, lookup, lease, evict, disconnect, reset, full tier.

Two namespaces with different slot sizes share a small budget, so that blocks are evicted, slabs
move and slots run out all the time. The model remembers which key's bytes were copied into each
slot; what a lease gives must still hold the right ones when it ends. Watchers follow along, and in
the end know what there is.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvtier.changes import Teller
from kvtier.core import EvictReason, Role, StoreOutcome, Tier
from kvtier.integrity import check_integrity
from kvtier.policies import POLICIES
from kvtier.quotas import QuotaKeeper
from support import Mirror, chain, hierarchy, manifest

SLOTS = 40
MANIFESTS = {"small": manifest(), "large": manifest(shard_bytes=3 * 4096)}
CHAINS = [chain(name, 9) for name in "abcdef"]
TENANTS = ("", "a", "b")
PROMPTS = [*CHAINS, *([*CHAINS[0][:4], *chain(f"branch {n}", 4)] for n in range(3))]


class Sight:
    """What the model knows of one namespace: visible keys and what lies in each slot."""

    def __init__(self) -> None:
        self.visible: dict[bytes, int] = {}
        self.parents: dict[bytes, bytes] = {}
        self.content: dict[int, bytes] = {}


class HierarchyMachine(RuleBasedStateMachine):
    """Engines come and go, store, look up and lose their connections."""

    policy = "lru"

    @initialize()
    def begin(self):
        self.cache = hierarchy(
            SLOTS, clock=lambda: 0.0, policy=self.policy, high_watermark=0.9, low_watermark=0.8
        )
        self.keeper = QuotaKeeper(self.cache)
        self.sight = {name: Sight() for name in MANIFESTS}
        self.sessions = []
        self.reserved: dict[int, set[int]] = {}
        self.leases: dict[tuple[int, int], list[tuple[str, bytes]]] = {}
        self.lookups = 0
        self.owners = {}
        self.within = True
        """Nobody is above a quota that became smaller than what is leased."""
        self.engines = 0
        self.turns = []
        self.teller = Teller(self.turns.append)
        self.watching: list[tuple[str, Mirror, object]] = []

    def teardown(self):
        if hasattr(self, "cache"):
            self.everybody_hears()
            for session in self.sessions:
                self.cache.close_session(session)
            check_integrity(self.cache)
            for space in self.cache.directory.namespaces.values():
                assert not any(block.leases for block in space.blocks.values())
                assert not space.doomed
                assert len(space.pool.free) + len(space.blocks) == space.pool.total
            self.cache.host.close()

    def schedulers(self):
        return [session for session in self.sessions if session.role is Role.SCHEDULER]

    def name(self, session):
        return next(n for n, m in MANIFESTS.items() if m == session.space.manifest)

    @rule(kind=st.sampled_from(sorted(MANIFESTS)), workers=st.integers(0, 2))
    def engine_connects(self, kind, workers):
        if len(self.sessions) < 5:
            self.engines += 1
            engine = f"engine-{self.engines}"
            roles = [Role.SCHEDULER] + [Role.WORKER] * workers
            self.sessions += [
                self.cache.open_session(role, engine, 0, 1, MANIFESTS[kind]) for role in roles
            ]

    @precondition(lambda self: self.schedulers())
    @rule(data=st.data())
    def scheduler_reconnects(self, data):
        """The slots of the lost session stay untouched until the engine settles."""
        lost = data.draw(st.sampled_from(self.schedulers()), "session")
        workers = [s for s in self.sessions if s.engine is lost.engine and s.role is Role.WORKER]
        held = set(lost.reserved) | {
            block.slot for blocks in lost.leases.values() for block in blocks
        }
        self.close(lost)
        fresh = self.cache.open_session(Role.SCHEDULER, lost.engine.name, 0, 1, lost.space.manifest)
        self.sessions.append(fresh)
        free = set(lost.space.pool.free)
        if workers:
            assert not held & free, "a worker may still copy from and to these"
            assert fresh.engine.released < lost.number or not held
        else:
            assert fresh.engine.released >= lost.number or not held
        if data.draw(st.booleans(), "settle"):
            self.cache.settle(fresh)
            assert fresh.engine.released >= lost.number or not held
            assert not fresh.engine.limbo

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), rarely=st.integers(0, 4))
    def session_disconnects(self, data, rarely):
        if not rarely:
            self.close(data.draw(st.sampled_from(self.sessions), "session"))

    def close(self, session):
        self.sessions.remove(session)
        self.cache.close_session(session)
        self.reserved.pop(session.number, None)
        for number, lease in list(self.leases):
            if number == session.number:
                del self.leases[number, lease]

    @precondition(lambda self: self.schedulers())
    @rule(
        data=st.data(),
        keys=st.sampled_from(PROMPTS),
        device=st.integers(0, 3),
        tenant=st.sampled_from(TENANTS),
    )
    def serve(self, data, keys, device, tenant):
        """Do what an engine does with a prompt: lease what is there, store what is missing."""
        session = data.draw(st.sampled_from(self.schedulers()), "session")
        ready = device + len(self.look(session, keys, device))
        slots = self.take(session, len(keys) - ready, 0, tenant)
        self.put(session, keys[ready - 1] if ready else b"", keys[ready:], slots, tenant)

    @precondition(lambda self: self.schedulers())
    @rule(data=st.data(), need=st.integers(0, 12), stock=st.integers(0, 8))
    def reserve(self, data, need, stock):
        self.take(data.draw(st.sampled_from(self.schedulers()), "session"), need, stock)

    def take(self, session, need, stock, tenant=""):
        moves = self.cache.metrics.evictions.labels(
            "host", self.policy, EvictReason.SLAB_MOVE
        )._value.get()
        before = {name: dict(sight.visible) for name, sight in self.sight.items()}
        slots = self.cache.reserve(session, need, stock, (), {tenant: need})
        assert len(set(slots)) == len(slots)
        held = self.reserved.setdefault(session.number, set())
        assert not held & set(slots), "a slot is promised once"
        held.update(slots)
        moved = (
            moves
            < self.cache.metrics.evictions.labels(
                "host", self.policy, EvictReason.SLAB_MOVE
            )._value.get()
        )
        self.follow_evictions(before, moved)
        return slots

    def follow_evictions(self, before, moved):
        leased = self.leased()
        for name, sight in self.sight.items():
            space = self.cache.directory.namespaces.get(MANIFESTS[name].digest())
            now = {} if space is None else space.blocks
            gone = before[name].keys() - now.keys()
            assert not now.keys() - before[name].keys(), "reserving makes nothing visible"
            assert not {(name, key) for key in gone} & leased, "a leased block stays"
            if not moved:
                parents = {sight.parents.get(key) for key in now}
                assert not gone & parents, "a chain's tail goes before its head"
            for key in gone:
                del sight.visible[key]

    @precondition(lambda self: any(self.reserved.values()))
    @rule(
        data=st.data(),
        keys=st.sampled_from(PROMPTS),
        start=st.integers(0, 7),
        tenant=st.sampled_from(TENANTS),
    )
    def commit(self, data, keys, start, tenant):
        session = self.owner_of_slots(data)
        slots = sorted(self.reserved[session.number])[: data.draw(st.integers(1, 4), "count")]
        self.put(session, keys[start - 1] if start else b"", keys[start:], slots, tenant)

    def put(self, session, parent, keys, slots, tenant):
        sight = self.sight[self.name(session)]
        part, slots = keys[: len(slots)], slots[: len(keys)]
        for slot, key in zip(slots, part, strict=True):
            sight.content[slot] = key
        before = {name: dict(sight.visible) for name, sight in self.sight.items()}
        self.cache.commit(session, parent, part, slots, tenant)
        self.reserved[session.number].difference_update(slots)
        for slot, key in zip(slots, part, strict=True):
            if key not in sight.visible and key in session.space.blocks:
                sight.visible[key] = slot
                sight.parents[key] = parent
            parent = key
        self.follow_quotas(before, part, tenant)

    def follow_quotas(self, before, part, tenant):
        """What goes at a commit is the tenant's own, and what is refused is its own too."""
        account = self.cache.accounts.of(tenant)
        for name, sight in self.sight.items():
            space = self.cache.directory.namespaces.get(MANIFESTS[name].digest())
            now = {} if space is None else space.blocks
            gone = before[name].keys() - now.keys()
            assert not gone or account.quota
            assert not {(name, key) for key in gone} & self.leased(), "a leased block stays"
            parents = {sight.parents.get(key) for key in now}
            assert not gone & parents, "a chain's tail goes before its head"
            assert all(self.owners[name, key] is account for key in gone)
            for key in gone:
                del sight.visible[key]
            for key in sight.visible.keys() - before[name].keys():
                self.owners[name, key] = account
        assert account.above("hard", Tier.HOST) <= 0 or not self.within

    def leased(self):
        return {key for keys in self.leases.values() for key in keys}

    @rule(
        quotas=st.dictionaries(
            st.sampled_from([*TENANTS, "*"]),
            st.dictionaries(
                st.sampled_from(["host_hard", "hard", "host_soft"]),
                st.integers(1, 30).map(lambda slots: slots * 4096),
                min_size=1,
            ),
        )
    )
    def quotas_change(self, quotas):
        before = {name: dict(sight.visible) for name, sight in self.sight.items()}
        self.keeper.set(quotas)
        for _ in self.keeper.settle():
            pass  # Orders are complete at the end only.
        check_integrity(self.cache)
        self.follow_evictions(before, moved=False)
        self.within = not any(
            account.above("hard", Tier.HOST) > 0 for account in self.cache.accounts
        )

    @precondition(lambda self: any(self.reserved.values()))
    @rule(data=st.data())
    def abort(self, data):
        session = self.owner_of_slots(data)
        slots = sorted(self.reserved[session.number])[:3]
        self.cache.abort(session, slots)
        self.reserved[session.number].difference_update(slots)

    def owner_of_slots(self, data):
        owners = [s for s in self.schedulers() if self.reserved.get(s.number)]
        return data.draw(st.sampled_from(owners), "session")

    @precondition(lambda self: self.schedulers())
    @rule(data=st.data())
    def a_foreign_slot_is_not_committed(self, data):
        session = data.draw(st.sampled_from(self.schedulers()), "session")
        counted = self.cache.stores[StoreOutcome.UNKNOWN_SLOT]
        self.cache.commit(session, b"", chain("never", 1), [1 << 40])
        self.cache.abort(session, [1 << 40])
        assert self.cache.stores[StoreOutcome.UNKNOWN_SLOT] == counted + 2

    @precondition(lambda self: self.schedulers())
    @rule(
        data=st.data(),
        keys=st.sampled_from(PROMPTS),
        start=st.integers(0, 9),
    )
    def lookup(self, data, keys, start):
        session = data.draw(st.sampled_from(self.schedulers()), "session")
        self.look(session, keys, min(start, len(keys)))

    def look(self, session, keys, start):
        """Each lookup is a lease of its own, also of blocks that the session leases already."""
        sight = self.sight[self.name(session)]
        self.lookups += 1
        slots, absent, _ = self.cache.lookup(session, self.lookups, keys, start)
        expected = []
        for key in keys[start:]:
            if key not in sight.visible:
                break
            expected.append(key)
        assert [sight.content[slot] for slot in slots] == expected, "the right bytes, all of them"
        assert absent == [at for at in range(start) if keys[at] not in sight.visible]
        assert (self.lookups in session.leases) == bool(expected)
        if expected:
            lease = [(self.name(session), key) for key in expected]
            self.leases[session.number, self.lookups] = lease
        return slots

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        number, lease = data.draw(st.sampled_from(sorted(self.leases)), "lease")
        session = self.session(number)
        self.cache.release(session, lease)
        del self.leases[number, lease]

    def session(self, number):
        return next(session for session in self.sessions if session.number == number)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def a_leased_block_is_unreadable(self, data):
        """It is invisible from then on, and its slot stays until the last lease of it ends."""
        number, lease = data.draw(st.sampled_from(sorted(self.leases)), "lease")
        session = self.session(number)
        block = data.draw(st.sampled_from(session.leases[lease]), "block")
        self.cache.unreadable(session, [block.slot])
        name = self.name(session)
        if self.sight[name].visible.get(block.key) == block.slot:
            del self.sight[name].visible[block.key]
        assert block.slot not in session.space.pool.free
        self.forget_leased([(name, block.key)])

    def forget_leased(self, gone):
        """Dropped blocks are not held visible by their leases any more."""
        for lease, keys in self.leases.items():
            self.leases[lease] = [key for key in keys if key not in gone]

    @precondition(lambda self: self.schedulers())
    @rule(data=st.data(), keys=st.sampled_from(PROMPTS))
    def a_block_that_it_does_not_lease_is_not_dropped(self, data, keys):
        session = data.draw(st.sampled_from(self.schedulers()), "session")
        leased = {block.slot for blocks in session.leases.values() for block in blocks}
        visible = self.sight[self.name(session)].visible
        others = [visible[key] for key in keys if key in visible and visible[key] not in leased]
        counted = self.cache.stores[StoreOutcome.UNKNOWN_SLOT]
        self.cache.unreadable(session, [*others, 1 << 40])
        assert self.cache.stores[StoreOutcome.UNKNOWN_SLOT] == counted + len(others) + 1

    @precondition(lambda self: self.schedulers())
    @rule(data=st.data(), keys=st.sampled_from(PROMPTS))
    def touch(self, data, keys):
        self.cache.touch(data.draw(st.sampled_from(self.schedulers()), "session"), keys)

    @precondition(lambda self: self.schedulers())
    @rule(data=st.data())
    def reset(self, data):
        session = data.draw(st.sampled_from(self.schedulers()), "session")
        sight = self.sight[self.name(session)]
        assert self.cache.reset(session.space) == len(sight.visible)
        name = self.name(session)
        self.forget_leased([(name, key) for key in sight.visible])
        sight.visible.clear()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def watch(self, data):
        session = data.draw(st.sampled_from(self.sessions), "session")
        if len(self.watching) < 4:
            mirror = Mirror()
            watcher = self.teller.watch(session.space.changes, mirror)
            self.watching.append((self.name(session), mirror, watcher))

    @precondition(lambda self: self.watching)
    @rule(data=st.data(), behind=st.booleans())
    def a_watcher_reads_or_does_not(self, data, behind):
        _, mirror, watcher = data.draw(st.sampled_from(self.watching), "watcher")
        mirror.behind = behind
        if not behind:
            self.teller.resume(watcher)

    @precondition(lambda self: self.watching)
    @rule(data=st.data(), rarely=st.integers(0, 4))
    def a_watcher_leaves(self, data, rarely):
        if not rarely:
            left = data.draw(st.sampled_from(self.watching), "watcher")
            self.watching.remove(left)
            self.teller.leave(left[2])

    @rule(turns=st.integers(1, 3))
    def the_loop_turns(self, turns):
        for _ in range(min(turns, len(self.turns))):
            self.turns.pop(0)()

    @rule()
    def everybody_hears(self):
        for _, mirror, watcher in self.watching:
            mirror.behind = False
            self.teller.resume(watcher)
        while self.turns:
            self.turns.pop(0)()
        for name, mirror, watcher in self.watching:
            assert mirror.known.keys() == self.sight[name].visible.keys()
            assert watcher.log.since(watcher.place) == [], "what was told is not kept"

    @invariant()
    def leased_bytes_are_never_overwritten(self):
        for session in getattr(self, "sessions", ()):
            content = self.sight[self.name(session)].content
            for blocks in session.leases.values():
                assert all(content[block.slot] == block.key for block in blocks)

    @invariant()
    def integrity(self):
        if hasattr(self, "cache"):
            check_integrity(self.cache)
            for name, sight in self.sight.items():
                space = self.cache.directory.namespaces.get(MANIFESTS[name].digest())
                blocks = {} if space is None else space.blocks
                assert {k: b.slot for k, b in blocks.items()} == sight.visible


HierarchyMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, print_blob=True
)
TestHierarchy = HierarchyMachine.TestCase

EXAMPLES_OF_OTHERS = 25
"""Runs of the same rules with each other policy: part of `make test`."""

for _name in sorted(set(POLICIES) - {HierarchyMachine.policy}):
    _machine = type(f"{_name.title()}Machine", (HierarchyMachine,), {"policy": _name})
    _machine.TestCase.settings = settings(
        HierarchyMachine.TestCase.settings, max_examples=EXAMPLES_OF_OTHERS
    )
    globals()[f"TestHierarchyWith{_name.title()}"] = pytest.mark.slow(_machine.TestCase)
