"""Settings that change while the cache works: applied, refused, kept, taken back and told of."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from kvtier.audit import Audit
from kvtier.config import changed, load_settings
from kvtier.core import AdmissionMode, EvictReason, Role, Tier, WriteMode
from kvtier.errors import SettingsError, StartError
from kvtier.guard import GuardOptions
from kvtier.hierarchy import Hierarchy
from kvtier.integrity import check_integrity
from kvtier.live import (
    EFFECT_SECONDS,
    LIVE,
    Kept,
    Live,
    StaleError,
    Wish,
    forget,
    load_kept,
    plain,
    state_folder,
)
from kvtier.lower import LowerTier
from kvtier.lowers import options_of
from kvtier.metrics import Metrics
from kvtier.policies import POLICIES
from kvtier.protocol import Asked
from kvtier.readings import Readings
from kvtier.tiers.compression import CodecMissing
from kvtier.tiers.host import HostOptions, HostTier
from kvtier.tiers.slab import HugePages
from kvtier.worth import LoadMode
from manual_tiers import DictStore, ManualPool, Timers
from support import MANIFEST, chain

SLOT = 4096
HOST = 64 * SLOT


def settings_of(folder, **sections):
    base = load_settings(None, {"state": str(folder), "socket": "/tmp/live.sock"})
    return changed(base, {"host.capacity": f"{HOST // 1024}KiB", "host.policy": "lru", **sections})


class Site:
    """A cache with a disk tier of a dict, one engine, and settings that can change."""

    def __init__(self, folder, kept=None, **sections):
        self.now = 1000.0
        self.posted = []
        self.settings = settings_of(folder, **sections)
        self.metrics = Metrics([Tier.DISK])
        host = self.settings.host
        self.host = HostTier(
            HostOptions(host.capacity, host.policy, huge_pages=HugePages.NEVER), self.metrics
        )
        self.store = DictStore(Tier.DISK, listed=True)
        options = replace(options_of(Tier.DISK, self.settings), queue_bytes=1 << 20)
        self.lower = LowerTier(
            self.store, options, self.metrics, lambda: self.now, self.posted.append
        )
        self.lower._pool = ManualPool()
        self.cache = Hierarchy(
            self.host, self.metrics, lambda: self.now, [self.lower], Timers().later
        )
        self.audit = Audit(state_folder(self.settings), lambda: self.now)
        self.audit.load()
        self.live = Live(
            self.settings, kept or Kept(1, 1, {}), self.cache, self.audit, lambda: self.now
        )
        self.leases = 0
        self.lower.start()

    async def start(self):
        await self.host.allocate()
        self.settle()
        self.session = self.cache.open_session(Role.SCHEDULER, "engine", 0, 1, MANIFEST)
        self.resizing = asyncio.create_task(self.live.resizer.run())
        return self

    async def close(self):
        self.resizing.cancel()
        await asyncio.gather(self.resizing, return_exceptions=True)
        await self.live.close()
        self.settle()
        self.cache.record_use()
        check_integrity(self.cache)
        self.host.close()

    def settle(self):
        pool = self.lower._pool
        while pool.jobs or pool.begun or self.posted:
            while pool.jobs:
                pool.run(0)
            pool.hand_over()
            while self.posted:
                self.posted.pop(0)()

    async def until(self, done):
        for _ in range(2000):
            self.settle()
            if done():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("it did not come to pass")

    def request(self, keys):
        """Ask for a chain and store what is missing. Returns how many blocks were there."""
        self.leases += 1
        found = self.cache.lookup(self.session, self.leases, keys, 0).slots
        for key, slot in zip(keys, found, strict=False):
            assert self.memory(slot)[:32] == key, "a slot has the bytes of its key"
        self.cache.record_use()
        new = keys[len(found) :]
        slots = self.cache.reserve(self.session, len(new), 0, [keys])
        for key, slot in zip(new, slots, strict=False):
            self.memory(slot)[:32] = key
        parent = keys[len(found) - 1] if found else b""
        self.cache.commit(self.session, parent, new[: len(slots)], slots)
        self.cache.release(self.session, self.leases)
        asked = Asked("", len(keys), 0, len(found))
        self.cache.count(self.session, asked)
        return len(found)

    def memory(self, slot):
        return self.host.memory(slot, self.session.space.pool)

    async def change(self, **more):
        wish = {"who": "me", "changes": {}} | more
        return await self.live.change(Wish(**wish))


@pytest.fixture
async def site(tmp_path):
    made = []

    async def make(**options):
        one = await Site(tmp_path / "state", **options).start()
        made.append(one)
        return one

    yield make
    for one in made:
        await one.close()


async def test_a_change_is_in_force_at_once_and_has_a_version(site):
    one = await site()
    done = await one.change(
        changes={
            "disk.write_mode": "on_evict",
            "disk.admission": "second_hit",
            "disk.write_rate": "1MiB",
            "disk.failures": 7,
            "host.low_watermark": 0.5,
            "loads.mode": "always",
        }
    )
    options = one.lower.options
    assert (options.write_mode, options.admission) == (WriteMode.ON_EVICT, AdmissionMode.SECOND_HIT)
    assert (one.lower.throttle.rate, one.lower.health.breaker.options.failures) == (1 << 20, 7)
    assert one.host.options.low_watermark == 0.5
    assert one.cache.promotions.options.mode is LoadMode.ALWAYS
    assert (done.version, one.live.version) == (2, 2)
    assert done.changes["disk.failures"] == (3, 7)
    assert one.live.settings.disk.failures == 7


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host.polcy": "lru"}, '"host.polcy" is not one of .* the nearest is host.policy'),
        ({"http.port": 1}, "Other settings need a restart"),
        ({"": 1}, "A key is empty"),
        ({"host.policy": "lruu"}, "host.policy: .* the nearest is lru"),
        ({"host.low_watermark": 0.99}, "must be below host.high_watermark"),
        ({"host.capacity": "900TiB"}, "is larger than"),
        ({"disk.capacity": 5}, "is not a size"),
        ({"disk.codec": "alwys"}, "the nearest is always"),
        ({"disk.failures": 0, "host.policy": "mq"}, "disk.failures: 0 does not fit"),
    ],
)
async def test_what_does_not_fit_changes_nothing(site, changes, said):
    one = await site()
    before = plain(one.live.settings)
    with pytest.raises(SettingsError, match=said):
        await one.change(changes=changes)
    assert (plain(one.live.settings), one.live.version) == (before, 1)
    assert one.audit.page(None, 10) == []
    assert one.session.space.pool.policy.name == "lru"


async def test_a_change_for_another_version_is_refused(site):
    one = await site()
    await one.change(changes={"disk.failures": 4}, version=1)
    with pytest.raises(StaleError, match="have version 2, and the change was made for 1"):
        await one.change(changes={"disk.failures": 5}, version=1)
    assert one.live.settings.disk.failures == 4


async def test_the_same_again_changes_nothing(site):
    one = await site()
    first = await one.change(changes={"disk.failures": 4})
    again = await one.change(changes={"disk.failures": 4})
    assert (again.version, again.changes, again.audit) == (first.version, {}, None)


async def test_a_dry_run_says_what_would_go_and_changes_nothing(site):
    one = await site()
    for number in range(10):
        one.request(chain(f"{number}", 6))
    done = await one.change(changes={"host.capacity": f"{HOST // 2048}KiB"}, dry_run=True)
    used = len(one.session.space.blocks) * SLOT
    assert done.evict_bytes["host"] == used - HOST // 2 > 0
    assert (one.live.version, one.host.options.capacity_bytes) == (1, HOST)


@pytest.mark.parametrize("name", POLICIES)
async def test_a_swap_of_policy_keeps_the_blocks_and_their_order(site, name):
    one = await site()
    hot = chain("hot", 8)
    for number in range(30):
        one.request(hot)
        one.request(chain(f"{number % 7}", 5))
    pool = one.session.space.pool
    blocks = set(one.session.space.blocks)
    await one.change(changes={"host.policy": name, "disk.policy": name})
    for number in range(5):
        one.request(chain(f"{number % 7}", 5))
    await one.until(lambda: pool.policy.name == name and one.lower.index.policy.name == name)
    assert set(pool.policy.resident) == set(one.session.space.blocks) >= blocks
    assert one.request(hot) == 8


async def test_requests_go_on_while_a_policy_is_handed_over(site, monkeypatch):
    """The journal: what happens while the new policy adopts is known to it afterwards."""
    one = await site()
    gate = asyncio.Event()
    adopt = POLICIES["arc"].adopt
    loop = asyncio.get_running_loop()

    def slowly(self, state):
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        adopt(self, state)

    monkeypatch.setattr(POLICIES["arc"], "adopt", slowly)
    for number in range(8):
        one.request(chain(f"{number}", 5))
    await one.change(changes={"host.policy": "arc"})
    pool = one.session.space.pool
    await one.until(lambda: pool.policy.name == "handover")
    for number in range(40):
        one.request(chain(f"more {number}", 4))
        check_integrity(one.cache)
    gate.set()
    await one.until(lambda: pool.policy.name == "arc")
    check_integrity(one.cache)


async def test_the_gauges_have_what_was_measured_of_a_tier(site):
    one = await site()

    def shown():
        Readings(one.cache).refresh_metrics()
        gauges = (one.metrics.tier_read_rate, one.metrics.tier_latency_seconds)
        return [gauge.labels("disk")._value.get() for gauge in gauges]

    assert shown() == [0.0, 0.0]
    one.lower.measures.speed.bandwidth = 5e6
    one.lower.measures.speed.latency = 0.003
    assert shown() == [5e6, 0.003]


async def test_an_eviction_counts_for_the_policy_that_decided_it(site, monkeypatch):
    one = await site(**{"disk.admission": "always"})
    gate = asyncio.Event()
    adopt = POLICIES["arc"].adopt
    loop = asyncio.get_running_loop()

    def slowly(self, state):
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        adopt(self, state)

    def counted(tier, policy):
        return one.metrics.evictions.labels(tier, policy, EvictReason.CAPACITY)._value.get()

    monkeypatch.setattr(POLICIES["arc"], "adopt", slowly)
    await one.change(changes={"host.policy": "arc"})
    for number in range(40):
        one.request(chain(f"{number}", 4))
    by_the_old_one = counted("host", "lru")
    assert by_the_old_one > 0 == counted("host", "arc")
    gate.set()
    await one.until(lambda: one.session.space.pool.policy.name == "arc")
    for number in range(40):
        one.request(chain(f"more {number}", 4))
        one.settle()
    assert counted("host", "lru") == by_the_old_one
    assert by_the_old_one + counted("host", "arc") == one.cache.evictor.evictions
    await one.change(changes={"disk.capacity": "64KiB"})
    await one.until(lambda: one.lower.used_bytes <= 64 << 10)
    assert counted("disk", "mq") == one.lower.evictions > 0


async def test_capacity_grows_and_shrinks_while_blocks_are_used(site):
    one = await site()
    hot = chain("hot", 6)
    for number in range(20):
        one.request(hot)
        one.request(chain(f"{number}", 5))
    await one.change(changes={"host.capacity": f"{HOST // 4096}KiB"})
    await one.until(lambda: one.host.allocated_bytes <= HOST // 4)
    assert one.request(hot) == 6, "the hottest blocks stay, wherever they lay"
    assert one.session.space.pool.total == 16
    check_integrity(one.cache)
    await one.change(changes={"host.capacity": f"{HOST // 512}KiB"})
    await one.until(lambda: one.host.total_bytes == 2 * HOST)
    for number in range(20):
        one.request(chain(f"again {number}", 5))
    assert len(one.session.space.blocks) > 100


async def test_a_leased_block_is_waited_for_when_its_slab_goes(site):
    one = await site()
    keys = chain("leased", 60)
    one.request(keys)
    slots = one.cache.lookup(one.session, 10_000, keys, 0).slots
    await one.change(changes={"host.capacity": f"{HOST // 4096}KiB"})
    for _ in range(30):
        await asyncio.sleep(0.002)
    for key, slot in zip(keys, slots, strict=True):
        assert one.memory(slot)[:32] == key, "leased bytes stay where they are"
    one.cache.release(one.session, 10_000)
    await one.until(lambda: one.host.allocated_bytes <= HOST // 4)


async def test_a_shrink_that_is_taken_back_stops(site):
    one = await site()
    keys = chain("leased", 60)
    one.request(keys)
    one.cache.lookup(one.session, 10_000, keys, 0)
    await one.change(changes={"host.capacity": f"{HOST // 4096}KiB"})
    await asyncio.sleep(0.01)
    await one.change(changes={"host.capacity": f"{HOST // 1024}KiB"})
    await one.until(lambda: one.host.total_bytes == HOST)
    assert one.session.space.pool.total == 60
    one.cache.release(one.session, 10_000)
    check_integrity(one.cache)


async def test_a_smaller_lower_tier_gives_up_what_is_coldest(site):
    one = await site(**{"disk.admission": "always"})
    for number in range(12):
        one.request(chain(f"{number}", 5))
        one.settle()
    assert one.lower.used_bytes == 60 * 2 * SLOT
    await one.change(changes={"disk.capacity": f"{10 * 2 * SLOT // 1024}KiB"})
    await one.until(lambda: one.lower.used_bytes <= 10 * 2 * SLOT)
    assert len(one.store.records) == len(one.lower) == 10


async def test_changes_outlive_a_restart_until_they_are_forgotten(site, tmp_path):
    one = await site()
    await one.change(changes={"disk.failures": 9, "host.policy": "mq"})
    base = settings_of(tmp_path / "state")
    settings, kept = load_kept(base)
    assert (settings.disk.failures, settings.host.policy, kept.version) == (9, "mq", 2)
    forget(base)
    assert load_kept(base) == (base, Kept(1, 1, {}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "can't be read"),
        ('{"format": 2, "version": 1, "changes": {}}', "has format 2"),
        (
            '{"format": 1, "version": 1, "changes": {"host.policy": "best"}}',
            "does not fit any more",
        ),
        ('{"format": 1, "version": 1, "changes": {"http.port": 1}}', "does not fit any more"),
    ],
)
def test_kept_changes_that_do_not_fit_stop_the_start_with_the_way_out(tmp_path, text, said):
    base = settings_of(tmp_path)
    folder = state_folder(base)
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(text)
    with pytest.raises(SettingsError, match=f"{said}.*--reset-settings"):
        load_kept(base)


async def test_a_state_directory_that_can_not_be_written_costs_only_the_memory_of_it(
    site, tmp_path
):
    (tmp_path / "state").write_text("a file")
    one = await site()
    await one.change(changes={"disk.failures": 9})
    assert one.live.settings.disk.failures == 9
    assert one.audit.page(None, 5)[0].changes == {"disk.failures": (3, 9)}


async def test_a_file_that_is_read_again_lies_below_what_was_changed(site, tmp_path):
    one = await site()
    await one.change(changes={"disk.failures": 9})
    base = settings_of(tmp_path / "state", **{"disk.failures": 5, "loads.wait_seconds": 9})
    await one.live.reload(base)
    assert one.live.settings.disk.failures == 9
    assert one.live.settings.loads.wait_seconds == 9
    assert one.live.kept == {"disk.failures": 9}
    assert one.audit.page(None, 1)[0].what == "reload"


# The audit.


async def test_the_audit_says_who_what_and_what_followed_and_outlives_the_server(site, tmp_path):
    one = await site()
    for number in range(10):
        one.request(chain(f"{number}", 6))
    await one.change(who="ann at 10.0.0.7", changes={"host.capacity": f"{HOST // 2048}KiB"})
    await one.until(lambda: one.host.allocated_bytes <= HOST // 2)
    one.now += EFFECT_SECONDS
    await one.live.follow()
    effect, change = one.audit.page(None, 10)
    assert (change.who, change.what, change.version) == ("ann at 10.0.0.7", "change", 2)
    assert change.changes == {"host.capacity": ("256KiB", "128KiB")}
    assert (effect.what, effect.of) == ("effect", change.id)
    assert effect.evicted_blocks["host"] > 20
    again = Audit(state_folder(one.settings), lambda: 0.0)
    again.load()
    assert again.page(None, 10) == [effect, change]


async def test_a_damaged_line_of_the_audit_is_passed_over(site):
    one = await site()
    await one.change(changes={"disk.failures": 4})
    file = state_folder(one.settings) / "audit.jsonl"
    file.write_bytes(b"\x00\xff{\n" + file.read_bytes() + b'{"id": 7')
    again = Audit(state_folder(one.settings), lambda: 0.0)
    again.load()
    assert [entry.id for entry in again.page(None, 10)] == [1]
    await again.add("x", "change", 3)
    assert json.loads(file.read_bytes().splitlines()[-1].removeprefix(b'{"id": 7'))["id"] == 2


async def test_pages_of_the_audit_follow_each_other(site):
    one = await site()
    for failures in range(4, 14):
        await one.change(changes={"disk.failures": failures})
    first = one.audit.page(None, 4)
    second = one.audit.page(first[-1].id, 4)
    assert [entry.id for entry in first + second] == [10, 9, 8, 7, 6, 5, 4, 3]


# The guard.

GUARD = GuardOptions(max_drop=0.1, within_seconds=60, least_tokens=100)


async def traffic(one, seconds, keys):
    for _ in range(seconds):
        one.now += 1.0
        one.request(keys)
        one.live.tick()
        await one.live.follow()


async def test_a_guarded_change_is_taken_back_when_the_hit_ratio_falls(site):
    one = await site()
    keys = chain("hot", 20)
    await traffic(one, 60, keys)
    await one.change(
        changes={"host.capacity": f"{HOST // 4096}KiB", "disk.failures": 5}, guard=GUARD
    )
    await one.change(changes={"disk.failures": 6})
    await one.until(lambda: one.host.allocated_bytes <= HOST // 4)
    for number in range(10):
        await traffic(one, 1, chain(f"cold {number}", 16))
    assert one.live.settings.host.capacity == HOST
    assert one.live.settings.disk.failures == 6, "what was changed again since stays"
    rollback = next(entry for entry in one.audit.page(None, 9) if entry.what == "rollback")
    assert (rollback.who, rollback.of) == ("guard", 1)
    assert rollback.changes == {"host.capacity": ("64KiB", "256KiB")}


async def test_a_guarded_change_that_holds_stays(site):
    one = await site()
    keys = chain("hot", 20)
    await traffic(one, 60, keys)
    await one.change(changes={"host.policy": "mq"}, guard=GUARD)
    await traffic(one, 61, keys)
    assert one.live.settings.host.policy == "mq"
    effect = one.audit.page(None, 1)[0]
    assert (effect.what, effect.note) == ("effect", "guard: held")
    assert effect.hit_ratio_before > 0.9 < effect.hit_ratio_after


async def test_a_guard_without_enough_traffic_says_so(site):
    one = await site()
    await one.change(changes={"host.policy": "mq"}, guard=GUARD)
    await traffic(one, 61, chain("hot", 1))
    assert one.audit.page(None, 1)[0].note == "guard: too few tokens to say"
    assert "too few tokens before" in one.audit.page(None, 2)[1].note


QUOTAS = {"a": {"host_hard": f"{8 * SLOT // 1024}KiB", "soft": "1GiB"}}


async def test_quotas_count_at_once_and_let_go_what_is_too_much(site, tmp_path):
    site = await site()
    running = asyncio.create_task(site.live.quotas.run())
    keys = chain("a", 16)
    slots = site.cache.reserve(site.session, 16, 0)
    site.cache.commit(site.session, b"", keys, slots, "a")
    site.settle()
    tried = await site.live.change(Wish("op", {"quotas.tenants": QUOTAS}, dry_run=True))
    assert tried.evict_bytes == {"host": 8 * SLOT, "disk": 0}
    assert len(site.cache.directory) == 16
    done = await site.live.change(Wish("op", {"quotas.tenants": QUOTAS}))
    assert done.changes == {"quotas.tenants": ({}, QUOTAS)}
    await site.until(lambda: len(site.cache.directory) == 8)
    assert site.session.space.prefix(keys, 0)[-1].key == keys[7]
    (entry,) = site.audit.page(None, 10)
    assert entry.changes == {"quotas.tenants": ({}, QUOTAS)}
    again, kept = load_kept(settings_of(tmp_path / "state"))
    assert again.quotas.tenants == {"a": {"host_hard": 8 * SLOT, "soft": 1 << 30}}
    assert plain(again)["quotas.tenants"] == QUOTAS
    fresh = Site(tmp_path / "state", kept, **kept.changes)
    assert fresh.cache.accounts.of("a").quota == {"host_hard": 8 * SLOT, "soft": 1 << 30}
    running.cancel()


async def test_a_lease_is_waited_for_when_a_quota_falls(site):
    site = await site()
    running = asyncio.create_task(site.live.quotas.run())
    keys = chain("a", 8)
    slots = site.cache.reserve(site.session, 8, 0)
    site.cache.commit(site.session, b"", keys, slots, "a")
    site.cache.lookup(site.session, 1, keys, 0, "a")
    quotas = {"a": {"host_hard": f"{4 * SLOT // 1024}KiB"}}
    await site.live.change(Wish("op", {"quotas.tenants": quotas}))
    await asyncio.sleep(0.01)
    assert len(site.cache.directory) == 8
    site.cache.release(site.session, 1)
    await site.until(lambda: len(site.cache.directory) == 4)
    running.cancel()


def test_every_setting_of_the_list_is_a_setting(tmp_path):
    assert set(plain(settings_of(tmp_path))) == set(LIVE)


async def test_a_guard_that_can_not_take_a_change_back_says_so_and_goes_on(site):
    one = await site()
    await traffic(one, 60, chain("hot", 20))
    await one.change(changes={"host.low_watermark": 0.3}, guard=GUARD)
    await one.change(changes={"host.high_watermark": 0.5})
    for number in range(20):
        await traffic(one, 1, chain(f"cold {number}", 16))
    assert one.live.settings.host.low_watermark == 0.3
    note = one.audit.page(None, 1)[0].note
    assert note.startswith("guard: can't be taken back: host.low_watermark")
    await traffic(one, 1, chain("hot", 20))


async def test_memory_that_can_not_be_had_leaves_the_tier_as_it_is(site, monkeypatch):
    one = await site()
    keys = chain("a", 8)
    one.request(keys)

    def refuse(number, size, pages):
        raise StartError("no memory")

    monkeypatch.setattr("kvtier.tiers.host.make_slab", refuse)
    await one.change(changes={"host.capacity": f"{HOST // 256}KiB"})
    await one.until(lambda: one.host.options.capacity_bytes == HOST)
    assert one.request(keys) == 8
    assert not one.resizing.done()


async def test_a_codec_that_can_not_be_had_changes_nothing_of_the_whole(site, monkeypatch):
    def missing():
        raise CodecMissing("zstandard is not installed")

    monkeypatch.setattr("kvtier.tiers.compression.require", missing)
    one = await site()
    before = (one.host.options, one.lower.options)
    with pytest.raises(SettingsError, match=r"disk\.codec is always"):
        await one.change(changes={"host.low_watermark": 0.2, "disk.codec": "always"})
    assert (one.host.options, one.lower.options) == before
    assert one.live.settings.host.low_watermark == 0.95
