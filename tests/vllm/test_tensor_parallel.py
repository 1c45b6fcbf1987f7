"""Two real ranks: each copies its shard, and a block counts when both have it."""

from __future__ import annotations

import json

import pytest
from harness import BLOCK, prompt
from support import until

DECODE = 16


@pytest.fixture(scope="module")
def server(module_lab):
    return module_lab.server()


@pytest.fixture(scope="module")
def engine(module_lab, server):
    return module_lab.local_engine(server.socket, tensor_parallel_size=2)


def test_both_ranks_get_their_shards_back(engine, server):
    """One prompt more often than the device holds it: cold, and then restored on both ranks."""
    asked = prompt(1, 6 * BLOCK + 3)
    cold = engine.complete(asked, DECODE)
    engine.forget()
    warm = engine.complete(asked, DECODE)
    assert warm.cached == 6 * BLOCK
    assert warm.tokens == cold.tokens
    assert len(set(cold.tokens)) > 1
    [space] = json.loads(server.get("/v1/namespaces"))
    assert space["manifest"]["shards"] == 2
    sessions = json.loads(server.get("/v1/sessions"))
    assert sorted((each["role"], each["rank"]) for each in sessions) == [
        ("scheduler", 0), ("worker", 0), ("worker", 1),
    ]  # fmt: skip


def test_no_lease_and_only_the_stock_remain(engine, server):
    engine.complete(prompt(2, 3 * BLOCK), DECODE)

    def idle():
        sessions = json.loads(server.get("/v1/sessions"))
        return sum(each["leased_blocks"] for each in sessions) == 0

    until(idle, "the end of all leases")
