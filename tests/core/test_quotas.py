"""Quotas: whose blocks go when a tenant has too many, whose never do, and what is counted."""

from __future__ import annotations

import pytest
from kvtier.accounts import OTHER, TENANTS_AT_MOST, TIERS, Accounts
from kvtier.core import (
    EvictReason,
    PromoteOutcome,
    Role,
    StoreOutcome,
    Tier,
    WriteMode,
    WriteOutcome,
)
from kvtier.hierarchy import Hierarchy
from kvtier.integrity import check_integrity
from kvtier.lower import LowerTier
from kvtier.lower_options import LowerOptions
from kvtier.quotas import QuotaKeeper
from kvtier.readings import Readings
from manual_tiers import DictStore, ManualPool, Timers
from support import chain, host_tier, manifest

SLOT = 4096
RECORD = 2 * SLOT
"""What a record takes of the dict tiers."""


class Cache:
    """A host tier of so many slots over a disk and a Redis tier of dicts, and one engine."""

    def __init__(self, slots, write_mode=WriteMode.THROUGH, capacity=1 << 30, **options):
        self.host = host_tier(slots, **options)
        self.posted = []
        self.timers = Timers()
        self.stores = [DictStore(Tier.DISK, listed=True), DictStore(Tier.REDIS, listed=False)]
        settings = LowerOptions(capacity, "lru", write_mode, queue_bytes=1 << 30)
        self.lowers = [
            LowerTier(store, settings, self.host._metrics, lambda: 0.0, self.posted.append)
            for store in self.stores
        ]
        for lower in self.lowers:
            lower._pool = ManualPool()
        self.cache = Hierarchy(
            self.host, self.host._metrics, lambda: 0.0, self.lowers, self.timers.later
        )
        for lower in self.lowers:
            lower.start()
        self.settle()
        self.keeper = QuotaKeeper(self.cache)
        self.session = self.connect()
        self.lookups = 0

    def connect(self, **fields):
        return self.cache.open_session(Role.SCHEDULER, "engine", 0, 1, manifest(**fields))

    def settle(self):
        while any(one._pool.jobs or one._pool.begun for one in self.lowers) or self.posted:
            for lower in self.lowers:
                while lower._pool.jobs:
                    lower._pool.run(0)
                lower._pool.hand_over()
            while self.posted:
                self.posted.pop(0)()

    def limit(self, **quotas):
        self.keeper.set(quotas)
        for _ in self.keeper.settle():
            check_accounts_only(self)

    def store(self, keys, tenant, start=0, session=None):
        session = session or self.session
        wanted = keys[start:]
        slots = self.cache.reserve(session, len(wanted), 0, [keys[:start]], {tenant: len(wanted)})
        part = wanted[: len(slots)]
        for slot, key in zip(slots, part, strict=True):
            memory = self.host.memory(slot, session.space.pool)
            memory[:] = key * (len(memory) // len(key))
        self.cache.commit(session, keys[start - 1] if start else b"", part, slots, tenant)
        for _ in range(len(keys)):
            self.timers.fire()
        self.settle()

    def look_up(self, keys, tenant, *, keep=False):
        self.lookups += 1
        answers = []
        ready = self.cache.lookup(self.session, self.lookups, keys, 0, tenant, answers.append)
        while ready.within and not answers:
            self.settle()
            self.timers.fire()
        if not keep:
            self.cache.release(self.session, self.lookups)
        return len(answers[0].slots if answers else ready.slots)

    def here(self, keys, tier=Tier.HOST):
        if tier is Tier.HOST:
            return sum(key in self.session.space.blocks for key in keys)
        index = self.lowers[tier is Tier.REDIS].index
        return sum(index.has(self.session.space.digest, key) for key in keys)

    def used(self, tenant):
        return [self.cache.accounts.of(tenant).used[tier] for tier in TIERS]

    def close(self):
        self.cache.record_use()
        self.settle()
        check_integrity(self.cache)
        self.host.close()


def check_accounts_only(cache):
    for tier in TIERS:
        assert all(account.used[tier] >= 0 for account in cache.cache.accounts)


@pytest.fixture
def cache():
    made = Cache(64)
    yield made
    made.close()


def test_a_block_is_charged_to_who_stored_it_first_in_each_tier(cache):
    shared = chain("shared", 6)
    cache.store(shared[:4], "a")
    cache.store(shared, "b", 4)
    cache.store(shared, "c")
    assert cache.used("a") == [4 * SLOT, 4 * RECORD, 4 * RECORD]
    assert cache.used("b") == [2 * SLOT, 2 * RECORD, 2 * RECORD]
    assert cache.used("c") == [0, 0, 0]
    bytes_of = {one.tenant: one.used_bytes for one in Readings(cache.cache).tenants()}
    assert bytes_of["b"] == {"host": 2 * SLOT, "disk": 2 * RECORD, "redis": 2 * RECORD}
    cache.cache.reset(cache.session.space)
    cache.settle()
    assert cache.used("a") == cache.used("b") == [0, 0, 0]


def test_a_tenant_that_floods_drives_out_none_of_anothers_blocks(cache):
    cache.limit(noisy={"host_hard": 16 * SLOT})
    quiet = [chain(f"quiet {n}", 8) for n in range(5)]
    for keys in quiet:
        cache.store(keys, "quiet")
    for n in range(60):
        cache.store(chain(f"noisy {n}", 8), "noisy")
        assert cache.used("noisy")[0] <= 16 * SLOT
    assert [cache.here(keys) for keys in quiet] == [8] * 5
    assert cache.here(chain("noisy 59", 8)) == 8, "its newest are there"


def test_without_a_quota_the_same_flood_drives_them_out(cache):
    cache.store(chain("quiet", 8), "quiet")
    for n in range(60):
        cache.store(chain(f"noisy {n}", 8), "noisy")
    assert cache.here(chain("quiet", 8)) == 0


def test_a_flood_of_a_full_tier_takes_the_room_of_the_floods_own_blocks():
    """The tier is full, so that slots are promised by eviction, before anybody commits."""
    cache = Cache(32, high_watermark=1.0, low_watermark=0.99)
    cache.limit(noisy={"host_hard": 8 * SLOT})
    quiet = [chain(f"quiet {n}", 8) for n in range(3)]
    for n in range(20):
        cache.store(chain(f"noisy {n}", 4), "noisy")
        if n < 3:
            cache.store(quiet[n], "quiet")
    assert [cache.here(keys) for keys in quiet] == [8] * 3
    cache.close()


def test_its_own_coldest_goes_tail_first(cache):
    cache.limit(a={"host_hard": 8 * SLOT})
    first, second = chain("first", 4), chain("second", 4)
    cache.store(first, "a")
    cache.store(second, "a")
    cache.look_up(first, "a")
    cache.store(chain("third", 3), "a")
    assert (cache.here(first), cache.here(second), cache.here(second[:1])) == (4, 1, 1)


def test_what_is_longer_than_a_quota_keeps_its_head(cache):
    cache.limit(a={"host_hard": 5 * SLOT})
    long = chain("long", 9)
    cache.store(long, "a")
    assert cache.here(long[:5]) == cache.here(long) == 5
    assert cache.cache.stores[StoreOutcome.QUOTA] == 4
    assert cache.cache.accounts.of("a").refused >= 4
    cache.store(long, "a", 5)
    assert cache.here(long[:5]) == cache.here(long) == 5


def test_leased_and_pinned_blocks_stay_and_the_store_is_refused(cache):
    cache.limit(a={"host_hard": 6 * SLOT})
    leased, pinned = chain("leased", 3), chain("pinned", 3)
    cache.store(leased, "a")
    cache.store(pinned, "a")
    cache.look_up(leased, "a", keep=True)
    pin = cache.cache.pins.add(cache.session.space, pinned, 60.0, "")
    cache.store(chain("more", 2), "a")
    assert (cache.here(leased), cache.here(pinned)) == (3, 3)
    assert cache.cache.stores[StoreOutcome.QUOTA] == 2
    cache.cache.pins.remove(pin.label)
    cache.store(chain("more", 2), "a")
    assert (cache.here(leased), cache.here(pinned), cache.here(chain("more", 2))) == (3, 1, 2)


def test_a_block_that_anothers_continues_stays(cache):
    cache.limit(a={"host_hard": 2 * SLOT, "disk_hard": 2 * RECORD})
    keys = chain("shared", 6)
    cache.store(keys[:2], "a")
    cache.store(keys, "b", 2)
    cache.store(chain("other", 2), "a")
    for tier in (Tier.HOST, Tier.DISK):
        assert (cache.here(keys, tier), cache.here(chain("other", 2), tier)) == (6, 0)


def test_a_record_that_anothers_continues_stays(cache):
    cache.limit(a={"disk_hard": 2 * RECORD})
    keys = chain("shared", 6)
    cache.store(keys[:2], "a")
    cache.store(keys, "b", 2)
    cache.store(chain("other", 2), "a")
    assert cache.here(chain("other", 2)) == 2
    assert (cache.here(keys, Tier.DISK), cache.here(chain("other", 2), Tier.DISK)) == (6, 0)


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.REDIS])
def test_a_lower_tier_gives_up_its_tenants_own_coldest_records(cache, tier):
    cache.limit(a={f"{tier}_hard": 8 * RECORD})
    store = cache.stores[tier is Tier.REDIS]
    cache.store(chain("quiet", 8), "quiet")
    chains = [chain(f"a {n}", 4) for n in range(5)]
    for keys in chains:
        cache.store(keys, "a")
    assert [cache.here(keys, tier) for keys in chains] == [0, 0, 0, 4, 4]
    assert cache.here(chain("quiet", 8), tier) == 8
    assert len(store.records) == 16, "they went from the medium too"
    counted = cache.host._metrics.evictions.labels(tier, "lru", EvictReason.QUOTA)
    assert counted._value.get() == 12


def test_a_record_whose_parent_is_the_last_that_could_go_is_not_written(cache):
    cache.limit(a={"disk_hard": 3 * RECORD})
    keys = chain("long", 6)
    cache.store(keys, "a")
    assert cache.here(keys[:3], Tier.DISK) == cache.here(keys, Tier.DISK) == 3
    counted = cache.host._metrics.writes.labels(Tier.DISK, WriteOutcome.QUOTA)
    assert counted._value.get() >= 3


def test_writes_under_way_count_as_well(cache):
    cache.limit(a={"disk_hard": 3 * RECORD})
    slots = cache.cache.reserve(cache.session, 5, 0)
    cache.cache.commit(cache.session, b"", chain("long", 5), slots, "a")
    cache.cache.cascade.committed(cache.session.space, [])
    assert len(cache.lowers[0]._pool.jobs) == 3
    cache.settle()


def test_above_a_soft_limit_ones_blocks_go_before_the_policy_is_asked():
    cache = Cache(32, high_watermark=0.9, low_watermark=0.8)
    cache.limit(a={"host_soft": 4 * SLOT})
    cache.store(chain("old", 8), "quiet")
    cache.store(chain("a", 12), "a")
    assert cache.here(chain("a", 12)) == 12, "there was room"
    cache.store(chain("new", 12), "quiet")
    assert cache.here(chain("old", 8)) == 8
    assert cache.here(chain("a", 12)) < 12
    assert cache.used("a")[0] >= 4 * SLOT, "and not below it"
    cache.close()


def test_above_a_soft_limit_ones_records_go_first():
    cache = Cache(64, capacity=20 * RECORD)
    cache.limit(a={"disk_soft": 4 * RECORD})
    cache.store(chain("old", 8), "quiet")
    cache.store(chain("a", 12), "a")
    cache.store(chain("new", 8), "quiet")
    assert cache.here(chain("old", 8), Tier.DISK) == cache.here(chain("new", 8), Tier.DISK) == 8
    assert cache.here(chain("a", 4), Tier.DISK) == cache.here(chain("a", 12), Tier.DISK) == 4
    assert cache.here(chain("old", 8), Tier.REDIS) == 0, "without a limit there"
    cache.close()


def test_what_is_above_a_soft_limit_is_handed_down():
    cache = Cache(32, WriteMode.ON_EVICT, high_watermark=0.9, low_watermark=0.8)
    cache.limit(a={"host_soft": 4 * SLOT})
    cache.store(chain("old", 8), "quiet")
    for n in range(24):  # Of a chain, the tail is handed down before what it continues.
        cache.store(chain(f"a {n}", 1), "a")
    assert cache.here(chain("old", 8)) == 8
    assert cache.here(chain("a 0", 1)) == 0
    assert cache.here(chain("a 0", 1), Tier.DISK) == 1
    assert cache.used("a")[1] > 0
    cache.close()


def test_a_quota_of_all_tiers_counts_them_together(cache):
    quota = 4 * (SLOT + 2 * RECORD)
    cache.limit(a={"hard": quota})
    for n in range(6):
        cache.store(chain(f"a {n}", 4), "a")
        assert sum(cache.used("a")) <= quota
    assert cache.here(chain("a 5", 4)) == 4


def test_what_lies_below_makes_way_for_the_host_tier(cache):
    cache.store(chain("a", 8), "a")
    space = cache.session.space
    for key in reversed(chain("a", 8)):
        cache.cache.evictor.drop(space, space.blocks[key], EvictReason.CAPACITY)
    cache.limit(a={"hard": 16 * RECORD})
    cache.store(chain("b", 2), "a")
    assert cache.here(chain("b", 2)) == 2
    assert cache.used("a")[1] < 8 * RECORD or cache.used("a")[2] < 8 * RECORD
    assert sum(cache.used("a")) <= 16 * RECORD


def test_what_comes_back_is_charged_to_its_owner_and_what_nobody_owns_to_who_asks(cache):
    keys = chain("document", 6)
    cache.store(keys, "a")
    space = cache.session.space
    for key in reversed(keys):
        cache.cache.evictor.drop(space, space.blocks[key], EvictReason.CAPACITY)
    assert cache.look_up(keys, "b") == 6
    assert (cache.used("a")[0], cache.used("b")[0]) == (6 * SLOT, 0)
    found = Cache(32)
    for store, other in zip(found.stores, cache.stores, strict=True):
        store.records |= other.records
    found.lowers[0]._looks.soon()
    found.lowers[0].tick()
    found.settle()
    assert found.look_up(keys, "b") == 6
    assert found.used("b") == [6 * SLOT, 0, 0]
    assert found.used("") == [0, 6 * RECORD, 0]
    found.close()


def test_a_quota_bounds_what_comes_back(cache):
    keys = chain("document", 8)
    cache.store(keys, "a")
    space = cache.session.space
    for key in reversed(keys):
        cache.cache.evictor.drop(space, space.blocks[key], EvictReason.CAPACITY)
    cache.limit(a={"host_hard": 3 * SLOT})
    assert cache.look_up(keys, "a") == 3
    counted = cache.host._metrics.promotions.labels(Tier.DISK, PromoteOutcome.QUOTA)
    assert counted._value.get() == 1
    assert cache.look_up(keys[:3], "a") == 3
    other = chain("other", 3)
    cache.store(other, "a")
    assert (cache.here(keys), cache.here(other)) == (0, 3)


def test_a_lower_quota_lets_ones_own_blocks_go_in_the_order_in_which_they_were_used(cache):
    chains = [chain(f"a {n}", 4) for n in range(6)]
    for keys in chains:
        cache.store(keys, "a")
    cache.store(chain("quiet", 8), "quiet")
    cache.look_up(chains[0], "a")
    cache.limit(a={"host_hard": 12 * SLOT, "disk_hard": 8 * RECORD})
    cache.settle()
    assert [cache.here(keys) for keys in chains] == [4, 0, 0, 0, 4, 4]
    assert [cache.here(keys, Tier.DISK) for keys in chains] == [4, 0, 0, 0, 0, 4]
    assert [cache.here(keys, Tier.REDIS) for keys in chains] == [4] * 6
    assert cache.here(chain("quiet", 8)) == cache.here(chain("quiet", 8), Tier.DISK) == 8


def test_each_step_is_bounded(cache):
    for n in range(7):
        cache.store(chain(f"a {n}", 8), "a")
    cache.keeper.set({"a": {"hard": SLOT}})
    steps = 0
    for _ in cache.keeper.settle():
        steps += 1
    assert steps > 2
    cache.settle()
    assert sum(cache.used("a")) <= SLOT


def test_who_has_no_quota_any_more_has_no_order_either(cache):
    cache.limit(a={"host_hard": 8 * SLOT, "disk_hard": 8 * RECORD})
    cache.store(chain("a", 8), "a")
    assert cache.session.space.orders
    cache.limit()
    assert not cache.session.space.orders
    assert not cache.lowers[0].index.orders
    assert not cache.lowers[0].index._parents
    cache.store(chain("b", 20), "a")
    assert cache.here(chain("b", 20)) == 20
    assert not cache.session.space.orders


def test_a_quota_spans_namespaces(cache):
    cache.limit(a={"host_hard": 8 * SLOT})
    other = cache.connect(model="other")
    cache.store(chain("first", 8), "a")
    cache.store(chain("second", 6), "a", session=other)
    assert cache.here(chain("first", 8)) == 2
    assert len(other.space.blocks) == 6
    assert cache.used("a")[0] == 8 * SLOT


def test_tenants_that_are_not_listed_have_the_quota_of_anybody(cache):
    cache.limit(**{"*": {"host_hard": 4 * SLOT}, "big": {"host_hard": 16 * SLOT}})
    cache.store(chain("small", 8), "small")
    cache.store(chain("big", 12), "big")
    cache.store(chain("nobody", 8), "")
    assert [cache.here(chain(name, 12)) for name in ("small", "big")] == [4, 12]
    assert cache.here(chain("nobody", 8)) == 8
    tenants = {one.tenant: one for one in cache.keeper.readings()}
    assert list(tenants) == ["big", OTHER, "small"]
    assert tenants["small"].fullness == 1.0
    assert tenants["small"].refused_blocks == 4


def test_nobody_may_have_a_quota_too(cache):
    cache.limit(**{"": {"host_hard": 4 * SLOT}})
    cache.store(chain("nobody", 8), "")
    assert cache.here(chain("nobody", 8)) == 4


def test_a_tenant_with_a_quota_has_an_account_however_many_there_are():
    accounts = Accounts()
    accounts.limit({"late": {"hard": 5}})
    for n in range(TENANTS_AT_MOST + 5):
        accounts.of(f"tenant {n}")
    assert accounts.of("tenant 1004").tenant == OTHER
    assert accounts.of("late").tenant == "late"
    assert accounts.of("late").quota == {"hard": 5}


def test_what_would_have_to_go_is_told_beforehand(cache):
    cache.store(chain("a", 8), "a")
    assert cache.keeper.excess({"a": {"host_hard": 6 * SLOT}}) == {
        Tier.HOST: 2 * SLOT, Tier.DISK: 0, Tier.REDIS: 0,
    }  # fmt: skip
    all_used = 8 * (SLOT + 2 * RECORD)
    excess = cache.keeper.excess({"*": {"hard": all_used - 9 * RECORD}})
    assert excess == {Tier.HOST: 0, Tier.DISK: RECORD, Tier.REDIS: 8 * RECORD}
    assert cache.here(chain("a", 8)) == 8
