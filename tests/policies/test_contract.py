"""What every policy promises, whatever its algorithm."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier.policies import POLICIES, Ghosts
from requests_of_chains import (
    HISTORIES,
    Tier,
    TierAtOnce,
    TierThatKnowsParents,
    chain_of,
    key_of,
)

EVERY = pytest.mark.parametrize("name", POLICIES)
WITH_GHOSTS = ("auto", "mq", "slru", "arc", "s3fifo")
COUNTING = ("auto", "lru", "mq", "slru", "arc", "gdsf")


def filled(name, *paths):
    tier = Tier(POLICIES[name]())
    for path in paths:
        tier.request(path)
    return tier


@EVERY
@settings(max_examples=25, deadline=None)
@given(history=HISTORIES)
def test_a_chain_always_loses_its_tail_first(name, history):
    tier = TierThatKnowsParents(POLICIES[name]())
    for step in history:
        tier.run(step)
        tier.check_integrity()
    tier.evict(len(tier.parents))
    assert not tier.parents
    assert len(tier.policy) == 0


@EVERY
@settings(max_examples=40, deadline=None)
@given(history=HISTORIES)
def test_many_blocks_at_once_are_the_same_as_one_by_one(name, history):
    single, at_once = Tier(POLICIES[name]()), TierAtOnce(POLICIES[name]())
    for step in history:
        assert at_once.run(step) == single.run(step)
        at_once.check_integrity()
    assert at_once.parents == single.parents
    states = [tier.policy.export() for tier in (at_once, single)]
    assert states[0].blocks == states[1].blocks
    assert states[0].ghosts == states[1].ghosts


@EVERY
@settings(max_examples=25, deadline=None)
@given(history=HISTORIES, count=st.integers(0, 5))
def test_a_walk_may_be_interrupted_and_changes_nothing_by_itself(name, history, count):
    tier = Tier(POLICIES[name]())
    for step in history:
        tier.run(step)
    first = [key for key, _ in zip(tier.policy.victims(), range(count), strict=False)]
    again = [key for key, _ in zip(tier.policy.victims(), range(count), strict=False)]
    assert first == again
    tier.check_integrity()


@EVERY
@settings(max_examples=25, deadline=None)
@given(history=HISTORIES)
def test_every_block_that_nothing_continues_is_named_once(name, history):
    tier = Tier(POLICIES[name]())
    for step in history:
        tier.run(step)
    named = list(tier.policy.victims())
    assert len(named) == len(set(named))
    assert set(named) <= set(tier.parents)
    assert {key for key in tier.parents if not tier.children(key)} <= set(named)


@EVERY
@pytest.mark.parametrize("heir", POLICIES)
@settings(max_examples=6, deadline=None)
@given(history=HISTORIES)
def test_a_swap_keeps_blocks_weights_and_chains(name, heir, history):
    tier = Tier(POLICIES[name]())
    for step in history:
        tier.run(step)
    state = tier.policy.export()
    assert {known.key for known in state.blocks} == set(tier.parents)
    assert {known.weight for known in state.blocks} <= {10}
    seen = set()
    for known in state.blocks:
        assert seen.issuperset(tier.children(known.key)), "a parent stands after its children"
        seen.add(known.key)
    tier.policy = POLICIES[heir]()
    tier.policy.adopt(state)
    tier.check_integrity()
    tier.request((0, 1, 2))
    tier.evict(len(tier.parents))
    assert not tier.parents


@pytest.mark.parametrize("name", ["auto", "lru", "mq", "slru", "fifo"])
@settings(max_examples=25, deadline=None)
@given(history=HISTORIES)
def test_a_swap_to_the_same_policy_keeps_its_order(name, history):
    tier = Tier(POLICIES[name]())
    for step in history:
        tier.run(step)
    state = tier.policy.export()
    heir = POLICIES[name]()
    heir.adopt(state)
    order = [known.key for known in heir.export().blocks]
    assert order == [known.key for known in state.blocks]


@EVERY
def test_what_was_exported_does_not_change_any_more(name):
    tier = filled(name, (0, 1), (1, 1), (0, 2))
    state = tier.policy.export()
    kept = (state.blocks, list(state.ghosts.items()))
    tier.evict(2)
    tier.request((2, 2, 2))
    assert (state.blocks, list(state.ghosts.items())) == kept


@EVERY
def test_what_is_dropped_leaves_no_ghost(name):
    tier = filled(name, (0, 1), (1,))
    tier.drop((1,))
    tier.drop((0, 1))
    assert len(tier.policy.export().ghosts) == 0


@pytest.mark.parametrize("name", WITH_GHOSTS)
def test_what_is_evicted_is_remembered(name):
    tier = filled(name, (0, 1), (0, 1), (1,), (2,))
    gone = tier.evict(1)
    assert gone[0] in tier.policy.export().ghosts


@pytest.mark.parametrize("name", WITH_GHOSTS)
@pytest.mark.parametrize("heir", WITH_GHOSTS)
def test_a_swap_keeps_the_ghosts(name, heir):
    tier = filled(name, (0, 1), (0, 1), (1,), (2,))
    (gone,) = tier.evict(1)
    successor = POLICIES[heir]()
    successor.adopt(tier.policy.export())
    assert gone in successor.export().ghosts
    successor.insert([gone], 10, None)
    assert gone not in successor.export().ghosts


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("heir", COUNTING)
def test_a_swap_keeps_the_counts_of_uses(name, heir):
    tier = filled(name, (0, 1), (0, 1), (0, 1), (0, 2), (1,))
    successor = POLICIES[heir]()
    successor.adopt(tier.policy.export())
    uses = {known.key: known.uses for known in successor.export().blocks}
    assert uses == dict(
        zip([*chain_of((0, 1)), key_of((0, 2)), key_of((1,))], [4, 3, 1, 1], strict=True)
    )


@EVERY
def test_one_request_counts_as_one_use(name):
    tier = filled(name, (0, 1, 2))
    tier.request((0, 1, 2))
    uses = {known.uses for known in tier.policy.export().blocks}
    assert uses == {1 if name == "fifo" else 2}


@EVERY
def test_a_parent_may_be_dropped_under_its_children(name):
    tier = filled(name, (0, 1, 2), (0, 1, 1))
    tier.policy.remove(key_of((0, 1)))
    policy = tier.policy
    assert len(policy) == 3
    policy.insert([key_of((0, 1))], 10, key_of((0,)))
    policy.touch(chain_of((0, 1, 2)))
    for key in policy.victims():
        policy.evict(key)
    assert len(policy) == 0
    assert key_of((0,)) not in policy


@EVERY
def test_a_hot_prefix_survives_prompts_that_are_asked_once(name):
    """Tells a policy from none; `fifo` is the one that does not look at uses."""
    tier = Tier(POLICIES[name]())
    kept = 0
    for number in range(200):
        tier.request((0, 1))
        tier.request((1, number % 250, number % 7))
        tier.evict(max(len(tier.parents) - 12, 0))
        kept += key_of((0, 1)) in tier.parents
    assert (kept > 190) == (name != "fifo")


def test_ghosts_are_bounded():
    ghosts = Ghosts()
    for number in range(10_000):
        ghosts.remember(number.to_bytes(4, "big"), 1, 1000)
        assert len(ghosts) <= 1000 + 1000 // 16 + 1
    assert (9_999).to_bytes(4, "big") in ghosts
    assert (1).to_bytes(4, "big") not in ghosts
