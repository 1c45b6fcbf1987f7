"""The cascade: when blocks are offered to lower tiers, which are taken, and what is counted."""

from __future__ import annotations

import asyncio

import pytest
from kvtier.core import AdmissionMode, AdmitOutcome, Role, Tier, WriteMode
from kvtier.hierarchy import Hierarchy
from kvtier.lower import LowerTier
from kvtier.lower_options import LowerOptions
from kvtier.lowers import drain
from manual_tiers import DictStore, ManualPool, Timers
from support import MANIFEST, chain, host_tier

RECORD = 2 * 4096


class Site:
    """A cache with one lower tier, and one engine."""

    def __init__(self, slots=64, capacity=1000 * RECORD, **options):
        host = host_tier(slots, high_watermark=0.7, low_watermark=0.6)
        self.now = 0.0
        self.posted = []
        self.store = DictStore(Tier.DISK, listed=True)
        self.metrics = host._metrics
        self.lower = LowerTier(
            self.store,
            LowerOptions(capacity, **options),
            self.metrics,
            lambda: self.now,
            self.posted.append,
        )
        self.lower._pool = ManualPool()
        self.cache = Hierarchy(host, self.metrics, lambda: self.now, [self.lower], Timers().later)
        self.lower.start()
        self.settle()
        self.session = self.cache.open_session(Role.SCHEDULER, "engine", 0, 1, MANIFEST)
        self.leases = 0

    def settle(self):
        pool = self.lower._pool
        while pool.jobs or pool.begun or self.posted:
            while pool.jobs:
                pool.run(0)
            pool.hand_over()
            while self.posted:
                self.posted.pop(0)()

    def request(self, keys):
        """Ask for a chain, as an engine does, and store what is not there."""
        self.leases += 1
        found = self.cache.lookup(self.session, self.leases, keys, 0).slots
        self.cache.record_use()
        new = keys[len(found) :]
        slots = self.cache.reserve(self.session, len(new), 0, [keys])
        for key, slot in zip(new, slots, strict=True):
            self.cache.host.memory(slot, self.session.space.pool)[:32] = key
        parent = keys[len(found) - 1] if found else b""
        self.cache.commit(self.session, parent, new, slots)
        self.cache.release(self.session, self.leases)

    def counted(self):
        return {
            outcome.value: int(self.metrics.admissions.labels(Tier.DISK, outcome)._value.get())
            for outcome in AdmitOutcome
            if self.metrics.admissions.labels(Tier.DISK, outcome)._value.get()
        }

    def written(self):
        return {key for _, key in self.store.records}

    def close(self):
        self.cache.host.close()


@pytest.fixture
def site():
    made = []

    def make(**options):
        made.append(Site(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_second_hit_writes_at_the_second_request_and_counts_what_it_refused(site):
    one = site(admission=AdmissionMode.SECOND_HIT)
    keys = chain("a", 3)
    one.request(keys)
    one.settle()
    assert (one.written(), one.counted()) == (set(), {"used_once": 3})
    one.request([*keys, *chain("b", 1)])
    one.settle()
    assert one.written() == set(keys)
    assert one.counted() == {"used_once": 4, "admitted": 3}


def test_learned_stops_to_write_what_never_comes_back(site):
    one = site(slots=32, admission=AdmissionMode.LEARNED, write_mode=WriteMode.ON_EVICT)
    for number in range(200):
        one.request(chain(f"once-{number}", 4))
        one.settle()
    counted = one.counted()
    assert counted["admitted"] < 100
    assert counted["unlikely"] > 500
    assert len(one.written()) == counted["admitted"]


def test_cost_writes_nothing_that_is_computed_sooner_than_it_is_read(site):
    one = site(admission=AdmissionMode.COST)
    keys = chain("a", 2)
    one.request(keys)
    one.settle()
    assert one.counted() == {"admitted": 2}, "what was not measured is taken"
    one.lower.measures.speed.bandwidth = 4096.0
    one.cache.computed(one.session, 16_000, 1.0)
    one.request(chain("b", 2))
    assert one.counted() == {"admitted": 2, "too_dear": 2}


def test_a_throttled_tier_takes_its_rate(site):
    one = site(write_rate=4096.0)
    for number in range(20):
        one.request(chain(f"{number}", 1))
    one.settle()
    assert one.counted() == {"admitted": 10, "throttled": 10}
    one.now += 5.0
    one.request(chain("later", 3))
    assert one.counted() == {"admitted": 13, "throttled": 10}


def test_what_a_through_tier_lost_is_written_again_when_it_is_used(site):
    one = site()
    keys = chain("a", 4)
    one.request(keys)
    one.settle()
    one.lower.drop(one.session.space.records, keys[1:], "unreadable")
    one.settle()
    assert one.written() == {keys[0]}
    one.request(keys)
    one.settle()
    assert one.written() == set(keys)


def test_refused_blocks_leave_the_host_tier_at_once(site):
    one = site(slots=16, admission=AdmissionMode.SECOND_HIT, write_mode=WriteMode.ON_EVICT)
    for number in range(20):
        one.request(chain(f"{number}", 4))
    assert not one.cache.cascade.writing
    assert one.session.space.leaving == 0
    assert one.counted()["used_once"] > 40


async def settle_meanwhile(one, times=10_000):
    for _ in range(times):
        await asyncio.sleep(0)
        one.settle()


async def shut_down(one, seconds=30.0):
    task = asyncio.create_task(settle_meanwhile(one))
    await drain([one.lower], one.cache.flush(), seconds)
    task.cancel()


async def test_at_the_end_an_on_evict_tier_gets_what_is_in_the_host_tier(site):
    one = await asyncio.to_thread(site, write_mode=WriteMode.ON_EVICT)
    keys = chain("a", 20)
    one.request(keys)
    await shut_down(one)
    assert one.written() == set(keys)


async def test_at_the_end_a_small_tier_gets_what_is_hottest(site):
    one = await asyncio.to_thread(site, write_mode=WriteMode.ON_EVICT, capacity=6 * RECORD)
    cold, hot = chain("cold", 20), chain("hot", 3)
    one.request(cold)
    one.request(hot)
    await shut_down(one)
    assert set(hot) <= one.written()
    assert len(one.written()) <= 6


async def test_at_the_end_a_tier_that_hangs_is_waited_for_no_longer_than_allowed(site):
    one = await asyncio.to_thread(site, write_mode=WriteMode.ON_EVICT, queue_bytes=4 * 4096)
    one.request(chain("a", 20))
    await drain([one.lower], one.cache.flush(), 0.05)
    assert 0 < len(one.lower._pool.jobs) <= 4


async def test_at_the_end_a_through_tier_is_given_nothing_that_it_turned_down(site):
    one = await asyncio.to_thread(site, admission=AdmissionMode.SECOND_HIT)
    one.request(chain("a", 5))
    await shut_down(one)
    assert one.written() == set()
