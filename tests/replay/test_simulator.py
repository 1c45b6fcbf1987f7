"""The simulator: what counts as a hit, what is stored, and that nothing beats the bound."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier.policies import POLICIES
from kvtier.replay.simulator import BOUND, Cache, replay
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
    outcome = replay(trace, "lru", 100)
    assert outcome.hit_blocks == 4
    assert outcome.hit_ratio(trace) == 4 * TOKENS / (9 * TOKENS + 12)
    assert (outcome.written_blocks, outcome.evictions) == (5, 0)


def test_a_request_longer_than_the_cache_keeps_its_head():
    trace = trace_of("abcdef", "abcdef")
    outcome = replay(trace, "lru", 4)
    assert outcome.hit_blocks == 4


def test_a_tail_goes_before_its_head():
    trace = trace_of("abc", "x", "abc")
    assert replay(trace, "lru", 3).hit_blocks == 2


def test_what_a_request_hit_is_leased_while_it_is_served():
    cache = Cache(POLICIES["fifo"](), 2)
    cache.serve([b"a", b"b"])
    assert cache.serve([b"a", b"c"]) == 1
    assert b"a" in cache.policy


def test_an_empty_trace_has_no_hits():
    trace = trace_of()
    assert replay(trace, "lru", 4).hit_ratio(trace) == 0.0


def test_progress_is_told_in_requests():
    told = []
    trace = trace_of(*["ab"] * 1000)
    replay(trace, "lru", 4, told.append)
    replay(trace, BOUND, 4, told.append)
    assert 1900 < sum(told) <= 2000


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(paths=st.lists(PATHS, max_size=40), capacity=st.integers(1, 12))
def test_no_policy_beats_the_bound_or_exceeds_the_capacity(policy, paths, capacity):
    trace = trace_of(*paths)
    outcome = replay(trace, policy, capacity)
    assert outcome.hit_blocks <= replay(trace, BOUND, capacity).hit_blocks
    assert 0 <= outcome.written_blocks - outcome.evictions <= capacity


@pytest.mark.parametrize("policy", [*POLICIES, BOUND])
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
    outcome = replay(trace, policy, len(seen) + 1)
    assert (outcome.hit_blocks, outcome.evictions) == (expected, 0)


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
    assert replay(trace, BOUND, capacity).hit_blocks == max(best.values())


def choices(blocks, capacity):
    """Yield all sets of at most `capacity` of the blocks."""
    for taken in product([False, True], repeat=len(blocks)):
        if sum(taken) <= capacity:
            yield frozenset(block for block, keep in zip(blocks, taken, strict=True) if keep)
