"""Watchers of a namespace: whatever they miss or read late, in the end they know what there is."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvtier import changes, directory
from kvtier.changes import Teller
from kvtier.core import Role
from support import MANIFEST, Mirror, chain, hierarchy, manifest

KEYS = chain("a", 12) + chain("b", 12)
SLOTS = 24


class Loop:
    """What was called soon, to be called by hand."""

    def __init__(self):
        self.calls = []
        self.teller = Teller(self.calls.append)

    def turn(self):
        calls, self.calls[:] = [*self.calls], []
        for call in calls:
            call()

    def run(self):
        for _ in range(10_000):
            if not self.calls:
                return
            self.turn()
        raise AssertionError("telling comes to an end")


class ChangesMachine(RuleBasedStateMachine):
    """Blocks come and go in any order, with bounds so small that each of them matters."""

    def __init__(self):
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(changes, "KEYS_AT_ONCE", 3)
        self.patches.setattr(changes, "CHANGES_KEPT", 7)
        self.patches.setattr(directory, "KEYS_AT_ONCE", 2)

    @initialize()
    def begin(self):
        self.cache = hierarchy(SLOTS)
        self.session = self.cache.open_session(Role.SCHEDULER, "e", 0, 1, MANIFEST)
        self.space = self.session.space
        self.loop = Loop()
        self.watching = []

    def teardown(self):
        if hasattr(self, "cache"):
            self.all_know_in_the_end()
            self.cache.host.close()
        self.patches.undo()

    @rule(at=st.integers(0, 23), count=st.integers(1, 6))
    def store(self, at, count):
        keys = KEYS[at : min(at + count, 12 * (1 + at // 12))]
        parent = KEYS[at - 1] if at % 12 else b""
        slots = self.cache.reserve(self.session, len(keys), 0)
        self.cache.commit(self.session, parent, keys[: len(slots)], slots)

    @precondition(lambda self: self.space.blocks)
    @rule(data=st.data())
    def drop(self, data):
        """Any block, also one in the middle of a chain, as when its bytes are unreadable."""
        key = data.draw(st.sampled_from(sorted(self.space.blocks)), "key")
        self.cache.lookup(self.session, 1, [key], 0)
        self.cache.unreadable(self.session, [self.space.blocks[key].slot])
        self.cache.release(self.session, 1)

    @rule(rarely=st.integers(0, 5))
    def reset(self, rarely):
        if not rarely:
            self.cache.reset(self.space)

    @rule()
    def watch(self):
        if len(self.watching) < 3:
            mirror = Mirror()
            self.watching.append((mirror, self.loop.teller.watch(self.space.changes, mirror)))

    @precondition(lambda self: self.watching)
    @rule(data=st.data(), behind=st.booleans())
    def a_watcher_reads_or_does_not(self, data, behind):
        mirror, watcher = data.draw(st.sampled_from(self.watching), "watcher")
        mirror.behind = behind
        if not behind:
            self.loop.teller.resume(watcher)

    @precondition(lambda self: self.watching)
    @rule(data=st.data())
    def leave(self, data):
        left = data.draw(st.sampled_from(self.watching), "watcher")
        self.watching.remove(left)
        self.loop.teller.leave(left[1])

    @rule()
    def turn(self):
        heard = [len(mirror.heard) for mirror, _ in self.watching]
        self.loop.turn()
        told = [mirror.heard[n:] for (mirror, _), n in zip(self.watching, heard, strict=True)]
        assert sum(map(len, told)) <= 1, "one piece of news in a turn"

    @rule()
    def all_know_in_the_end(self):
        for mirror, watcher in self.watching:
            mirror.behind = False
            self.loop.teller.resume(watcher)
        self.loop.run()
        there = {key: key_of(block.parent) for key, block in self.space.blocks.items()}
        for mirror, _ in self.watching:
            assert mirror.known == there
            assert mirror.heard[0].whole

    @invariant()
    def what_is_kept_is_bounded(self):
        if hasattr(self, "cache"):
            kept = self.space.changes._kept
            assert len(kept) < changes.CHANGES_KEPT + changes.KEYS_AT_ONCE
            assert not kept or self.watching
            for mirror, _ in self.watching:
                for news in mirror.heard:
                    assert sum(len(run) - 1 for run in news.stored) + len(news.removed) <= 3


def key_of(parent):
    return b"" if parent is None else parent.key


ChangesMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, print_blob=True
)
TestChanges = ChangesMachine.TestCase


@pytest.fixture
def cache():
    made = hierarchy(64)
    yield made
    made.host.close()


@pytest.fixture
def session(cache):
    return cache.open_session(Role.SCHEDULER, "e", 0, 1, MANIFEST)


def store(cache, session, keys, parent=b""):
    cache.commit(session, parent, keys, cache.reserve(session, len(keys), 0))


def test_without_watchers_nothing_is_kept(cache, session):
    store(cache, session, KEYS[:12])
    assert session.space.changes.end == 0


def test_all_changes_of_a_turn_are_told_at_once(cache, session):
    loop, mirror = Loop(), Mirror()
    loop.teller.watch(session.space.changes, mirror)
    loop.run()
    mirror.heard.clear()
    store(cache, session, KEYS[:4])
    store(cache, session, KEYS[4:6], KEYS[3])
    store(cache, session, KEYS[12:14])
    loop.run()
    [news] = mirror.heard
    assert news.stored == [[b"", *KEYS[:6]], [b"", *KEYS[12:14]]]


def test_what_comes_and_goes_in_one_turn_is_not_told(cache, session):
    loop, mirror = Loop(), Mirror()
    loop.teller.watch(session.space.changes, mirror)
    loop.run()
    mirror.heard.clear()
    store(cache, session, KEYS[:4])
    cache.reset(session.space)
    loop.run()
    assert mirror.heard == []


def test_parents_are_told_of_before_their_children(cache, session):
    """Also where both went, tail first, and came back before anybody was told."""
    store(cache, session, KEYS[:2])
    loop, mirror = Loop(), Mirror()
    loop.teller.watch(session.space.changes, mirror)
    loop.run()
    cache.lookup(session, 1, KEYS[:2], 0)
    cache.unreadable(session, [session.space.blocks[key].slot for key in KEYS[1::-1]])
    cache.release(session, 1)
    store(cache, session, KEYS[:2])
    loop.run()
    assert mirror.heard[-1].stored == [[b"", *KEYS[:2]]]


def test_a_block_that_moves_behind_a_walk_under_way_is_told_of(cache, session, monkeypatch):
    """It lay before the walk, went, and came back to a slot that the walk has passed."""
    monkeypatch.setattr(directory, "KEYS_AT_ONCE", 1)
    store(cache, session, KEYS[:1])
    store(cache, session, KEYS[12:13])
    loop, mirror = Loop(), Mirror()
    loop.teller.watch(session.space.changes, mirror)
    loop.turn()
    loop.turn()
    assert mirror.known.keys() == {KEYS[0]}
    cache.lookup(session, 1, KEYS[:1], 0)
    cache.lookup(session, 2, KEYS[12:13], 0)
    cache.reset(session.space)
    cache.release(session, 1)
    cache.release(session, 2)
    store(cache, session, KEYS[1:2], KEYS[0])
    store(cache, session, KEYS[12:13])
    loop.run()
    assert mirror.known.keys() == {KEYS[1], KEYS[12]}


def test_a_parent_that_is_not_there_is_named_all_the_same(cache, session):
    store(cache, session, KEYS[1:3], KEYS[0])
    loop, mirror = Loop(), Mirror()
    loop.teller.watch(session.space.changes, mirror)
    loop.run()
    assert mirror.known == {KEYS[1]: KEYS[0], KEYS[2]: KEYS[1]}


def test_another_namespace_is_not_told_of(cache, session):
    other = cache.open_session(Role.SCHEDULER, "o", 0, 1, manifest(model="other"))
    loop, mirror = Loop(), Mirror()
    loop.teller.watch(other.space.changes, mirror)
    store(cache, session, KEYS[:4])
    loop.run()
    assert mirror.known == {}
