"""A policy that is swapped while requests come keeps what the old one had learnt."""

from __future__ import annotations

from random import Random

import pytest
from kvtier.policies import POLICIES
from kvtier.replay.simulator import Hierarchy, Setup

CAPACITY = 600
AFTER = 2000
"""Requests over which a swap is judged."""
TWINS = 0.003
"""Hit ratio that a swap to the same policy may cost."""


NAMES = list(POLICIES)


def requests(seed=7):
    """Return conversations that grow by turns, hot and cold ones, and prompts asked once."""
    random = Random(seed)
    turns = {}
    for number in range(AFTER * 2):
        if random.random() < 0.3:
            yield [f"once-{number}-{at}".encode() for at in range(12)]
            continue
        chat = min(int(random.expovariate(1 / 60)), 400)
        turns[chat] = min(turns.get(chat, 2) + random.randint(0, 1), 14)
        yield [b"system", *(f"chat-{chat}-{at}".encode() for at in range(turns[chat]))]


def hit_ratio(first, second):
    """Return the hit ratio after half of the requests, with what `second` makes of the policy."""
    cache = Hierarchy(Setup(first, CAPACITY))
    hits = asked = 0
    for number, chain in enumerate(requests()):
        if number == AFTER:
            second(cache.host)
        found = cache.serve(chain)
        if number >= AFTER:
            hits, asked = hits + found, asked + len(chain)
    return hits / asked


def swapped_to(name):
    def swap(cache):
        policy = POLICIES[name]()
        policy.adopt(cache.policy.export())
        cache.policy = policy

    return swap


def cold(name):
    def swap(cache):
        cache.policy = POLICIES[name]()

    return swap


def unchanged(cache):
    pass


@pytest.mark.parametrize("name", POLICIES)
def test_a_swap_to_the_same_policy_costs_no_hits(name):
    assert hit_ratio(name, swapped_to(name)) == pytest.approx(hit_ratio(name, unchanged), abs=TWINS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [*zip(NAMES, NAMES[3:] + NAMES[:3], strict=True), ("lru", "auto")]
)
def test_a_swap_to_another_policy_is_better_than_a_cold_one(first, second):
    assert hit_ratio(first, swapped_to(second)) > hit_ratio(first, cold(second))
