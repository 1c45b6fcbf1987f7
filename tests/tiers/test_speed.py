"""What is known of a tier's speed, and what a load is expected to take."""

from __future__ import annotations

import pytest
from kvtier.tiers.speed import STALE_SECONDS, Speed

MB = 1 << 20


def measured(now=1.0):
    speed = Speed()
    for at in range(4):
        speed.began(at * 0.0)
    for at in range(1, 5):
        speed.ended(now * at / 4, 10 * MB)
    return speed


def test_nothing_is_known_before_the_first_read():
    assert Speed().seconds(MB, 0, 0.0) is None


def test_reads_at_the_same_time_add_up():
    assert measured().bandwidth == pytest.approx(40 * MB)


def test_time_in_which_nothing_is_read_does_not_count():
    speed = measured()
    speed.began(100.0)
    speed.ended(100.25, 10 * MB)
    assert speed.bandwidth == pytest.approx(40 * MB)


def test_a_load_takes_the_latency_and_what_is_queued_before_it():
    speed = measured()
    speed.asked(0.5)
    assert speed.seconds(40 * MB, 80 * MB, 1.0) == pytest.approx(0.5 + 3.0)


def test_what_was_measured_long_ago_is_not_known():
    assert measured().seconds(MB, 0, 1.0 + STALE_SECONDS + 0.1) is None


def test_a_read_that_failed_is_no_measure():
    speed = Speed()
    speed.began(0.0)
    speed.ended(1.0, 0)
    assert speed.bandwidth is None
