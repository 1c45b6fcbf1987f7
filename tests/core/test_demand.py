"""Demand: what is counted of blocks that leave and come back, against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier import demand as of
from kvtier.demand import Demand
from support import chain


def store(demand, keys):
    for parent, key in zip([b"", *keys[:-1]], keys, strict=True):
        demand.stored(key, parent)


def leave(demand, keys):
    for key in reversed(keys):
        demand.left(key)


def test_what_is_never_asked_for_again_becomes_unlikely_within_a_hundred_blocks():
    demand = Demand()
    assert demand.chance(b"new") == pytest.approx(0.25)
    for number in range(60):
        keys = chain(f"once-{number}", 4)
        store(demand, keys)
        leave(demand, keys)
    assert demand.chance(b"new") < 0.02


def test_what_comes_back_counts_once_however_often_it_is_asked_for():
    demand = Demand()
    keys = chain("a", 1)
    store(demand, keys)
    leave(demand, keys)
    for _ in range(5):
        demand.used(keys)
    assert demand.chance(b"new") == pytest.approx(2 / 5)


def test_uses_count_up_to_three_and_outlive_the_stay_in_the_host_tier():
    demand = Demand()
    keys = chain("a", 2)
    store(demand, keys)
    assert demand.uses(keys[0]) == 1
    demand.used(keys)
    assert demand.uses(keys[0]) == 2
    leave(demand, keys)
    demand.used(keys)
    store(demand, keys)
    assert demand.uses(keys[0]) == 3
    demand.used(keys)
    assert demand.uses(keys[0]) == 3


def test_a_turn_continues_what_an_earlier_request_stored():
    """The third turn's blocks are of another class than the first's, whatever their uses."""
    demand = Demand()
    keys = chain("chat", 8)
    store(demand, keys[:2])
    for end in (4, 6, 8):
        demand.used(keys[:end])
        for at in range(end - 2, end):
            demand.stored(keys[at], keys[at - 1])
    turns = [demand._here[hash(key)] % of.DEPTH + 1 for key in keys]
    assert turns == [1, 1, 2, 2, 3, 3, 3, 3]


def test_classes_are_judged_apart():
    demand = Demand()
    hot = chain("hot", 2)
    store(demand, hot)
    demand.used(hot)
    for number in range(300):
        cold = chain(f"cold-{number}", 1)
        store(demand, cold)
        leave(demand, cold)
    assert demand.chance(hot[0]) == pytest.approx(0.25)
    assert demand.chance(b"new") < 0.01


def test_a_block_that_is_dropped_says_nothing_of_others():
    demand = Demand()
    keys = chain("a", 3)
    store(demand, keys)
    for key in keys:
        demand.dropped(key)
    assert len(demand) == 0
    assert demand.chance(b"new") == pytest.approx(0.25)


def test_what_left_long_ago_is_forgotten():
    demand = Demand()
    for number in range(3 * of.WINDOW_AT_LEAST):
        demand.left(number.to_bytes(8, "little"))
    assert len(demand) <= of.WINDOW_AT_LEAST + of.TRIMMED_AT_ONCE


def test_old_counts_give_way_to_new_ones():
    demand = Demand()
    for number in range(20_000):
        key = b"gone-%d" % number
        demand.stored(key, b"")
        demand.left(key)
    for number in range(20_000):
        key = b"back-%d" % number
        demand.stored(key, b"")
        demand.left(key)
        demand.used([key])
        demand.dropped(key)
    assert demand.chance(b"new") > 0.8


KEYS = [bytes([number]) for number in range(6)]
CHAINS = st.lists(st.sampled_from(KEYS), max_size=5, unique=True)


class Model:
    """The same in dicts by key, without bounds."""

    def __init__(self):
        self.here, self.gone, self.left, self.back = {}, {}, {}, {}

    def use(self, keys):
        for key in keys:
            if key in self.here:
                uses, turn = self.here[key]
                self.here[key] = min(uses + 1, 3), turn
            elif key in self.gone:
                uses, turn, counted = self.gone[key]
                if not counted:
                    self.back[uses, turn] = self.back.get((uses, turn), 1) + 1
                self.gone[key] = min(uses + 1, 3), turn, True

    def store(self, key, parent):
        uses, turn = self.here.get(parent, (1, 1))
        fresh = (1, min(turn + (uses > 1), 3), False)
        self.here[key] = self.gone.pop(key, fresh)[:2]

    def leave(self, key):
        seen = self.here.pop(key)
        self.left[seen] = self.left.get(seen, 4) + 1
        self.gone[key] = *seen, False

    def chance(self, key):
        seen = self.here[key]
        return self.back.get(seen, 1) / self.left.get(seen, 4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["use", "store", "leave", "drop"]), CHAINS)))
def test_it_agrees_with_a_plain_model(steps):
    demand, model = Demand(), Model()
    for what, keys in steps:
        if what == "use":
            demand.used(keys)
            model.use(keys)
        for parent, key in zip([b"", *keys[:-1]], keys, strict=False):
            if what == "store" and key not in model.here:
                demand.stored(key, parent)
                model.store(key, parent)
            elif what == "leave" and key in model.here:
                demand.left(key)
                model.leave(key)
            elif what == "drop" and key in model.here:
                demand.dropped(key)
                del model.here[key]
    for key, (uses, _) in model.here.items():
        assert demand.uses(key) == uses
        assert demand.chance(key) == pytest.approx(model.chance(key))
