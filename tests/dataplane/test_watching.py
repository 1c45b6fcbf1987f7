"""Sessions that want to be told: frames, slow readers and lost connections."""

from __future__ import annotations

import pytest
from kvtier import protocol as wire
from kvtier.changes import CHANGES_KEPT, KEYS_AT_ONCE
from kvtier.core import KEY_BYTES, Role, Tier
from kvtier.link import Link
from kvtier.metrics import CLOSE_REASONS
from support import MANIFEST, chain, manifest, until

KEYS = chain("document", 6)
MANY = 4096


class Copy:
    """What a session knows from `Changed` frames: visible blocks, with their parents."""

    def __init__(self):
        self.known = {}
        self.frames = []

    def hear(self, frames):
        for frame in frames:
            self.frames.append(frame)
            told = len(frame.removed) + sum(len(run.keys) for run in frame.stored)
            assert told <= KEYS_AT_ONCE * KEY_BYTES
            if frame.whole:
                self.known.clear()
            for key in wire.split_keys(frame.removed):
                self.known.pop(key, None)
            for run in frame.stored:
                keys = wire.split_keys(run.keys)
                self.known.update(zip(keys, [run.parent, *keys[:-1]], strict=True))


def store(client, keys):
    slots = client.step(wire.Step(0, need=len(keys))).slots
    client.send(wire.Step(0, commits=[wire.Chain(b"", b"".join(keys), slots)]))
    return slots


def hears(client, copy, keys):
    def done():
        copy.hear(client.changes())
        return copy.known.keys() == set(keys)

    until(done, "the changes")


def test_a_session_hears_of_what_was_there_and_of_what_comes_and_goes(plane, clients):
    one = clients(engine="one")
    store(one, KEYS[:3])
    two, copy = clients(engine="two", events=True), Copy()
    hears(two, copy, KEYS[:3])
    assert (copy.frames[0].whole, copy.frames[0].tier) == (True, Tier.HOST)
    slots = store(one, KEYS)
    hears(two, copy, KEYS)
    assert copy.known == dict(zip(KEYS, [b"", *KEYS[:-1]], strict=True))
    found = two.lookup(b"".join(KEYS), 3)
    two.send(wire.Step(0, unreadable=slots[3:4], releases=[found.seq]))
    hears(two, copy, [*KEYS[:3], *KEYS[4:]])
    one.reset()
    hears(two, copy, [])
    assert [frame.whole for frame in copy.frames].count(True) == 1


def test_a_session_that_did_not_ask_hears_nothing(plane, clients):
    client = clients()
    store(client, KEYS)
    assert client.lookup(KEYS[0], 0).slots
    assert client.changes() == []


def test_another_namespace_is_not_told_of(plane, clients):
    watching = clients(engine="other", events=True, manifest=manifest(model="other"))
    store(clients(), KEYS)
    copy = Copy()
    until(lambda: copy.hear(watching.changes()) or copy.frames, "the snapshot")
    assert watching.lookup(KEYS[0], 0).slots == []
    copy.hear(watching.changes())
    assert copy.known == {}
    assert len(copy.frames) == 1


def test_a_new_session_begins_with_a_snapshot_and_nothing_of_before(plane, clients):
    client = clients(events=True, pause_first=0.01)
    store(client, KEYS[:2])
    assert client.lookup(KEYS[0], 0).slots, "what is told by now is kept"
    plane.do(lambda: [each.close("error") for each in list(plane.plane.open)])
    assert client.lookup(KEYS[0], 0) is None
    until(lambda: client.meet() is not None, "the new session")
    copy = Copy()
    hears(client, copy, KEYS[:2])
    assert copy.frames[0].whole
    assert sum(frame.whole for frame in copy.frames) == 1


def test_a_watcher_that_leaves_takes_the_log_along(plane, clients):
    client = plane.client(events=True)
    copy = Copy()
    store(client, KEYS)
    hears(client, copy, KEYS)
    [space] = plane.do(lambda: list(plane.cache.directory.namespaces.values()))
    assert plane.do(lambda: len(space.changes.watchers)) == 1
    client.close()
    until(lambda: not plane.do(lambda: space.changes.watchers), "its end")
    store(clients(engine="other"), chain("more", 4))
    assert plane.do(lambda: space.changes.since(space.changes.end)) == []
    assert plane.do(lambda: space.changes._kept) == []


@pytest.fixture
def large(planes):
    return planes(slots=MANY)


def churn(plane, session, name):
    """Store as many blocks as there are slots, and drop them all."""
    cache = plane.cache
    for number in range(MANY // 512):
        keys = chain(f"{name} {number}", 512)
        cache.commit(session, b"", keys, cache.reserve(session, 512, 0))
    cache.reset(session.space)


def test_a_watcher_that_does_not_read_costs_bounded_memory_and_hears_all_in_the_end(large):
    """It is neither closed nor waited for; when it reads again it gets a new snapshot."""
    link = Link(large.path, large.hello(events=True), 5.0)
    session = large.do(large.cache.open_session, Role.SCHEDULER, "stores", 0, 1, MANIFEST)
    rounds = 3 * CHANGES_KEPT // (2 * MANY)
    for number in range(rounds):
        large.do(churn, large, session, f"round {number}")
    changes = session.space.changes
    assert large.do(lambda: changes.end) >= 3 * CHANGES_KEPT
    assert large.do(lambda: len(changes._kept)) < CHANGES_KEPT + KEYS_AT_ONCE
    [connection] = large.plane.open
    assert large.do(lambda: len(connection._unsent)) <= 1
    keys = chain("last", 100)
    large.do(lambda: large.cache.commit(session, b"", keys, large.cache.reserve(session, 100, 0)))
    copy = Copy()

    def done():
        link.drain()
        frames, link.changed = link.changed, []
        copy.hear(frames)
        return copy.known.keys() == set(keys)

    until(done, "the last state")
    assert sum(frame.whole for frame in copy.frames) == 2
    assert sum(large.closes(reason) for reason in CLOSE_REASONS) == 0
    link.close()
    large.do(large.cache.close_session, session)
