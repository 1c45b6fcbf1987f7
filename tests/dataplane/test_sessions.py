"""Sessions over a real socket: store, lookup, lease, and what a lost connection leaves."""

from __future__ import annotations

import mmap
import os
import socket
from functools import partial

import msgspec
import pytest
from kvtier import protocol as wire
from kvtier.core import (
    PAGE_BYTES,
    EvictReason,
    Role,
    SlotState,
    StoreOutcome,
    Tier,
    unpack_slot,
)
from kvtier.errors import ProtocolError, StartError
from kvtier.link import Link
from kvtier.stats import read_stats
from support import MANIFEST, chain, manifest, tokens, until

KEYS = chain("document", 6)


def store(client, keys, parent=b""):
    granted = client.step(wire.Step(0, need=len(keys)))
    slots = granted.slots[: len(keys)]
    assert client.send(wire.Step(0, commits=[wire.Chain(parent, b"".join(keys), slots)]))
    return slots


def test_what_was_committed_is_found_and_leased(plane, clients):
    client = clients()
    slots = store(client, KEYS[:4])
    found = client.lookup(b"".join(KEYS), 1)
    assert found.slots == slots[1:]
    assert found.absent == []
    [session] = plane.do(plane.readings.sessions)
    assert session.leased_blocks == 3
    client.send(wire.Step(0, releases=[found.seq]))
    assert client.lookup(b"".join(KEYS[:1]), 0).slots == slots[:1]
    [session] = plane.do(plane.readings.sessions)
    assert session.leased_blocks == 1


def test_a_reserved_block_is_invisible_until_committed(plane, clients):
    client = clients()
    slots = client.step(wire.Step(0, need=2)).slots
    assert client.lookup(KEYS[0], 0).slots == []
    client.send(wire.Step(0, aborts=slots))
    assert client.lookup(KEYS[0], 0).slots == []
    assert plane.do(plane.readings.stores)[StoreOutcome.ABORTED] == 2


def test_a_block_stored_twice_gives_its_slot_back(plane, clients):
    one, two = clients(engine="one"), clients(engine="two")
    slots = store(one, KEYS)
    store(two, KEYS)
    assert two.lookup(b"".join(KEYS), 0).slots == slots
    assert plane.do(plane.readings.stores)[StoreOutcome.DUPLICATE] == len(KEYS)


def test_bytes_travel_through_the_mapped_slab(plane, clients):
    writer, reader = clients(role=Role.WORKER), clients(role=Role.WORKER, engine="other")
    ref = unpack_slot(store(clients(), KEYS[:1])[0])
    memories = []
    for client in (writer, reader):
        descriptor, size = client.map_slab(ref.slab)
        memories.append(mmap.mmap(descriptor, size))
        os.close(descriptor)
    memories[0][ref.index * PAGE_BYTES : ref.index * PAGE_BYTES + 4] = b"here"
    assert memories[1][ref.index * PAGE_BYTES :][:4] == b"here"
    assert writer.map_slab(10_000) is None
    for memory in memories:
        memory.close()


def test_a_late_release_of_the_first_lookup_keeps_what_the_second_leased(plane, clients):
    """An engine asks again for one request, and only then says that the first lease ended."""
    client = clients()
    slots = store(client, KEYS)
    first = client.lookup(b"".join(KEYS), 0)
    second = client.lookup(b"".join(KEYS), 0)
    assert first.slots == second.slots == slots
    assert first.seq != second.seq
    client.send(wire.Step(0, releases=[first.seq]))
    assert not set(client.step(wire.Step(0, need=100)).slots) & set(slots), "a worker reads them"
    [session] = plane.do(plane.readings.sessions)
    assert session.leased_blocks == len(KEYS)
    client.send(wire.Step(0, releases=[second.seq]))
    assert set(client.step(wire.Step(0, need=100)).slots) == set(slots)


def test_a_lookup_that_finds_nothing_leases_nothing(plane, clients):
    client = clients()
    store(client, KEYS)
    assert client.lookup(chain("unknown", 1)[0], 0).slots == []
    assert client.lookup(b"".join(KEYS), len(KEYS)).slots == []
    assert not plane.do(
        lambda: next(iter(plane.cache.roster.engines["engine"].sessions.values())).leases
    )


def test_a_lookup_is_counted_although_its_answer_goes_first(plane, clients):
    client = clients()
    client.lookup(KEYS[0], 0)
    assert plane.do(plane.metrics.lookups._value.get) == 1


def test_a_number_of_a_lease_that_has_not_ended_is_refused(plane, clients):
    client = clients()
    store(client, KEYS)
    found = client.lookup(b"".join(KEYS), 0)
    assert client.send(wire.Lookup(found.seq, b"".join(KEYS), 0))
    assert client.lookup(KEYS[0], 0) is None
    assert plane.closes("malformed") == 1


def test_a_tenants_name_has_a_bounded_length(plane, clients):
    client = clients()
    assert client.lookup(KEYS[0], 0, "t" * wire.MAX_TENANT_CHARACTERS) is not None
    assert client.lookup(KEYS[0], 0, "t" * (wire.MAX_TENANT_CHARACTERS + 1)) is None
    assert plane.closes("malformed") == 1


def test_an_unreadable_block_goes_before_its_key_is_stored_again_in_the_same_step(plane, clients):
    client = clients()
    slots = store(client, KEYS[:3])
    found = client.lookup(b"".join(KEYS), 0)
    [fresh] = client.step(wire.Step(0, need=1)).slots
    again = wire.Chain(KEYS[0], KEYS[1], [fresh])
    client.send(wire.Step(0, unreadable=[slots[1]], commits=[again], releases=[found.seq]))
    assert client.lookup(b"".join(KEYS), 0).slots == [slots[0], fresh, slots[2]]
    evictions = plane.metrics.evictions.labels(Tier.HOST, "lru", EvictReason.UNREADABLE)
    assert plane.do(evictions._value.get) == 1
    assert plane.do(plane.readings.stores)[StoreOutcome.DUPLICATE] == 0


def test_no_session_can_drop_a_block_that_it_does_not_lease(plane, clients):
    one, two = clients(engine="one"), clients(engine="two")
    slots = store(one, KEYS)
    one.lookup(b"".join(KEYS), 0)
    two.lookup(b"".join(KEYS[:2]), 0)
    two.send(wire.Step(0, unreadable=[slots[3], 1 << 40, -1]))
    assert two.lookup(b"".join(KEYS), 0).slots == slots
    assert plane.do(plane.readings.stores)[StoreOutcome.UNKNOWN_SLOT] == 3


def test_a_lost_scheduler_leaves_nothing_when_no_worker_lives(plane, clients):
    client = plane.client()
    store(client, KEYS)
    client.lookup(b"".join(KEYS), 0)
    client.step(wire.Step(0, need=5))
    client.close()
    until(lambda: not plane.do(plane.readings.sessions), "the session's end")
    [reading] = plane.do(plane.readings.tiers)
    assert reading.host.slots[SlotState.RESERVED] == reading.host.slots[SlotState.LIMBO] == 0
    assert reading.blocks == len(KEYS)
    assert not plane.do(lambda: plane.cache.roster.engines)


def test_slots_of_a_lost_scheduler_wait_for_its_workers(plane, clients):
    clients(role=Role.WORKER)
    lost = plane.client()
    slots = lost.step(wire.Step(0, need=5)).slots
    lost_session = lost.meet().session
    lost.close()
    until(lambda: plane.do(plane.readings.tiers)[0].host.slots[SlotState.LIMBO] == 5, "limbo")
    again = clients()
    assert not set(again.step(wire.Step(0, need=58)).slots) & set(slots)
    again.send(wire.Step(0, settled=True))
    assert set(again.step(wire.Step(0, need=5)).slots) == set(slots)
    late = clients(role=Role.WORKER)
    assert lost_session <= late.meet().released < again.meet().session


def test_a_full_tier_grants_what_it_can(plane, clients):
    client = clients()
    assert len(client.step(wire.Step(0, need=100)).slots) == 64
    assert client.step(wire.Step(0, need=1)).slots == []


def test_a_leased_block_is_never_evicted(plane, clients):
    client = clients()
    slots = store(client, KEYS)
    assert client.lookup(b"".join(KEYS), 0).slots == slots
    assert len(client.step(wire.Step(0, need=100)).slots) == 64 - len(KEYS)
    assert client.lookup(b"".join(KEYS), 0).slots == slots


def test_stock_is_a_small_share_and_evicts_nothing(plane, clients):
    client = clients()
    assert len(client.step(wire.Step(0, need=2, stock=64)).slots) == 8
    store(client, KEYS)
    client.step(wire.Step(0, need=56))
    assert client.step(wire.Step(0, stock=64)).slots == []


def test_namespaces_do_not_see_each_other(plane, clients):
    store(clients(), KEYS)
    other = clients(engine="other", manifest=manifest(weights="another fine-tune"))
    assert other.lookup(b"".join(KEYS), 0).slots == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "x"), ("dtype", "bfloat16"), ("kv_dtype", "fp8"), ("block_tokens", 32),
        ("layers", 3), ("layout", "other"), ("shard_bytes", 8192), ("shards", 2),
        ("hash_algorithm", "sha256"), ("hash_seed", "1"), ("quantization", "awq"),
        ("format_version", 2), ("model", "y"), ("checksum", "xxh3_128"),
    ],
)  # fmt: skip
def test_each_field_of_the_manifest_separates_namespaces(field, value):
    assert manifest(**{field: value}).digest() != MANIFEST.digest()


def test_reset_drops_the_namespace(plane, clients):
    client = clients()
    store(client, KEYS)
    assert client.reset().count == len(KEYS)
    assert client.lookup(b"".join(KEYS), 0).slots == []


def test_hit_ratios_have_both_denominators(plane, clients):
    client = clients()
    client.send(wire.Step(0, asked=[wire.Asked("", 10, 4, 3)]))
    client.lookup(KEYS[0], 0)
    stats = plane.do(partial(read_stats, plane.readings, ready=True))
    assert tokens(stats.traffic) == {"device": (160, 64), "host": (96, 48)}
    assert stats.traffic[1].hit_ratio == 0.5
    assert stats.total_hit_ratio == 0.7


def test_what_is_asked_and_stored_is_counted_by_tenant(plane, clients):
    client = clients()
    slots = client.step(wire.Step(0, need=4)).slots
    commits = [
        wire.Chain(b"", b"".join(KEYS[:3]), slots[:3], "alice"),
        wire.Chain(KEYS[2], KEYS[3], slots[3:]),
    ]
    client.send(wire.Step(0, commits=commits, asked=[wire.Asked("alice", 4, 1, 2)]))
    client.lookup(KEYS[0], 0, "alice")
    client.lookup(KEYS[0], 0, "bob")
    readings = {reading.tenant: reading for reading in plane.do(plane.readings.tenants)}
    assert {name: (each.lookups, each.stored_blocks) for name, each in readings.items()} == {
        "": (0, 1),
        "alice": (1, 3),
        "bob": (1, 0),
    }
    assert tokens(readings["alice"].traffic) == {
        "device": (64, 16),
        "host": (48, 32),
        "disk": (16, 0),
        "redis": (16, 0),
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 99}, "protocol 99"),
        ({"manifest": manifest(hash_algorithm="xxhash")}, "xxhash"),
        ({"manifest": manifest(hash_algorithm="builtin")}, "builtin"),
        ({"manifest": manifest(shard_bytes=0)}, "size of a block"),
        ({"manifest": manifest(shard_bytes=1 << 30)}, "host.capacity"),
        ({"manifest": manifest(block_tokens=0)}, "0 tokens"),
        ({"manifest": manifest(checksum="crc32")}, "'crc32', only none, xxh3_128"),
        ({"rank": -1}, "rank -1"),
        ({"rank": 65_536}, "rank 65536"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_by_name(plane, change, said):
    hello = msgspec.structs.replace(plane.hello(Role.WORKER), **change)
    with pytest.raises(ProtocolError, match=said):
        Link(plane.path, hello, 5.0)
    assert plane.closes("refused") == 1
    assert not plane.do(plane.readings.sessions)


def test_ranks_that_hold_the_same_shard_are_welcome(plane):
    link = Link(plane.path, plane.hello(Role.WORKER, rank=7), 5.0)
    assert link.welcome.session
    link.close()


def test_a_shard_with_a_checksum_has_room_for_it():
    sealed, plain = manifest(checksum="xxh3_128"), manifest()
    assert (sealed.seal_bytes, plain.seal_bytes) == (16, 0)
    assert (sealed.shard_stride, plain.shard_stride) == (2 * PAGE_BYTES, PAGE_BYTES)
    assert manifest(checksum="xxh3_128", shard_bytes=PAGE_BYTES - 16).shard_stride == PAGE_BYTES


def test_a_second_server_on_the_socket_is_refused_and_the_first_lives(planes):
    first = planes()
    with pytest.raises(StartError, match="another kvtier server"):
        planes()
    client = first.client()
    assert client.lookup(KEYS[0], 0).slots == []
    client.close()


def test_a_socket_left_by_a_crash_is_replaced(tmp_path, planes):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "k.sock"))
    plane = planes()
    client = plane.client()
    assert client.meet() is not None
    client.close()


def test_stopping_leaves_no_file(plane):
    plane.stop()
    assert list(plane.path.parent.iterdir()) == []
