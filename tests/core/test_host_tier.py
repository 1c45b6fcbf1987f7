"""The host tier's memory: as large as its setting, no larger, and steady."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from pathlib import Path

import pytest
from kvtier.core import PAGE_BYTES, Role, SlotState
from kvtier.errors import HelloRefused, StartError
from kvtier.integrity import check_integrity
from kvtier.metrics import Metrics
from kvtier.policies import POLICIES
from kvtier.readings import Readings
from kvtier.tiers.host import HostOptions, HostTier, slab_size
from kvtier.tiers.slab import HugePages
from support import chain, hierarchy, manifest

MIB = 1 << 20


def allocated(capacity, pages=HugePages.NEVER):
    tier = HostTier(HostOptions(capacity, huge_pages=pages), Metrics())
    asyncio.run(tier.allocate())
    return tier


@pytest.mark.parametrize("capacity", [64 * 1024, MIB, 33 * MIB + 5000, 200 * MIB, 257 * MIB])
def test_the_kernel_counts_what_the_setting_says(capacity):
    tier = allocated(capacity)
    assert 0.98 * capacity <= tier.allocated_bytes <= capacity
    tier.close()


def test_closing_gives_everything_back():
    before = shared_memory()
    tier = allocated(64 * MIB)
    assert shared_memory() - before >= 60 * MIB
    tier.close()
    assert shared_memory() - before < 8 * MIB


def shared_memory():
    """Return the bytes of shared memory that this process keeps alive, open or mapped.

    What the whole machine has would be other tests' too.
    """
    held = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            span, _, _, _, inode = line.split()[:5]
            begin, end = (int(part, 16) for part in span.split("-"))
            held[int(inode)] = end - begin
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The one of the walk itself.
            if str(descriptor.readlink()).startswith("/memfd:"):
                status = descriptor.stat()
                held[status.st_ino] = status.st_blocks * 512
    return sum(held.values())


def test_huge_pages_that_are_not_there_are_asked_for_politely():
    tier = allocated(64 * MIB, HugePages.AUTO)
    assert tier.allocated_bytes >= 62 * MIB
    tier.close()


def test_huge_pages_that_must_be_there_stop_the_start():
    if free_huge_pages():
        pytest.skip("this machine has huge pages to give")
    with pytest.raises(StartError, match=r"vm\.nr_hugepages"):
        allocated(64 * MIB, HugePages.ALWAYS)


def free_huge_pages():
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("HugePages_Free"))


def test_a_slab_is_a_sixteenth_of_the_budget_and_one_gib_at_most():
    assert slab_size(64 * MIB) == 4 * MIB
    assert slab_size(1000 << 30) == 1 << 30
    assert slab_size(PAGE_BYTES) == PAGE_BYTES


def test_a_block_larger_than_a_slab_is_refused_with_the_capacity_that_fits():
    tier = allocated(64 * MIB)
    with pytest.raises(HelloRefused, match=str(5 * MIB * 16)):
        tier.open_pool("n", 5 * MIB)
    tier.close()


def test_ten_thousand_stores_and_evictions_leave_nothing_behind():
    cache = hierarchy(128)
    session = cache.open_session(Role.SCHEDULER, "e", 0, 1, manifest())

    def store(number):
        keys = chain(str(number), 3)
        slots = cache.reserve(session, 3, 0)
        cache.commit(session, b"", keys, slots)
        cache.lookup(session, number, keys, 0)
        cache.release(session, number - 1)

    for number in range(2000):
        store(number)
    gc.collect()
    before, memory = len(gc.get_objects()), cache.host.allocated_bytes
    for number in range(2000, 12_000):
        store(number)
    gc.collect()
    assert len(gc.get_objects()) - before < 200
    assert cache.host.allocated_bytes == memory
    check_integrity(cache)
    cache.host.close()


def test_the_coldest_slab_moves_to_the_namespace_that_needs_it():
    """A model that nobody asks any more gives its memory up, slab by slab, the coldest first."""
    cache = hierarchy(160)
    old = cache.open_session(Role.SCHEDULER, "old", 0, 1, manifest(model="old"))
    for number in range(16):
        keys = chain(f"old {number}", 10)
        cache.commit(old, b"", keys, cache.reserve(old, 10, 0))
    new = cache.open_session(Role.SCHEDULER, "new", 0, 1, manifest(model="new", shard_bytes=8192))
    taken = []
    for number in range(16):
        keys = chain(f"new {number}", 5)
        cache.commit(new, b"", keys, cache.reserve(new, 5, 0))
        check_integrity(cache)
        taken.append(len(new.space.pool.slabs))
    assert taken[-1] >= 15
    assert taken == sorted(taken)
    [reading] = Readings(cache).tiers()
    assert reading.host.slots[SlotState.COMMITTED] == len(old.space.blocks) + len(new.space.blocks)
    cache.host.close()


def test_a_namespace_that_is_new_to_a_full_server_gets_all_that_it_needs_at_once():
    cache = hierarchy(160)
    old = cache.open_session(Role.SCHEDULER, "old", 0, 1, manifest(model="old"))
    for number in range(16):
        cache.commit(old, b"", chain(f"old {number}", 10), cache.reserve(old, 10, 0))
    new = cache.open_session(Role.SCHEDULER, "new", 0, 1, manifest(model="new", shard_bytes=8192))
    assert len(cache.reserve(new, 18, 0)) == 18
    assert len(new.space.pool.slabs) == 4
    check_integrity(cache)
    cache.host.close()


def test_a_hot_namespace_keeps_its_slabs_from_a_cold_one():
    cache = hierarchy(160)
    hot = cache.open_session(Role.SCHEDULER, "hot", 0, 1, manifest(model="hot"))
    keys = chain("hot", 80)
    cache.commit(hot, b"", keys, cache.reserve(hot, 80, 0))
    cold = cache.open_session(Role.SCHEDULER, "cold", 0, 1, manifest(model="cold"))
    for number in range(40):
        cache.lookup(hot, 1, keys, 0)
        cache.release(hot, 1)
        cache.commit(cold, b"", chain(f"cold {number}", 8), cache.reserve(cold, 8, 0))
    assert len(cache.lookup(hot, 1, keys, 0)[0]) == 80
    cache.host.close()


def test_a_leased_tail_keeps_its_head():
    """A request may lease only what the device lacks; what it continues stays as well."""
    cache = hierarchy(32)
    session = cache.open_session(Role.SCHEDULER, "e", 0, 1, manifest())
    keys = chain("kept", 6)
    cache.commit(session, b"", keys, cache.reserve(session, 6, 0))
    cache.lookup(session, 1, keys, 5)
    for number in range(20):
        other = chain(f"other {number}", 6)
        cache.commit(session, b"", other, cache.reserve(session, 6, 0))
    assert all(key in session.space.blocks for key in keys)
    cache.release(session, 1)
    for number in range(20, 30):
        other = chain(f"other {number}", 6)
        cache.commit(session, b"", other, cache.reserve(session, 6, 0))
    assert not any(key in session.space.blocks for key in keys)
    cache.host.close()


def test_a_block_that_comes_back_is_kept_as_long_as_what_continues_it():
    """Its children were stored while it was not there, or stayed when it was dropped."""
    cache = hierarchy(32)
    session = cache.open_session(Role.SCHEDULER, "e", 0, 1, manifest())
    keys = chain("kept", 6)
    cache.commit(session, keys[2], keys[3:], cache.reserve(session, 3, 0))
    cache.commit(session, b"", keys[:3], cache.reserve(session, 3, 0))
    cache.lookup(session, 1, keys, 0)
    cache.unreadable(session, [session.space.blocks[keys[1]].slot])
    cache.commit(session, keys[0], keys[1:2], cache.reserve(session, 1, 0))
    cache.release(session, 1)
    cache.lookup(session, 2, keys, 5)
    for number in range(20):
        other = chain(f"other {number}", 6)
        cache.commit(session, b"", other, cache.reserve(session, 6, 0))
    assert all(key in session.space.blocks for key in keys)
    check_integrity(cache)
    cache.release(session, 2)
    for number in range(20, 30):
        other = chain(f"other {number}", 6)
        cache.commit(session, b"", other, cache.reserve(session, 6, 0))
    assert not any(key in session.space.blocks for key in keys)
    assert not session.space.anchors
    cache.host.close()


def test_children_are_counted_in_one_place_however_often_their_parent_comes_and_goes():
    cache = hierarchy(32)
    session = cache.open_session(Role.SCHEDULER, "e", 0, 1, manifest())
    head, first, *_ = chain("first", 2)
    second = chain("second", 1)

    def store(parent, key):
        cache.commit(session, parent, [key], cache.reserve(session, 1, 0))

    def drop(key):
        cache.lookup(session, 1, [key], 0)
        cache.unreadable(session, [session.space.blocks[key].slot])
        cache.release(session, 1)

    store(b"", head)
    for child in (first, *second):
        store(head, child)
        drop(head)
        store(b"", head)
        check_integrity(cache)
    drop(head)
    assert session.space.anchors[head].children == 2
    drop(first)
    drop(*second)
    assert not session.space.anchors
    check_integrity(cache)
    cache.host.close()


def test_a_prefix_is_found_on_each_branch_whichever_was_stored_or_dropped_last():
    cache = hierarchy(32)
    session = cache.open_session(Role.SCHEDULER, "e", 0, 1, manifest())
    trunk = chain("trunk", 3)
    branches = [chain("one", 3), chain("other", 3)]

    def found(branch):
        return [block.key for block in session.space.prefix([*trunk, *branch], 0)]

    cache.commit(session, b"", trunk, cache.reserve(session, 3, 0))
    for branch in branches * 2:
        cache.commit(session, trunk[-1], branch, cache.reserve(session, 3, 0))
    for branch in branches:
        assert found(branch) == [*trunk, *branch]
    for dropped, kept in (branches, branches[::-1]):
        cache.lookup(session, 1, [*trunk, dropped[0]], 3)
        cache.unreadable(session, [session.space.blocks[dropped[0]].slot])
        cache.release(session, 1)
        assert found(dropped) == trunk
        assert found(kept) == [*trunk, *kept]
        cache.commit(session, trunk[-1], dropped[:1], cache.reserve(session, 1, 0))
        assert found(dropped) == [*trunk, *dropped]
        check_integrity(cache)
    cache.host.close()


def test_a_lookup_is_a_use_before_anything_is_evicted():
    cache = hierarchy(16)
    session = cache.open_session(Role.SCHEDULER, "e", 0, 1, manifest())
    old, new = chain("old", 8), chain("new", 8)
    for keys in (old, new):
        cache.commit(session, b"", keys, cache.reserve(session, 8, 0))
    cache.lookup(session, 1, old, 0)
    cache.release(session, 1)
    cache.reserve(session, 4, 0)
    assert all(key in session.space.blocks for key in old)
    cache.host.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_that_names_a_block_twice_breaks_nothing(policy):
    """Keys are an engine's word, and hashes do not repeat: only a faulty engine's do."""
    cache = hierarchy(16, policy=policy)
    session = cache.open_session(Role.SCHEDULER, "e", 0, 1, manifest())
    one, two = chain("any", 2)
    cache.commit(session, b"", [one, two], cache.reserve(session, 2, 0))
    for number, keys in enumerate(([one, one], [one, two, one], [two, two, one, one])):
        assert len(cache.lookup(session, number, keys, 0)[0]) == len(keys)
        cache.touch(session, keys)
        check_integrity(cache)
        cache.release(session, number)
    cache.commit(session, b"", [one, one], cache.reserve(session, 2, 0))
    check_integrity(cache)
    assert len(cache.reserve(session, 16, 0)) == 16
    cache.host.close()


def test_a_slab_with_a_leased_block_does_not_move():
    cache = hierarchy(160)
    old = cache.open_session(Role.SCHEDULER, "old", 0, 1, manifest(model="old"))
    keys = chain("old", 150)
    cache.commit(old, b"", keys, cache.reserve(old, 150, 0))
    leased = cache.lookup(old, 1, keys[:1], 0)[0]
    new = cache.open_session(Role.SCHEDULER, "new", 0, 1, manifest(model="new"))
    for number in range(30):
        fresh = chain(f"new {number}", 8)
        cache.commit(new, b"", fresh, cache.reserve(new, 8, 0))
        check_integrity(cache)
    assert cache.lookup(old, 2, keys[:1], 0)[0] == leased
    assert len(old.space.pool.slabs) == 1
    cache.host.close()
