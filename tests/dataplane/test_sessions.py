"""Sessions over a real socket: store, lookup, lease, and what a lost connection leaves."""

from __future__ import annotations

import mmap
import os
import socket

import pytest
from kvtier import protocol as wire
from kvtier.core import PAGE_BYTES, Role, SlotState, StoreOutcome, unpack_slot
from kvtier.errors import ProtocolError, StartError
from support import MANIFEST, chain, manifest, until

KEYS = chain("document", 6)


def store(client, keys, parent=b""):
    granted = client.step(wire.Step(0, need=len(keys)))
    slots = granted.slots[: len(keys)]
    assert client.send(wire.Step(0, commits=[wire.Chain(parent, b"".join(keys), slots)]))
    return slots


def test_what_was_committed_is_found_and_leased(plane, clients):
    client = clients()
    slots = store(client, KEYS[:4])
    found = client.lookup("r", b"".join(KEYS), 1)
    assert found.slots == slots[1:]
    assert found.absent == []
    [session] = plane.do(plane.cache.sessions)
    assert session.leased_blocks == 3
    client.send(wire.Step(0, releases=["r"]))
    assert client.lookup("s", b"".join(KEYS[:1]), 0).slots == slots[:1]
    [session] = plane.do(plane.cache.sessions)
    assert session.leased_blocks == 1


def test_a_reserved_block_is_invisible_until_committed(plane, clients):
    client = clients()
    slots = client.step(wire.Step(0, need=2)).slots
    assert client.lookup("r", KEYS[0], 0).slots == []
    client.send(wire.Step(0, aborts=slots))
    assert client.lookup("r", KEYS[0], 0).slots == []
    assert plane.do(plane.cache.traffic).stores[StoreOutcome.ABORTED] == 2


def test_a_block_stored_twice_gives_its_slot_back(plane, clients):
    one, two = clients(engine="one"), clients(engine="two")
    slots = store(one, KEYS)
    store(two, KEYS)
    assert two.lookup("r", b"".join(KEYS), 0).slots == slots
    assert plane.do(plane.cache.traffic).stores[StoreOutcome.DUPLICATE] == len(KEYS)


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


def test_a_lost_scheduler_leaves_nothing_when_no_worker_lives(plane, clients):
    client = plane.client()
    store(client, KEYS)
    client.lookup("r", b"".join(KEYS), 0)
    client.step(wire.Step(0, need=5))
    client.close()
    until(lambda: not plane.do(plane.cache.sessions), "the session's end")
    [reading] = plane.do(plane.cache.tiers)
    assert reading.slots[SlotState.RESERVED] == reading.slots[SlotState.LIMBO] == 0
    assert reading.blocks == len(KEYS)
    assert not plane.do(lambda: plane.cache.engines)


def test_slots_of_a_lost_scheduler_wait_for_its_workers(plane, clients):
    clients(role=Role.WORKER)
    lost = plane.client()
    slots = lost.step(wire.Step(0, need=5)).slots
    lost_session = lost.meet().session
    lost.close()
    until(lambda: plane.do(plane.cache.tiers)[0].slots[SlotState.LIMBO] == 5, "limbo")
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
    assert client.lookup("r", b"".join(KEYS), 0).slots == slots
    assert len(client.step(wire.Step(0, need=100)).slots) == 64 - len(KEYS)
    assert client.lookup("q", b"".join(KEYS), 0).slots == slots


def test_stock_is_a_small_share_and_evicts_nothing(plane, clients):
    client = clients()
    assert len(client.step(wire.Step(0, need=2, stock=64)).slots) == 8
    store(client, KEYS)
    client.step(wire.Step(0, need=56))
    assert client.step(wire.Step(0, stock=64)).slots == []


def test_namespaces_do_not_see_each_other(plane, clients):
    store(clients(), KEYS)
    other = clients(engine="other", manifest=manifest(weights="another fine-tune"))
    assert other.lookup("r", b"".join(KEYS), 0).slots == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "x"), ("dtype", "bfloat16"), ("kv_dtype", "fp8"), ("block_tokens", 32),
        ("layers", 3), ("layout", "other"), ("shard_bytes", 8192), ("shards", 2),
        ("hash_algorithm", "sha256"), ("hash_seed", "1"), ("quantization", "awq"),
        ("format_version", 2), ("model", "y"),
    ],
)  # fmt: skip
def test_each_field_of_the_manifest_separates_namespaces(field, value):
    assert manifest(**{field: value}).digest() != MANIFEST.digest()


def test_reset_drops_the_namespace(plane, clients):
    client = clients()
    store(client, KEYS)
    assert client.reset().count == len(KEYS)
    assert client.lookup("r", b"".join(KEYS), 0).slots == []


def test_hit_ratios_have_both_denominators(plane, clients):
    client = clients()
    client.send(wire.Step(0, asked=10, device=4, host=3))
    client.lookup("r", KEYS[0], 0)
    traffic = plane.do(plane.cache.traffic)
    assert (traffic.device_tokens_asked, traffic.device_tokens_hit) == (160, 64)
    assert (traffic.host_tokens_asked, traffic.host_tokens_hit) == (96, 48)
    assert traffic.host_hit_ratio == 0.5
    assert traffic.total_hit_ratio == 0.7


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 99}, "protocol 99"),
        ({"manifest": manifest(hash_algorithm="xxhash")}, "xxhash"),
        ({"manifest": manifest(hash_algorithm="builtin")}, "builtin"),
        ({"manifest": manifest(shard_bytes=0)}, "size of a block"),
        ({"manifest": manifest(shard_bytes=1 << 30)}, "host.capacity"),
        ({"rank": 7}, "rank 7"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_by_name(plane, change, said):
    fields = {
        "version": wire.PROTOCOL_VERSION, "role": Role.WORKER, "engine": "e", "rank": 0,
        "manifest": MANIFEST,
    }  # fmt: skip
    from kvtier.client import Link

    with pytest.raises(ProtocolError, match=said):
        Link(plane.path, wire.Hello(**fields | change), 5.0)
    assert plane.closes("refused") == 1
    assert not plane.do(plane.cache.sessions)


def test_a_second_server_on_the_socket_is_refused_and_the_first_lives(planes):
    first = planes()
    with pytest.raises(StartError, match="another kvtier server"):
        planes()
    client = first.client()
    assert client.lookup("r", KEYS[0], 0).slots == []
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
