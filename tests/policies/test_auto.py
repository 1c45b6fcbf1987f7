"""MQ that finds its life by itself: what its shadows see, and what it takes from them."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest
from kvtier.policies import POLICIES
from kvtier.policies.auto import FIRST_LIFE, LIVES, PERIOD, SHADOW_BLOCKS, STEP
from kvtier.policies.mq import MQ
from kvtier.policies.shadow import SLACK_SHARE, Shadow

ROOM = 512
LENGTH = 16


class Served:
    """A tier of 512 blocks under `auto`, and chains of 16 blocks by number."""

    def __init__(self):
        self.policy = POLICIES["auto"]()
        self.resident = set()

    def request(self, number):
        chain = [(number * LENGTH + at).to_bytes(8, "big") for at in range(LENGTH)]
        self.policy.touch(chain)
        parent = None
        for key in chain:
            if key not in self.resident:
                self.policy.insert([key], 1, parent)
                self.resident.add(key)
            parent = key
        for key in self.policy.victims():
            if len(self.resident) <= ROOM:
                break
            self.policy.evict(key)
            self.resident.discard(key)


def once():
    """Return numbers of chains that never come twice."""
    return count(1_000_000)


def test_chains_that_return_after_many_others_make_lives_long():
    served, fresh = Served(), once()
    for turn in range(20 * PERIOD):
        served.request(turn // 4 % 24 if not turn % 4 else next(fresh))
    assert served.policy.life == max(LIVES)


def test_traffic_that_recency_serves_best_makes_lives_short():
    served = Served()
    for turn in range(20 * PERIOD):
        first = turn // 64 * 8
        served.request(first + turn % 8)
    assert served.policy.life == min(LIVES)


def test_the_shadows_hold_an_eighth_of_the_blocks():
    served, fresh = Served(), once()
    for _ in range(PERIOD):
        served.request(next(fresh))
    for shadow in served.policy._shadows:
        assert len(shadow) == ROOM // STEP


def test_nothing_is_chosen_before_there_were_hits():
    served, fresh = Served(), once()
    for _ in range(3 * PERIOD):
        served.request(next(fresh))
    assert served.policy.life == FIRST_LIFE


def test_a_successor_goes_on_with_the_life_that_was_found():
    served, fresh = Served(), once()
    for turn in range(20 * PERIOD):
        served.request(turn // 4 % 24 if not turn % 4 else next(fresh))
    successor = POLICIES["auto"]()
    successor.adopt(served.policy.export())
    assert successor.life == max(LIVES)
    assert len(successor) == len(served.policy)


@pytest.mark.parametrize("life", LIVES)
def test_a_shadow_hits_about_what_mq_would_hit(life):
    random = Random(1)
    shadow, mq, hits = Shadow(life), MQ(life), 0
    for _ in range(4000):
        number = min(int(random.expovariate(1 / 60)), 400)
        chain = [(number * LENGTH + at).to_bytes(8, "big") for at in range(random.randint(1, 4))]
        shadow.serve([chain], 200)
        found = mq.leading(chain)
        hits += found
        mq.touch(chain)
        mq.fill(chain, found, 1)
        mq.make_room(max(len(mq) - 200, 0), lambda key, kept=chain[:found]: key not in kept)
    assert shadow.hits == pytest.approx(hits, rel=0.03)
    assert len(shadow) == pytest.approx(200, abs=200 // SLACK_SHARE)


def test_shadows_of_large_tiers_see_a_small_part_of_some_chains():
    policy = POLICIES["auto"]()
    fresh, stored = once(), 0
    while stored < 65_536:
        first = next(fresh) * LENGTH
        keys = [(first + at).to_bytes(8, "big") for at in range(LENGTH)]
        policy.touch(keys)
        policy.insert(keys, 1, None)
        stored += LENGTH
    for _ in range(2 * PERIOD):
        policy.make_room(LENGTH, lambda _: True)
        first = next(fresh) * LENGTH
        keys = [(first + at).to_bytes(8, "big") for at in range(LENGTH)]
        policy.touch(keys)
        policy.insert(keys, 1, None)
    for shadow in policy._shadows:
        assert SHADOW_BLOCKS // 2 <= len(shadow) <= 2 * SHADOW_BLOCKS
