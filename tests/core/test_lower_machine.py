"""The hierarchy with lower tiers: whatever happens when, a lease gives the right bytes.

Two lower tiers keep records in a dict; one tells all that it holds, the other has to be asked. Jobs
of their threads are run, one by one, when Hypothesis says so, and fail when it says so; the host
tier is so small that blocks leave all the time. Each slot that an engine is given is read, and must
hold the bytes of its key.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvtier.coding import CodecMode
from kvtier.core import AdmissionMode, EvictReason, Fault, ReadOutcome, Role, Tier, WriteMode
from kvtier.hierarchy import Hierarchy
from kvtier.integrity import check_integrity
from kvtier.lower import LowerTier
from kvtier.lower_options import LowerOptions
from kvtier.quotas import QuotaKeeper
from kvtier.worth import LoadMode
from manual_tiers import DictStore, ManualPool, Timers
from support import chain, host_tier, manifest

SLOTS = 40
CAPACITY = 40 * 2 * 4096
MANIFEST = manifest()
CHAINS = [chain(name, 9) for name in "abcd"]
TENANTS = ("", "a", "b")
QUOTA_KEYS = ("hard", "soft", "host_hard", "disk_hard", "disk_soft", "redis_hard")
PROMPTS = [*CHAINS, *([*CHAINS[0][:4], *chain(f"branch {n}", 4)] for n in range(3))]
FAULTS = [None, None, None, ReadOutcome.MISSING, ReadOutcome.CORRUPT, Fault.IO, Fault.FULL]


class LowerMachine(RuleBasedStateMachine):
    """Engines store and look up while jobs end early, late, never or badly."""

    @initialize(
        modes=st.tuples(*[st.sampled_from(WriteMode)] * 2),
        policies=st.tuples(*[st.sampled_from(["lru", "mq", "auto"])] * 2),
        admissions=st.tuples(*[st.sampled_from(AdmissionMode)] * 2),
    )
    def begin(self, modes, policies, admissions=(AdmissionMode.ALWAYS, AdmissionMode.ALWAYS)):
        host = host_tier(SLOTS, high_watermark=0.9, low_watermark=0.8)
        self.now = 0.0
        self.posted = []
        self.timers = Timers()
        stores = [DictStore(Tier.DISK, listed=True), DictStore(Tier.REDIS, listed=False)]
        self.lowers = [
            LowerTier(
                store,
                LowerOptions(
                    CAPACITY,
                    policy,
                    mode,
                    admission,
                    codec=CodecMode.AUTO,
                    queue_bytes=20 * 4096,
                ),
                host._metrics,
                lambda: self.now,
                self.posted.append,
            )
            for store, mode, policy, admission in zip(
                stores, modes, policies, admissions, strict=True
            )
        ]
        for lower in self.lowers:
            lower._pool = ManualPool()
        self.cache = Hierarchy(
            host, host._metrics, lambda: self.now, self.lowers, self.timers.later
        )
        self.keeper = QuotaKeeper(self.cache)
        for lower in self.lowers:
            lower.start()
        self.settle()
        self.sessions = []
        self.waiting = {}
        self.leases = {}
        self.lookups = 0

    def settle(self):
        """Let everything that is under way come to its end."""
        while any(lower._pool.jobs or lower._pool.begun for lower in self.lowers) or self.posted:
            for lower in self.lowers:
                while lower._pool.jobs:
                    lower._pool.run(0)
                lower._pool.hand_over()
            while self.posted:
                self.posted.pop(0)()

    def teardown(self):
        if hasattr(self, "lowers"):
            for session in self.sessions:
                self.cache.close_session(session)
            self.settle()
            check_integrity(self.cache)
            space = next(iter(self.cache.directory.namespaces.values()), None)
            if space is not None:
                assert not any(block.leases for block in space.blocks.values())
                assert not space.doomed
                assert space.leaving == 0
                assert len(space.pool.free) + len(space.blocks) == space.pool.total
            assert not self.cache.promotions.incoming
            assert not self.cache.cascade.writing
            for lower in self.lowers:
                assert (
                    lower.measures.queued_read_bytes
                    == lower.queued_write_bytes
                    == lower._reserved
                    == 0
                )
                assert len(lower.index.policy) == len(lower)
            disk = self.lowers[0]
            known = {key for _, key in disk.store.records}
            assert all(disk.index.has(MANIFEST.digest(), key) for key in known)
            self.cache.host.close()

    @rule()
    def engine_connects(self):
        if len(self.sessions) < 3:
            name = f"engine-{len(self.sessions)}-{self.lookups}"
            self.sessions.append(self.cache.open_session(Role.SCHEDULER, name, 0, 1, MANIFEST))

    def draw_session(self, data):
        return data.draw(st.sampled_from(self.sessions), "session")

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        keys=st.sampled_from(PROMPTS),
        start=st.integers(0, 5),
        tenant=st.sampled_from(TENANTS),
    )
    def store(self, data, keys, start, tenant):
        session = self.draw_session(data)
        count = len(keys) - start
        slots = self.cache.reserve(session, count, 0, (), {tenant: count})
        part = keys[start : start + len(slots)]
        for slot, key in zip(slots, part, strict=True):
            memory = self.cache.host.memory(slot, session.space.pool)
            memory[:] = key * (len(memory) // len(key))
        parent = keys[start - 1] if start else b""
        self.cache.commit(session, parent, part, slots, tenant)

    @rule(
        quotas=st.dictionaries(
            st.sampled_from([*TENANTS, "*"]),
            st.dictionaries(
                st.sampled_from(QUOTA_KEYS),
                st.integers(1, 40).map(lambda slots: slots * 4096),
                min_size=1,
            ),
        )
    )
    def quotas_change(self, quotas):
        self.keeper.set(quotas)
        for _ in self.keeper.settle():
            pass  # Orders are complete at the end only.
        check_integrity(self.cache)

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        keys=st.sampled_from(PROMPTS),
        start=st.integers(0, 6),
        tenant=st.sampled_from(TENANTS),
    )
    def look_up(self, data, keys, start, tenant):
        session = self.draw_session(data)
        self.lookups += 1
        lease = self.lookups

        def done(answer):
            assert self.waiting.pop(lease)[0] is session
            self.check(session, lease, keys, start, answer.slots)
            assert answer.disk + answer.redis <= len(answer.slots)

        ready = self.cache.lookup(session, lease, keys, start, tenant, done)
        if ready.within:
            self.waiting[lease] = (session, keys)
            assert not ready.slots
        else:
            self.check(session, lease, keys, start, ready.slots)

    def check(self, session, lease, keys, start, slots):
        for slot, key in zip(slots, keys[start:], strict=False):
            memory = self.cache.host.memory(slot, session.space.pool)
            assert bytes(memory) == key * (len(memory) // len(key)), "the right bytes"
        assert len(session.leases.get(lease, ())) == len(slots)
        if slots:
            self.leases[lease] = (session, keys[start : start + len(slots)], slots)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        lease = data.draw(st.sampled_from(sorted(self.leases)), "lease")
        session, keys, slots = self.leases.pop(lease)
        for slot, key in zip(slots, keys, strict=True):
            memory = self.cache.host.memory(slot, session.space.pool)
            assert bytes(memory[:32]) == key, "a leased slot keeps its bytes"
        self.cache.release(session, lease)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data):
        lease = data.draw(st.sampled_from(sorted(self.waiting)), "lease")
        session, _ = self.waiting.pop(lease)
        self.cache.release(session, lease)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), rarely=st.integers(0, 3))
    def session_ends(self, data, rarely):
        if not rarely:
            session = self.draw_session(data)
            self.sessions.remove(session)
            for held in (self.leases, self.waiting):
                for lease in [one for one, what in held.items() if what[0] is session]:
                    del held[lease]
            self.cache.close_session(session)

    @precondition(lambda self: any(lower._pool.jobs for lower in self.lowers))
    @rule(which=st.integers(0, 50), fault=st.sampled_from(FAULTS), tier=st.integers(0, 1))
    def a_job_runs(self, which, fault, tier):
        lower = self.lowers[tier]
        if lower._pool.jobs:
            lower.store.next_fault = fault
            lower._pool.run(which)
            lower.store.next_fault = None

    @rule()
    def everything_ends(self):
        self.settle()

    @precondition(lambda self: self.cache.directory.namespaces)
    @rule(count=st.integers(1, 20))
    def memory_is_short(self, count):
        """Other traffic drives blocks out of the host tier."""
        space = next(iter(self.cache.directory.namespaces.values()))
        evictor = self.cache.evictor
        if evictor.heir.inherits:
            evictor._hand_down(evictor.heir, space, count)
        else:
            evictor._evict(space, count)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), keys=st.sampled_from(PROMPTS), start=st.integers(0, 2))
    def what_was_stored_is_wanted_again(self, data, keys, start):
        """The road that lower tiers are for: stored, written, evicted, and looked up."""
        self.store(data, keys, 0, "")
        self.settle()
        self.memory_is_short(data.draw(st.integers(1, 40), "evicted"))
        self.settle()
        if data.draw(st.booleans(), "disk gone"):
            self.lowers[0].drop(
                next(iter(self.cache.directory.namespaces.values())).records,
                keys[data.draw(st.integers(0, 8), "from") :],
                EvictReason.UNREADABLE,
            )
            self.settle()
        self.look_up(data, keys, start, "")

    @rule(tier=st.integers(0, 1))
    def results_arrive(self, tier):
        self.lowers[tier]._pool.hand_over()

    @rule()
    def the_loop_turns(self):
        for _ in range(min(3, len(self.posted))):
            self.posted.pop(0)()

    @rule(seconds=st.floats(0.0, 20.0))
    def time_goes_on(self, seconds):
        self.now += seconds
        for lower in self.lowers:
            lower.tick()

    @rule()
    def the_time_of_a_lookup_is_over(self):
        self.timers.fire()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), rarely=st.integers(0, 5))
    def reset(self, data, rarely):
        if not rarely:
            self.cache.reset(self.draw_session(data).space)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), keys=st.sampled_from(PROMPTS))
    def touch(self, data, keys):
        self.cache.touch(self.draw_session(data), keys)

    @rule(
        mode=st.sampled_from(LoadMode),
        modes=st.tuples(*[st.sampled_from(WriteMode)] * 2),
        admissions=st.tuples(*[st.sampled_from(AdmissionMode)] * 2),
    )
    def modes_change(self, mode, modes, admissions):
        options = self.cache.promotions.options
        self.cache.promotions.options = type(options)(mode, 5.0)
        for lower, write, admission in zip(self.lowers, modes, admissions, strict=True):
            lower.retune(replace(lower.options, write_mode=write, admission=admission))

    @invariant()
    def all_agrees(self):
        if hasattr(self, "cache"):
            check_integrity(self.cache)
            for lower in self.lowers:
                assert lower.used_bytes <= CAPACITY
                assert not lower.store.wrong, "what is written is what was committed"
            spaces = self.cache.directory.namespaces.values()
            here = {hash(key) for space in spaces for key in space.blocks}
            assert here == self.cache.demand._here.keys(), "all that is here is remembered so"
            assert not here & self.cache.demand._gone.keys()


TestLower = LowerMachine.TestCase
TestLower.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_use_that_is_told_late_writes_nothing_from_a_slot_that_is_anothers():
    machine = LowerMachine()
    machine.begin((WriteMode.ON_REUSE, WriteMode.ON_REUSE), ("lru", "lru"))
    session = machine.cache.open_session(Role.SCHEDULER, "engine", 0, 1, MANIFEST)
    machine.sessions.append(session)

    class First:
        def draw(self, strategy, label):
            return session

    machine.store(First(), CHAINS[0], 0, "")
    machine.cache.lookup(session, 1, CHAINS[0], 0)
    machine.cache.release(session, 1)
    machine.cache.evictor._evict(session.space, 9)
    slots = machine.cache.evictor.make_room(session.space, 1)
    memory = machine.cache.host.memory(slots, session.space.pool)
    memory[:] = bytes(len(memory))
    machine.cache.host.give_back(session.space.pool, slots)
    machine.cache.record_use()
    machine.settle()
    assert not any(lower.store.records for lower in machine.lowers)
    machine.teardown()
