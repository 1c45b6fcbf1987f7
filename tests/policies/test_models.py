"""Each policy does what an independent, plain model of it does, eviction by eviction."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from kvtier.policies import POLICIES
from models import FIFOModel, GDSFModel, LRUModel, MQModel, SLRUModel
from models_with_parking import ARCModel, S3FIFOModel
from requests_of_chains import HISTORIES, Tier, TierThatKnowsParents, chain_of, key_of, long_history

MODELS = {
    "lru": LRUModel,
    "fifo": FIFOModel,
    "mq": MQModel,
    "slru": SLRUModel,
    "arc": ARCModel,
    "s3fifo": S3FIFOModel,
    "gdsf": GDSFModel,
}


def follow(tier, model, step):
    """Carry out a step on both. Returns what each evicted."""
    name, what, more = step
    leased = frozenset([*tier.parents][: more if more > 2 else 0])
    gone = tier.run(step)
    if name == "request":
        model.request(chain_of(what))
    elif name == "evict":
        return gone, [key for _ in range(what) if (key := model.evict(leased)) is not None]
    elif (key := key_of(what)) in model.parents and model.leaf(key):
        model.remove(key)
    return [], []


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=60, deadline=None)
@given(history=HISTORIES)
def test_it_evicts_what_a_plain_model_evicts(name, history):
    check(name, history)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", MODELS)
def test_it_does_so_over_a_long_time(name, seed):
    check(name, long_history(seed))
    check(name, long_history(seed), TierThatKnowsParents)


def check(name, history, kind=Tier):
    tier, model = kind(POLICIES[name]()), MODELS[name]()
    if name == "arc":
        # In a walk that passes blocks over, ARC may name a parent one round later.
        history = [(kind, what, 0) for kind, what, _ in history]
    for step in [*history, ("evict", 1000, 0)]:
        evicted, expected = follow(tier, model, step)
        assert evicted == expected
    assert not tier.parents
