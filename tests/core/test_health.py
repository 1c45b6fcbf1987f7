"""Whether a tier is asked, by how its jobs went."""

from __future__ import annotations

import pytest
from kvtier.core import Fault, Tier
from kvtier.health import NO_WRITES_SECONDS, Health
from kvtier.metrics import Metrics
from kvtier.tiers.base import TierFault
from kvtier.tiers.breaker import BreakerOptions
from kvtier.tiers.pool import Job, Urgency


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def health(clock):
    return Health(Tier.DISK, BreakerOptions(failures=1, slow=1.0), Metrics(), clock)


def job(error=None, seconds=0.0, urgency=Urgency.UPKEEP):
    found = Job(urgency, None, print)
    found.error, found.seconds = error, seconds
    return found


def test_a_tier_is_asked_once_it_was_got_ready(health):
    assert not health.up
    assert health.ready(job())
    assert health.up


@pytest.mark.parametrize("error", [TierFault(Fault.UNREACHABLE, "gone"), RuntimeError("a bug")])
def test_a_tier_that_could_not_be_got_ready_is_not_asked_until_a_probe_went_well(
    health, clock, error
):
    assert not health.ready(job(error))
    assert not health.up
    clock.now = 1.0
    assert health.breaker.probe_due(clock.now)
    assert health.ready(job())
    assert health.up


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.READ_ONLY])
def test_a_medium_that_takes_no_writes_is_read(health, clock, fault):
    assert health.ready(job(TierFault(fault, "no room")))
    assert health.up
    assert not health.writable
    clock.now = NO_WRITES_SECONDS
    assert health.writable


def test_room_is_made_once_for_a_burst_of_writes_that_found_none(health, clock):
    made = []
    health.full = lambda: made.append(clock.now)
    health.ready(job())
    for _ in range(3):
        health.judge(job(TierFault(Fault.FULL, "full"), urgency=Urgency.WRITE))
    assert made == [0.0]


def test_only_what_somebody_waits_for_may_be_too_slow(health):
    health.ready(job())
    assert health.judge(job(seconds=99.0, urgency=Urgency.UPKEEP))
    assert health.up
    health.judge(job(seconds=1.1, urgency=Urgency.REQUEST))
    assert not health.up


def test_a_probe_that_went_well_does_not_hide_what_failed_meanwhile(health, clock):
    health.ready(job())
    health.stuck(5.0)
    clock.now = 1.0
    assert health.breaker.probe_due(clock.now)
    health.judge(job(TierFault(Fault.IO, "broken"), urgency=Urgency.REQUEST))
    assert not health.ready(job())
    assert not health.up
