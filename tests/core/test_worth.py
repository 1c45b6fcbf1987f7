"""Recompute or load: whole, in part, or not at all."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given
from kvtier.core import Tier
from kvtier.worth import Stretch, judge

PLACES = st.lists(
    st.builds(
        Stretch, st.sampled_from([Tier.HOST, Tier.DISK, Tier.REDIS]), st.integers(1, 50),
        st.integers(0, 100).map(float),
    ),
    max_size=6,
)  # fmt: skip


def test_what_nobody_measured_is_loaded():
    assert judge([Stretch(Tier.DISK, 4, 100.0)], None).blocks == 4


def test_a_tier_that_is_slower_than_computing_is_skipped_and_counted():
    verdict = judge([Stretch(Tier.DISK, 4, 1.0), Stretch(Tier.REDIS, 3, 9.0)], 1.0)
    assert verdict.blocks == 4
    assert verdict.skipped == {Tier.REDIS: 3}
    assert verdict.saved_seconds == {Tier.REDIS: 6.0}


def test_a_slow_stretch_is_worth_it_for_what_lies_behind_it():
    assert judge([Stretch(Tier.REDIS, 1, 3.0), Stretch(Tier.HOST, 9, 0.0)], 1.0).blocks == 10


@given(PLACES, st.integers(0, 5).map(float))
def test_no_other_prefix_is_worth_more(stretches, block_seconds):
    verdict = judge(stretches, block_seconds)
    gains = [0.0, *itertools.accumulate(s.blocks * block_seconds - s.seconds for s in stretches)]
    sizes = [0, *itertools.accumulate(s.blocks for s in stretches)]
    assert gains[sizes.index(verdict.blocks)] == max(gains)
    assert verdict.blocks + sum(verdict.skipped.values()) == sizes[-1]
