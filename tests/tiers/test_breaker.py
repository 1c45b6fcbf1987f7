"""When a tier is left alone, when it is probed, and when it is used again."""

from __future__ import annotations

from kvtier.tiers.breaker import Breaker, BreakerOptions, BreakerState

OPTIONS = BreakerOptions(failures=3, slow=1.0, pause_first=1.0, pause_most=4.0)


def opened():
    breaker = Breaker(OPTIONS)
    for _ in range(3):
        breaker.failed(0.0)
    return breaker


def test_it_opens_after_failures_in_a_row_and_not_before():
    breaker = Breaker(OPTIONS)
    breaker.failed(0.0)
    breaker.failed(0.0)
    breaker.worked(0.1, 0.0)
    breaker.failed(0.0)
    breaker.failed(0.0)
    assert breaker.closed
    breaker.failed(0.0)
    assert breaker.state is BreakerState.OPEN


def test_a_call_that_took_too_long_is_a_failure_whatever_it_returned():
    breaker = Breaker(OPTIONS)
    for _ in range(3):
        breaker.worked(1.1, 0.0)
    assert not breaker.closed


def test_one_probe_goes_through_when_the_pause_is_over():
    breaker = opened()
    assert not breaker.probe_due(0.9)
    assert breaker.probe_due(1.0)
    assert not breaker.probe_due(9.0), "one at a time"
    breaker.worked(0.1, 9.0)
    assert breaker.closed


def test_pauses_double_up_to_a_limit_and_begin_anew_after_success():
    breaker, now = opened(), 0.0
    for pause in (1.0, 2.0, 4.0, 4.0):
        assert not breaker.probe_due(now + pause - 0.1)
        assert breaker.probe_due(now + pause)
        now += pause
        breaker.failed(now)
    assert breaker.probe_due(now + 4.0)
    breaker.worked(0.1, now)
    breaker.failed(now, at_once=True)
    assert breaker.probe_due(now + 1.0)


def test_what_comes_back_late_does_not_close_an_open_breaker():
    breaker = opened()
    breaker.worked(0.1, 0.5)
    assert breaker.state is BreakerState.OPEN
