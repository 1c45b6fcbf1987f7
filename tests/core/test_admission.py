"""Admission: which blocks a lower tier takes, and why not the others."""

from __future__ import annotations

import pytest
from kvtier.admission import Price, Throttle, judge
from kvtier.core import AdmissionMode, AdmitOutcome
from kvtier.demand import Demand
from support import chain

UNKNOWN = Price(None, None, None)
KEY = chain("a", 1)[0]


def verdict(mode, demand, price=UNKNOWN):
    return judge(mode, demand, KEY, lambda: price)


def with_uses(uses):
    demand = Demand()
    demand.stored(KEY, b"")
    for _ in range(uses - 1):
        demand.used([KEY])
    return demand


def with_chance(chance):
    """Return what makes the class of new blocks come back with about this chance."""
    demand = Demand()
    for number in range(1000):
        other = chain(f"other-{number}", 1)
        demand.stored(other[0], b"")
        demand.left(other[0])
        if number < chance * 1000:
            demand.used(other)
    demand.stored(KEY, b"")
    return demand


def test_always_takes_everything():
    assert verdict(AdmissionMode.ALWAYS, Demand()) is AdmitOutcome.ADMITTED


def test_second_hit_takes_what_two_requests_used():
    assert verdict(AdmissionMode.SECOND_HIT, with_uses(1)) is AdmitOutcome.USED_ONCE
    assert verdict(AdmissionMode.SECOND_HIT, with_uses(2)) is AdmitOutcome.ADMITTED


def test_learned_takes_what_comes_back_in_one_case_of_fifty():
    assert verdict(AdmissionMode.LEARNED, with_chance(0.015)) is AdmitOutcome.UNLIKELY
    assert verdict(AdmissionMode.LEARNED, with_chance(0.025)) is AdmitOutcome.ADMITTED
    assert verdict(AdmissionMode.LEARNED, Demand()) is AdmitOutcome.ADMITTED


@pytest.mark.parametrize(
    ("compute", "load", "write", "outcome"),
    [
        (0.1, 0.01, 0.01, AdmitOutcome.ADMITTED),
        (0.1, 0.01, 0.05, AdmitOutcome.TOO_DEAR),
        (0.01, 0.02, 0.001, AdmitOutcome.TOO_DEAR),
        (None, 0.01, 0.01, AdmitOutcome.ADMITTED),
        (0.1, None, 9.0, AdmitOutcome.ADMITTED),
        (0.1, 0.01, None, AdmitOutcome.ADMITTED),
    ],
)
def test_cost_takes_what_is_expected_to_save_more_than_it_takes(compute, load, write, outcome):
    price = Price(compute, load, write)
    assert verdict(AdmissionMode.COST, with_chance(0.3), price) is outcome


def test_a_throttle_without_a_rate_lets_everything_pass():
    assert all(Throttle(None).lets(1 << 40, 0.0) for _ in range(3))


def test_a_throttle_lets_its_rate_pass_over_any_long_time():
    throttle = Throttle(1000.0)
    passed, now = 0, 0.0
    for _ in range(100_000):
        now += 0.01
        passed += 300 if throttle.lets(300, now) else 0
    assert passed == pytest.approx(1000.0 * 1000 + 10_000, rel=0.01)


def test_a_throttle_lets_a_burst_pass_after_a_quiet_time():
    throttle = Throttle(1000.0)
    assert sum(throttle.lets(1000, 5.0) for _ in range(50)) == 10
    assert throttle.lets(1000, 5.5)
    assert not throttle.lets(1000, 5.9)
    assert sum(throttle.lets(1000, 500.0) for _ in range(50)) == 10


def test_a_throttle_lets_a_block_pass_that_is_larger_than_its_burst():
    throttle = Throttle(10.0)
    assert throttle.lets(5000, 0.0)
    assert not throttle.lets(1, 400.0)
    assert throttle.lets(1, 600.0)
