"""The simulator: what counts as a hit, what is stored, and that nothing beats the bound."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier.core import AdmissionMode, Tier, WriteMode
from kvtier.policies import POLICIES
from kvtier.replay.bound import bound
from kvtier.replay.simulator import Hierarchy, LowerSetup, Setup, replay
from kvtier.replay.trace import Trace

TOKENS = 16
PATHS = st.lists(st.integers(0, 2), min_size=0, max_size=5)


def trace_of(*paths):
    """Return a trace of requests, each named by its blocks; equal beginnings are equal blocks."""
    trace = Trace(Path("trace.jsonl"), "mooncake", TOKENS)
    for path in paths:
        identities = [tuple(path[: length + 1]) for length in range(len(path))]
        trace.add(identities, TOKENS * len(path) + 3)
    trace.finish()
    return trace


def test_only_a_contiguous_prefix_counts():
    trace = trace_of("ab", "abc", "abd", "b")
    outcome = replay(trace, Setup("lru", 100))
    assert outcome.hit_blocks == 4
    assert outcome.hit_ratio(trace) == 4 * TOKENS / (9 * TOKENS + 12)
    (host,) = outcome.tiers
    assert (host.written_blocks, host.evictions) == (5, 0)


def test_a_request_longer_than_the_cache_keeps_its_head():
    trace = trace_of("abcdef", "abcdef")
    outcome = replay(trace, Setup("lru", 4))
    assert outcome.hit_blocks == 4


def test_a_tail_goes_before_its_head():
    trace = trace_of("abc", "x", "abc")
    assert replay(trace, Setup("lru", 3)).hit_blocks == 2


def test_what_a_request_hit_is_leased_while_it_is_served():
    cache = Hierarchy(Setup("fifo", 2))
    cache.serve([b"a", b"b"])
    assert cache.serve([b"a", b"c"]) == 1
    assert b"a" in cache.host.policy


def test_an_empty_trace_has_no_hits():
    trace = trace_of()
    assert replay(trace, Setup("lru", 4)).hit_ratio(trace) == 0.0


def test_progress_is_told_in_requests():
    told = []
    trace = trace_of(*["ab"] * 1000)
    replay(trace, Setup("lru", 4), told.append)
    bound(trace, 4, told.append)
    assert 1900 < sum(told) <= 2000


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(paths=st.lists(PATHS, max_size=40), capacity=st.integers(1, 12))
def test_no_policy_beats_the_bound_or_exceeds_the_capacity(policy, paths, capacity):
    trace = trace_of(*paths)
    outcome = replay(trace, Setup(policy, capacity))
    assert outcome.hit_blocks <= bound(trace, capacity).hit_blocks
    (host,) = outcome.tiers
    assert 0 <= host.written_blocks - host.evictions <= capacity


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(paths=st.lists(PATHS, max_size=40))
def test_a_cache_that_holds_everything_hits_what_was_seen_before(policy, paths):
    trace = trace_of(*paths)
    seen, expected = set(), 0
    for path in paths:
        for length in range(len(path)):
            block = tuple(path[: length + 1])
            expected += block in seen
            seen.add(block)
    outcome = replay(trace, Setup(policy, len(seen) + 1))
    assert (outcome.hit_blocks, outcome.tiers[0].evictions) == (expected, 0)
    assert bound(trace, len(seen) + 1).hit_blocks == expected


@settings(max_examples=60, deadline=None)
@given(paths=st.lists(PATHS, max_size=7), capacity=st.integers(1, 3))
def test_the_bound_is_what_the_best_choices_reach(paths, capacity):
    """Against all choices there are: after each request, any blocks that fit are kept."""
    trace = trace_of(*paths)
    requests = [list(blocks) for blocks in trace.requests()]
    best = {frozenset(): 0}
    for blocks in requests:
        after = {}
        for kept, hits in best.items():
            total = hits + sum(
                all(b in kept for b in blocks[: at + 1]) for at in range(len(blocks))
            )
            for chosen in choices(kept | set(blocks), capacity):
                after[chosen] = max(after.get(chosen, 0), total)
        best = after
    assert bound(trace, capacity).hit_blocks == max(best.values())


def choices(blocks, capacity):
    """Yield all sets of at most `capacity` of the blocks."""
    for taken in product([False, True], repeat=len(blocks)):
        if sum(taken) <= capacity:
            yield frozenset(block for block, keep in zip(blocks, taken, strict=True) if keep)


LOWERS = st.lists(
    st.builds(
        LowerSetup,
        st.just(Tier.DISK),
        st.integers(1, 12),
        st.sampled_from(["lru", "auto"]),
        st.sampled_from(WriteMode),
        st.sampled_from(AdmissionMode),
    ),
    max_size=2,
)


@settings(max_examples=150, deadline=None)
@given(paths=st.lists(PATHS, max_size=40), capacity=st.integers(1, 12), lowers=LOWERS)
def test_tiers_together_hit_no_more_than_the_bound_and_hold_no_more_than_they_may(
    paths, capacity, lowers
):
    trace = trace_of(*paths)
    outcome = replay(trace, Setup("lru", capacity, tuple(lowers)))
    room = capacity + sum(lower.capacity for lower in lowers)
    assert outcome.hit_blocks <= bound(trace, room).hit_blocks
    for tier, most in zip(
        outcome.tiers, [capacity, *(low.capacity for low in lowers)], strict=True
    ):
        assert 0 <= tier.written_blocks - tier.evictions <= most


def two_tiers(mode, admission=AdmissionMode.ALWAYS, disk=100):
    lower = LowerSetup(Tier.DISK, disk, "lru", mode, admission)
    return Hierarchy(Setup("lru", 2, (lower,)))


def written(cache):
    return cache.outcome().tiers[1].written_blocks


def test_through_writes_when_a_block_is_stored():
    cache = two_tiers(WriteMode.THROUGH)
    cache.serve([b"a", b"b"])
    assert written(cache) == 2


def test_on_reuse_writes_when_a_block_is_used_again():
    cache = two_tiers(WriteMode.ON_REUSE)
    cache.serve([b"a", b"b"])
    assert written(cache) == 0
    cache.serve([b"a", b"c"])
    assert written(cache) == 1


def test_on_evict_writes_when_a_block_leaves_the_host_tier_and_hits_come_from_below():
    cache = two_tiers(WriteMode.ON_EVICT)
    cache.serve([b"a", b"b"])
    assert written(cache) == 0
    cache.serve([b"c", b"d"])
    assert written(cache) == 2
    assert cache.serve([b"a", b"b"]) == 2
    host, disk = cache.outcome().tiers
    assert (host.hit_blocks, disk.hit_blocks) == (0, 2)


def test_second_hit_writes_what_came_back_though_it_had_left():
    cache = two_tiers(WriteMode.THROUGH, AdmissionMode.SECOND_HIT)
    cache.serve([b"a", b"b"])
    cache.serve([b"c", b"d"])
    assert (written(cache), cache.outcome().tiers[1].refused_blocks) == (0, 4)
    cache.serve([b"a", b"b"])
    assert written(cache) == 2


def test_a_prefix_may_come_from_both_tiers_in_turn():
    cache = two_tiers(WriteMode.THROUGH)
    cache.host.capacity = 4
    cache.serve([b"a", b"b", b"c"])
    cache.host.policy.evict(b"c")
    cache.host.policy.evict(b"b")
    cache.host.policy.insert([b"c"], 1, None)
    assert cache.serve([b"a", b"b", b"c", b"d"]) == 3
    host, disk = cache.outcome().tiers
    assert (host.hit_blocks, disk.hit_blocks) == (2, 1)
