"""vLLM on LMCache on kvtier: what an LMCache server forgot comes back from kvtier's tiers."""

from __future__ import annotations

import json

import pytest
from harness import MODEL_TOKENS, OPEN, OnlineEngine, prompt
from support import until

from loadtest.lmcache_bench import kvtier_adapter
from loadtest.peers.base import Place, Setup, Tiers
from loadtest.peers.lmcache import DEFAULT_CHUNK, PYTHON, LMCacheHost
from loadtest.rig import counter
from loadtest.stack import (
    CPU_ENGINE_OPTIONS,
    ONE_PROCESS_ENVIRONMENT,
    ONE_PROCESS_OPTIONS,
    start_vllm,
)

CHUNKS = 3
PROMPT = prompt(7, CHUNKS * DEFAULT_CHUNK + 50)

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="LMCache is not installed: make venv-lmcache"
)


class OnKvtier(LMCacheHost):
    """`lmcache server` with its chunks in a kvtier server."""

    def __init__(self, place, server):
        super().__init__(place)
        self._kvtier = server

    def _adapters(self):
        return [kvtier_adapter(self._kvtier, "tiny")]


@pytest.fixture
def lmcache(tmp_path, tiny_model, kvtier_server):
    """A ready LMCache server on `kvtier_server`."""
    setup = Setup(tiny_model, Tiers.HOST, host_mib=512)
    host = OnKvtier(Place(setup, tmp_path, None), kvtier_server)
    host.start()
    OPEN.append(host.server)
    yield host
    host.stop()
    OPEN.pop()


@pytest.fixture
def engine(tmp_path, tiny_model, lmcache):
    """A ready engine on `lmcache`."""
    options = [
        "--model",
        str(tiny_model),
        *CPU_ENGINE_OPTIONS,
        *ONE_PROCESS_OPTIONS,
        *lmcache.engine_options(),
    ]
    options += ["--max-model-len", str(MODEL_TOKENS), "--kv-cache-memory-bytes", str(1 << 28)]
    environment = {**ONE_PROCESS_ENVIRONMENT, **lmcache.environment}
    part = start_vllm(tmp_path, options, "vllm", environment, lmcache.python)
    OPEN.append(part)
    try:
        part.wait()
        yield OnlineEngine(part, str(tiny_model))
    finally:
        part.stop()
        OPEN.remove(part)


def test_an_lmcache_server_that_restarts_finds_its_chunks_in_kvtier(kvtier_server, lmcache, engine):
    cold = engine.complete(PROMPT)
    assert cold.cached == 0

    def stored():
        return counter(kvtier_server, "kvtier_stores_total", outcome="committed")

    until(lambda: stored() >= CHUNKS, "the stores", 30)
    lmcache.restart()
    engine.forget()
    warm = engine.complete(PROMPT)
    assert warm.tokens == cold.tokens
    assert warm.cached >= (CHUNKS - 1) * DEFAULT_CHUNK
    hits = counter(kvtier_server, "kvtier_tokens_hit_total", tier="host")
    assert hits >= CHUNKS * DEFAULT_CHUNK
    tenants = json.loads(kvtier_server.get("/v1/tenants"))
    assert [one["stored_blocks"] for one in tenants if one["tenant"] == "lmcache"] == [stored()]
    sessions = json.loads(kvtier_server.get("/v1/sessions"))
    assert sessions
    assert not any(one["leased_blocks"] for one in sessions)
