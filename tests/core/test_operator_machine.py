"""The same machine with an operator: pins, drops, prefetches and walks, in pieces or at once.

Pieces of work are done one by one, when Hypothesis says so, while engines go on. Whatever happens,
leases give the right bytes, pins hold a prefix that is there, and a drop that ended has dropped.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule
from kvtier.blocks import locate, prefetch
from kvtier.core import AdmissionMode, Role, Tier, WriteMode
from kvtier.drops import Drop
from kvtier.hierarchy import Hierarchy
from kvtier.integrity import check_integrity
from kvtier.pins import PinRefused
from kvtier.policies import POLICIES
from kvtier.prefetch import PREFETCHES_AT_MOST, PrefetchRefused
from kvtier.prefixes import Order, list_prefixes
from manual_tiers import Timers
from support import hierarchy, host_tier
from test_lower_machine import CHAINS, MANIFEST, PROMPTS, LowerMachine

TIERS = [{Tier.HOST, Tier.DISK, Tier.REDIS}, {Tier.HOST}, {Tier.DISK}, {Tier.DISK, Tier.REDIS}]
ALWAYS = (AdmissionMode.ALWAYS, AdmissionMode.ALWAYS)


def finish(work, between=lambda: None):
    """Do all of some work; return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
        between()


def below(keys, at):
    """Return the keys of all prompts that continue `keys[at]`, with it."""
    root = keys[at]
    return {key for each in PROMPTS if root in each for key in each[each.index(root) :]}


class OperatorMachine(LowerMachine):
    """Engines and an operator."""

    @initialize()
    def operator_comes(self):
        self.work = []

    def settle(self):
        """Let all end that is under way, and be offered that waits for a turn of the loop."""
        super().settle()
        while offers := [one for one in self.timers.calls if "_offer" in repr(one[1].func)]:
            for one in offers:
                self.timers.calls.remove(one)
                one[1]()
            super().settle()

    def space(self):
        return next(iter(self.cache.directory.namespaces.values()))

    def teardown(self):
        if hasattr(self, "work") and hasattr(self, "lowers"):
            while self.work:
                self.go_on(self.work[0], 1000)
            for pin in self.cache.pins:
                self.cache.pins.remove(pin.label)
            self.settle()
            assert not self.cache.prefetches.active
            assert self.cache.pins.pinned_bytes == 0
        super().teardown()

    def go_on(self, work, steps):
        for _ in range(steps):
            try:
                next(work)
            except StopIteration:
                self.work.remove(work)
                return
            except PrefetchRefused:
                assert len(self.cache.prefetches.active) == PREFETCHES_AT_MOST
                self.work.remove(work)
                return

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        keys=st.sampled_from(PROMPTS),
        length=st.integers(1, 9),
        stored=st.booleans(),
    )
    def pin(self, data, keys, length, stored):
        if stored:
            self.store(data, keys, 0, "")
        pins, space = self.cache.pins, self.space()
        found = space.prefix(keys[:length], 0)
        fresh = sum(block not in pins for block in found) * space.pool.slot_bytes
        before = pins.pinned_bytes
        try:
            pin = pins.add(space, keys[:length], 60.0, "")
        except PinRefused:
            assert not found or before + fresh > pins.budget_bytes
            return
        assert pin.blocks == found
        assert pins.pinned_bytes == before + fresh <= pins.budget_bytes

    @precondition(lambda self: len(self.cache.pins))
    @rule(data=st.data())
    def unpin(self, data):
        pins = self.cache.pins
        pin = data.draw(st.sampled_from([pin.label for pin in pins]), "pin")
        assert pins.remove(pin)
        assert not pins.remove(pin)

    @precondition(lambda self: len(self.cache.pins))
    @rule(count=st.integers(1, 40))
    def pinned_blocks_stay_when_memory_is_short(self, count):
        held = {pin.label: list(pin.blocks) for pin in self.cache.pins}
        self.memory_is_short(count)
        self.cache.evictor.held_up(self.space())
        assert {pin.label: pin.blocks for pin in self.cache.pins} == held

    @precondition(lambda self: self.sessions and len(self.work) < 3)
    @rule(keys=st.sampled_from(PROMPTS), length=st.integers(1, 9), tiers=st.sampled_from(TIERS))
    def a_drop_begins(self, keys, length, tiers):
        root = keys[: length + 1][-1]
        self.work.append(Drop(self.cache, self.space(), frozenset(tiers), root).run())

    @precondition(lambda self: self.sessions and len(self.work) < 3)
    @rule(tiers=st.sampled_from(TIERS), rarely=st.integers(0, 3))
    def a_drop_of_the_namespace_begins(self, tiers, rarely):
        if not rarely:
            self.work.append(Drop(self.cache, self.space(), frozenset(tiers), None).run())

    @precondition(lambda self: self.sessions)
    @rule(keys=st.sampled_from(PROMPTS), at=st.integers(0, 7), tiers=st.sampled_from(TIERS))
    def a_drop_at_once_drops(self, keys, at, tiers):
        if Tier.HOST not in tiers:
            self.settle()  # What the host tier offers later is written again.
        space, here = self.space(), below(keys, at)
        up = [lower for lower in self.lowers if lower.health.up and lower.tier in tiers]
        leaving = {block.key for block in self.cache.cascade._leaving}
        visible = {key for key in here if keys[at] in self.line(key)} - leaving
        drop = Drop(self.cache, space, frozenset(tiers), keys[at])
        incoming = self.cache.promotions.incoming
        awaited = {one.key for one in incoming if one.waiters or one.then} & here
        dry = Drop(self.cache, space, frozenset(tiers), keys[at])
        finish(dry.count())
        finish(drop.run(), self.settle)
        self.settle()
        if Tier.HOST in tiers:
            assert not (visible | awaited) & space.blocks.keys()
            counted = {gone.tier: gone.blocks for gone in dry.gone}
            assert counted[Tier.HOST] >= len(visible)
            assert {gone.tier: gone.blocks for gone in drop.gone}[Tier.HOST] <= len(
                visible | leaving
            )
        for lower in up:
            if lower.health.up:
                left = {key for _, key in lower.store.records}
                assert not {keys[at], *visible} & left, "what was known to go is gone below too"

    def line(self, key):
        """Yield a visible block's key and those above it, as far as the directory knows them."""
        blocks = self.space().blocks
        block = blocks.get(key)
        while block is not None:
            yield block.key
            block = block.parent and blocks.get(block.parent.key, block.parent)

    @precondition(lambda self: self.sessions and len(self.work) < 3)
    @rule(keys=st.sampled_from(PROMPTS))
    def a_prefetch_begins(self, keys):
        self.work.append(prefetch(self.cache, self.space(), keys))

    @precondition(lambda self: self.work)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def work_goes_on(self, data, steps):
        self.go_on(self.work[data.draw(st.integers(0, len(self.work) - 1), "work")], steps)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), keys=st.sampled_from(PROMPTS))
    def what_was_evicted_is_prefetched(self, data, keys):
        """The road that prefetch is for: stored, written, evicted, and brought back."""
        self.store(data, keys, 0, "")
        self.settle()
        self.memory_is_short(data.draw(st.integers(1, 40), "evicted"))
        self.settle()
        self.work.append(prefetch(self.cache, self.space(), keys))
        self.go_on(self.work[-1], data.draw(st.integers(1, 4), "steps"))

    @precondition(lambda self: self.sessions)
    @rule(keys=st.sampled_from(PROMPTS))
    def a_lookup_of_the_operator_changes_nothing(self, keys):
        space = self.space()
        before = self.snapshot()
        held = finish(locate(self.cache, space, keys), self.settle_asks)
        assert self.snapshot() == before
        host = held.flags[Tier.HOST]
        assert list(host) == [key in space.blocks for key in keys]
        if self.lowers[1].askable(space.records):
            store = self.lowers[1].store
            prefix = store.find(space.records, keys)
            if all(host[at] or held.flags[Tier.DISK][at] or at < prefix for at in range(prefix)):
                assert held.matched >= prefix

    def settle_asks(self):
        """Let the operator's question be answered, and nothing else happen."""
        pool = self.lowers[1]._pool
        for job in [job for job in pool.jobs if job.urgency == 1 and not self.reads(job)]:
            pool.jobs.remove(job)
            job.run()
            job.done(job)

    def reads(self, job):
        return any(one.job is job for one in self.cache.promotions.incoming)

    def snapshot(self):
        space = self.space()
        return (
            {key: (block.slot, block.leases) for key, block in space.blocks.items()},
            list(space.pool.policy.export().blocks),
            dict(space.uses),
            [(len(lower), lower.used_bytes) for lower in self.lowers],
            self.cache.metrics.lookups._value.get(),
            dict(self.cache.demand._here),
        )

    @precondition(lambda self: self.sessions)
    @rule(order=st.sampled_from(Order), limit=st.integers(1, 3))
    def a_list_has_each_block_once(self, order, limit):
        space = self.space()
        found, cursor = [], None
        while True:
            page = finish(list_prefixes(space, (), order, limit, cursor))
            found += page.prefixes
            cursor = page.next
            if cursor is None:
                break
        assert sum(one.blocks for one in found) == len(space.blocks)
        assert len({one.head for one in found}) == len(found) == page.total
        values = [one.uses if order is Order.USES else one.blocks for one in found]
        assert values == sorted(values, reverse=True)

    @invariant()
    def pins_are_within_their_budget(self):
        if hasattr(self, "work") and hasattr(self, "cache"):
            assert self.cache.pins.pinned_bytes <= self.cache.pins.budget_bytes
            assert len(self.cache.prefetches.active) <= PREFETCHES_AT_MOST


TestOperator = OperatorMachine.TestCase
TestOperator.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.fixture
def machine():
    """A machine at its start, with a session; what it holds is checked at the end."""
    machine = OperatorMachine()
    machine.begin((WriteMode.THROUGH, WriteMode.THROUGH), ("lru", "lru"), ALWAYS)
    machine.operator_comes()
    session = machine.cache.open_session(Role.SCHEDULER, "engine", 0, 1, MANIFEST)
    machine.sessions.append(session)

    class First:
        def draw(self, strategy, label):
            return session

    machine.first = First()
    yield machine
    machine.teardown()


def test_a_pin_ends_by_itself_and_with_a_reset(machine):
    machine.store(machine.first, CHAINS[0], 0, "")
    pins, space = machine.cache.pins, machine.space()
    pins.add(space, CHAINS[0], 60.0, "system prompt")
    assert all(block.leases for block in space.prefix(CHAINS[0], 0))
    machine.settle()
    machine.timers.fire()
    assert not len(pins)
    pins.add(space, CHAINS[0], 60.0, "")
    machine.cache.reset(space)
    assert not len(pins)
    assert pins.pinned_bytes == 0


def test_a_pinned_prefix_outlives_all_other_blocks(machine):
    machine.store(machine.first, CHAINS[0], 0, "")
    machine.cache.pins.add(machine.space(), CHAINS[0], 60.0, "")
    for keys in CHAINS[1:] * 2:
        machine.store(machine.first, keys, 0, "")
    machine.settle()
    machine.memory_is_short(40)
    machine.settle()
    assert set(CHAINS[0]) == machine.space().blocks.keys()


def test_a_pin_ends_before_the_first_block_that_goes(machine):
    machine.store(machine.first, CHAINS[0], 0, "")
    pins, space = machine.cache.pins, machine.space()
    pin = pins.add(space, CHAINS[0], 60.0, "")
    drop = Drop(machine.cache, space, frozenset({Tier.HOST}), CHAINS[0][4])
    finish(drop.run(), machine.settle)
    assert [block.key for block in pin.blocks] == CHAINS[0][:4]
    assert pins.pinned_bytes == 4 * space.pool.slot_bytes
    assert [gone.blocks for gone in drop.gone] == [5]


def test_what_pins_may_take_is_a_share_and_says_what_is_free(machine):
    machine.store(machine.first, CHAINS[0], 0, "")
    machine.store(machine.first, CHAINS[1], 0, "")
    pins, space = machine.cache.pins, machine.space()
    pins.add(space, CHAINS[0], 60.0, "")
    with pytest.raises(PinRefused, match="4KiB are free"):
        pins.add(space, CHAINS[1], 60.0, "")
    with pytest.raises(PinRefused, match="Nothing of this prefix"):
        pins.add(space, CHAINS[2], 60.0, "")
    pins.add(space, CHAINS[0], 60.0, "once more takes nothing")


def test_a_prefetch_brings_back_what_was_evicted_and_keeps_no_lease(machine):
    machine.store(machine.first, CHAINS[0], 0, "")
    machine.settle()
    machine.memory_is_short(40)
    assert not machine.space().blocks
    assert finish(prefetch(machine.cache, machine.space(), CHAINS[0]), machine.settle) == 9
    machine.settle()
    blocks = machine.space().prefix(CHAINS[0], 0)
    assert len(blocks) == 9
    assert not any(block.leases for block in blocks)
    check_integrity(machine.cache)


def test_a_request_that_waits_for_a_prefetched_block_is_read_first(machine):
    machine.store(machine.first, CHAINS[0], 0, "")
    machine.settle()
    machine.memory_is_short(40)
    work = prefetch(machine.cache, machine.space(), CHAINS[0])
    finish(work, machine.settle_asks)
    disk = machine.lowers[0]._pool
    assert {int(job.urgency) for job in disk.jobs} == {1}
    machine.modes_change("always", (WriteMode.THROUGH,) * 2, ALWAYS)
    machine.look_up(machine.first, CHAINS[0], 0, "")
    assert {int(job.urgency) for job in disk.jobs} == {0}
    assert len(machine.cache.promotions.incoming) == 9
    machine.settle()


def test_a_prefetch_into_a_full_tier_replaces_a_share_of_it_and_not_more(machine):
    machine.store(machine.first, CHAINS[0], 0, "")
    machine.settle()
    machine.memory_is_short(40)
    for keys in CHAINS[1:]:
        machine.store(machine.first, keys, 0, "")
    machine.settle()
    others = len(machine.space().blocks)
    spare = machine.cache.evictor.spare(machine.space().pool)
    brought = finish(prefetch(machine.cache, machine.space(), CHAINS[0]), machine.settle)
    machine.settle()
    assert 0 < brought <= spare + machine.space().pool.total // 16
    assert len(machine.space().prefix(CHAINS[0], 0)) == brought
    assert others - (len(machine.space().blocks) - brought) <= machine.space().pool.total // 16


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_namespace_is_dropped_whatever_the_policy_and_what_is_leased(policy):
    cache = hierarchy(60, policy=policy)
    session = cache.open_session(Role.SCHEDULER, "engine", 0, 1, MANIFEST)
    for keys in PROMPTS:
        start = len(session.space.prefix(keys, 0))
        slots = cache.reserve(session, len(keys) - start, 0)
        cache.commit(session, keys[start - 1] if start else b"", keys[start:], slots)
    cache.lookup(session, 1, CHAINS[1], 2)
    drop = Drop(cache, session.space, frozenset({Tier.HOST}), None)
    finish(drop.run(), lambda: check_integrity(cache))
    assert not session.space.blocks
    assert [gone.blocks for gone in drop.gone] == [len({key for keys in PROMPTS for key in keys})]
    assert {block.key for block in session.space.doomed} == set(CHAINS[1][2:])
    cache.release(session, 1)
    assert not session.space.doomed
    cache.host.close()


def test_eviction_that_passes_over_pinned_blocks_makes_their_chain_hot(monkeypatch):
    monkeypatch.setattr("kvtier.eviction.PASSED_AT_MOST", 4)
    host = host_tier(60)
    cache = Hierarchy(host, host._metrics, lambda: 0.0, (), Timers().later)
    session = cache.open_session(Role.SCHEDULER, "engine", 0, 1, MANIFEST)
    for keys in CHAINS:
        cache.commit(session, b"", keys, cache.reserve(session, len(keys), 0))
    cache.pins.add(session.space, CHAINS[0], 60.0, "")
    coldest = session.space.pool.policy.victims
    assert next(coldest()) == CHAINS[0][-1]
    cache.evictor._evict(session.space, 1)
    assert next(coldest()) == CHAINS[1][-2], "the last of the next chain went"
    cache.host.close()
