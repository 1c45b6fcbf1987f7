"""MQ that finds its life by itself: what its shadows see, and what it takes from them."""

from __future__ import annotations

from itertools import count

from kvtier.policies import POLICIES
from kvtier.policies.auto import FIRST_LIFE, LIVES, PERIOD, STEP

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
        assert len(shadow.mq) == ROOM // STEP


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
