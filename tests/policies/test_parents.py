"""A policy that may ask for parents keeps less, and decides what it would decide without them."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest
from kvtier.policies import POLICIES

LENGTH = 70
"""Blocks that a chain grows by at most: more than lie between two that are in an index."""


class Pair:
    """A policy that may ask for parents, and one that may not; both are told the same."""

    def __init__(self, name):
        self.policies = [POLICIES[name](), POLICIES[name]()]
        self.parents = {}
        self.policies[0].follow(self)

    @property
    def torn(self):
        return any(parent and parent not in self.parents for parent in self.parents.values())

    def parent_of(self, key):
        return self.parents.get(key)

    def request(self, chain):
        for policy in self.policies:
            policy.touch(chain)
        at = 0
        while at < len(chain):
            begin = at
            while at < len(chain) and chain[at] not in self.parents:
                at += 1
            if at > begin:
                self.insert(chain[begin:at], chain[begin - 1] if begin else None)
            at += 1

    def insert(self, keys, parent):
        above = [parent, *keys[:-1]]
        self.parents.update(zip(keys, above, strict=True))
        for policy in self.policies:
            policy.insert(keys, 10, parent)

    def make_room(self, count, kept):
        gone = [], []
        for policy, went in zip(self.policies, gone, strict=True):

            def goes(key, policy=policy, went=went):
                if key in kept:
                    return False
                if policy is self.policies[-1]:
                    del self.parents[key]
                went.append(key)
                return True

            policy.make_room(count, goes)
        assert gone[0] == gone[1]

    def evict(self, count):
        coldest = [list(islice(policy.victims(), count)) for policy in self.policies]
        assert coldest[0] == coldest[1]
        for key in coldest[0]:
            for policy in self.policies:
                policy.evict(key)
            del self.parents[key]

    def drop(self, key):
        for policy in self.policies:
            policy.remove(key)
        del self.parents[key]

    def check(self):
        known, unknown = self.policies
        assert list(known.victims()) == list(unknown.victims())
        assert set(known.resident) == set(unknown.resident) == set(self.parents)
        assert len(known) == len(self.parents)
        assert all(key in known for key in self.parents)
        assert b"elsewhere" not in known


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["auto", "lru", "mq"])
def test_it_decides_as_one_that_knows_none(name, seed):
    random = Random(seed)
    pair, chains = Pair(name), [[]]
    for _ in range(200):
        base = random.choice(chains[-12:])
        chain = base[: random.randint(0, len(base))]
        chain += [random.randbytes(8) for _ in range(random.randint(0, LENGTH))]
        if chain:
            chains.append(chain)
            pair.request(chain)
        if random.random() < 0.5:
            pair.make_room(random.randint(1, LENGTH), frozenset(chain[:LENGTH]))
        if random.random() < 0.1:
            pair.evict(random.randint(1, LENGTH))
        if pair.parents and random.random() < 0.2:
            pair.drop(random.choice(list(pair.parents)))
        if random.random() < 0.1:
            pair.check()
    pair.check()


def test_it_may_begin_to_ask_with_blocks_that_are_there():
    """After a change of policy."""
    pair = Pair("mq")
    chain = [bytes([number]) for number in range(100)]
    pair.request(chain[:50])
    late, _ = pair.policies = pair.policies[::-1]
    late.follow(pair)
    for end in (70, 45, 100):
        pair.request(chain[:end])
        pair.check()
    pair.drop(chain[60])
    pair.drop(chain[90])
    pair.check()
