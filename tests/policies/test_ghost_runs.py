"""Ghosts by run: what comes back is recalled, what is old is forgotten, the rest stays in order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier.policies.ghost_runs import GhostRuns
from kvtier.policies.ghosts import name_of
from support import chain

KEYS = chain("ghosts", 8)


def remembered(*parts, uses=3):
    """Return ghosts of parts of the chain, each evicted in a row, tail first."""
    ghosts = GhostRuns()
    for begin, end in parts:
        ghosts.remember(KEYS[begin:end][::-1], uses, KEYS[begin - 1] if begin else None)
    return ghosts


def names(ghosts):
    return [name for name, _ in ghosts.items()]


def test_a_chain_that_left_in_parts_is_recalled_as_one():
    ghosts = remembered((5, 8), (2, 5), (0, 2))
    assert names(ghosts) == [name_of(key) for key in reversed(KEYS)]
    assert ghosts.recall(KEYS) == [(8, 3)]
    assert len(ghosts) == 0


def test_parts_that_were_used_differently_stay_apart():
    ghosts = remembered((4, 8))
    ghosts.remember(KEYS[:4][::-1], 5, None)
    assert ghosts.recall(KEYS) == [(4, 5), (4, 3)]


def test_only_what_a_chain_has_in_common_is_recalled():
    for common in range(1, 8):
        ghosts = remembered((0, 8))
        assert ghosts.recall([*KEYS[:common], *chain("other", 4)]) == [(common, 3), (4, 0)]
        assert names(ghosts) == [name_of(key) for key in reversed(KEYS[common:])]
        assert ghosts.recall(KEYS[common:]) == [(8 - common, 3)]


def test_the_oldest_are_forgotten_first():
    ghosts = remembered((4, 8))
    ghosts.remember(chain("other", 4)[::-1], 1, None)
    ghosts.trim(6)
    assert names(ghosts)[:2] == [name_of(KEYS[5]), name_of(KEYS[4])]
    assert len(ghosts) == 6
    ghosts.trim(3)
    assert ghosts.recall(KEYS) == [(8, 0)]
    assert KEYS[4] not in ghosts


def test_ghosts_below_a_dropped_block_are_found():
    ghosts = remembered((3, 8))
    ghosts.tear()
    assert ghosts.recall(KEYS[2:]) == [(1, 0), (5, 3)]


def test_a_ghost_that_was_missed_counts_once_when_it_leaves_again():
    ghosts = remembered((3, 8))
    assert ghosts.recall(KEYS[2:4]) == [(2, 0)]
    ghosts.remember(KEYS[3:][::-1], 1, KEYS[2])
    assert len(ghosts) == 5
    assert ghosts.recall(KEYS[3:]) == [(5, 1)]


def test_keys_of_any_length_have_names():
    ghosts = GhostRuns()
    ghosts.remember([b"a longer one", b"short"], 2, None)
    assert ghosts.recall([b"short", b"a longer one"]) == [(2, 2)]


def test_a_copy_is_independent():
    ghosts = remembered((0, 8))
    copy = ghosts.copy()
    assert copy == ghosts
    ghosts.recall(KEYS)
    assert len(copy) == 8
    assert copy.recall(KEYS) == [(8, 3)]


def test_a_ghost_that_was_missed_and_left_again_is_found_in_one_place():
    ghosts = remembered((0, 3))
    ghosts.remember([KEYS[1]], 5, KEYS[0])  # It had come back although its parent had not.
    assert ghosts.recall([KEYS[0], *chain("other", 1)]) == [(1, 3), (1, 0)]
    assert names(ghosts) == [name_of(KEYS[2]), name_of(KEYS[1])]
    ghosts.trim(0)
    assert len(ghosts) == 0


BRANCHES = (KEYS, [*KEYS[:3], *chain("branch", 5)], chain("else", 8))
STEPS = st.tuples(
    st.sampled_from(["remember", "recall", "trim", "tear", "copy"]),
    st.sampled_from(BRANCHES),
    st.integers(0, 7),
    st.integers(1, 8),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_whatever_leaves_and_comes_back_each_run_is_found_by_its_head(steps):
    ghosts = GhostRuns()
    for step, branch, begin, blocks in steps:
        part = branch[begin : begin + blocks]
        match step:
            case "remember":
                ghosts.remember(part[::-1], blocks, branch[begin - 1] if begin else None)
            case "recall":
                assert sum(count for count, _ in ghosts.recall(part)) == len(part)
            case "trim":
                ghosts.trim(begin)
            case "tear":
                ghosts.tear()
            case "copy":
                ghosts = ghosts.copy()
        heads = [run.names[-1] for run in ghosts._walk()]
        assert heads == [name for name in heads if ghosts._runs[name].names[-1] == name]
        assert len(heads) == len(set(heads)) == len(ghosts._runs)
        assert len(ghosts) == len(names(ghosts))
