"""What engines other than vLLM ask: drops by key, sizes, and lookups that are no use."""

from __future__ import annotations

import pytest
from kvtier import protocol as wire
from kvtier.core import EvictReason, Tier
from support import chain, manifest, until

KEYS = chain("document", 6)


def store(client, keys):
    slots = client.step(wire.Step(0, need=len(keys))).slots
    chains = [wire.Chain(b"", key, [slot]) for key, slot in zip(keys, slots, strict=True)]
    assert client.step(wire.Step(0, commits=chains)) is not None


def test_a_drop_takes_exactly_its_blocks_and_counts_them(plane, clients):
    client = clients()
    store(client, KEYS)
    assert client.drop(b"".join([KEYS[1], KEYS[1], KEYS[4], *chain("other", 1)])).count == 2
    assert len(client.lookup(b"".join(KEYS), 0).slots) == 1
    assert len(client.lookup(b"".join(KEYS[2:4]), 0).slots) == 2
    policy = plane.host.options.policy
    dropped = plane.metrics.evictions.labels(Tier.HOST, policy, EvictReason.ENGINE)
    assert plane.do(dropped._value.get) == 2


def test_a_dropped_block_stays_readable_until_its_lease_ends(plane, clients):
    client, other = clients(), clients(engine="other")
    store(client, KEYS[:1])
    lease = other.lookup(KEYS[0], 0)
    assert client.drop(KEYS[0]).count == 1
    assert client.lookup(KEYS[0], 0).slots == []
    [space] = plane.cache.directory.namespaces.values()
    assert plane.do(lambda: len(space.doomed)) == 1
    other.send(wire.Step(0, releases=[lease.seq]))
    until(lambda: not plane.do(lambda: len(space.doomed)), "the end of the lease")


def test_a_drop_ends_a_pin_before_the_block(plane, clients):
    client = clients()
    slots = client.step(wire.Step(0, need=3)).slots
    client.step(wire.Step(0, commits=[wire.Chain(b"", b"".join(KEYS[:3]), slots)]))
    [space] = plane.cache.directory.namespaces.values()
    plane.do(lambda: setattr(plane.cache.pins, "share", 1.0))
    plane.cache.pins._later = plane.loop.call_later
    pin = plane.do(plane.cache.pins.add, space, KEYS[:3], 60.0, "test")
    assert client.drop(KEYS[1]).count == 1
    assert [block.key for block in pin.blocks] == KEYS[:1]
    plane.do(plane.cache.pins.remove, pin.label)


def test_a_drop_that_is_too_long_ends_the_session(plane, clients):
    client = clients()
    assert client.drop(b"".join(KEYS[:1] * (wire.MAX_DROP_BLOCKS + 1))) is None
    until(lambda: plane.closes("malformed") == 1, "the end of the session")


def test_sizes_are_of_namespaces_that_differ_in_nothing_else(clients):
    client = clients()
    for size in (100, 300, 200):
        clients(engine=f"{size}", manifest=manifest(shard_bytes=size))
    clients(engine="other", manifest=manifest(shard_bytes=400, weights="other"))
    assert client.sizes().shard_bytes == [100, 200, 300, manifest().shard_bytes]


@pytest.mark.parametrize("use", [True, False])
def test_only_a_lookup_that_is_a_use_counts(plane, clients, use):
    client = clients()
    store(client, KEYS)
    chained = b"".join(KEYS)
    found = client.lookup(chained, 0) if use else client.fetch(chained)
    assert len(found.slots) == len(KEYS)
    client.step(wire.Step(0, releases=[found.seq]))
    [space] = plane.cache.directory.namespaces.values()
    assert plane.do(lambda: space.uses.get(KEYS[0], 0)) == use
    assert plane.do(plane.metrics.lookups._value.get) == use
