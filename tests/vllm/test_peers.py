"""The systems under test do what a comparison asks of them: real servers, engines and files."""

import contextlib
import os
from pathlib import Path

import pytest
from harness import DEADLINE_MS, prompt

from loadtest.peers import PeerError, Setup, Tiers, running
from loadtest.peers.lmcache import PYTHON
from loadtest.rig import Engine

CACHED = 512
"""Tokens that are two of LMCache's chunks, or 16 blocks."""
TOKENS = CACHED + 20
ALWAYS = "loads: {mode: always, wait_seconds: 60}"
"""A tiny model computes sooner than it loads."""


def setup(model, tiers):
    options = {"host_mib": 256, "engine_mib": 64, "model_tokens": 1024}
    patient = {"deadline_ms": DEADLINE_MS}
    return Setup(model, tiers, **options, kvtier_settings=ALWAYS, kvtier_connector=patient)


def cached(part, seed=1):
    """Ask a prompt, and return how many of its tokens were cached."""
    with contextlib.closing(Engine(part, "asked")) as engine:
        return engine.ask(prompt(seed, TOKENS)).cached


def came_from(peer, ask):
    """Return the cached tokens of an answer, those from outside L0, and who served them."""
    outside, served = peer.cached_external(), peer.served()
    tokens = ask()
    peer.settle()
    by_tier = {tier: now - served[tier] for tier, now in peer.served().items()}
    return tokens, peer.cached_external() - outside, {t: n for t, n in by_tier.items() if n}


def children():
    """Return the processes that this one has started and that have not ended."""
    mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in mine if Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"]


def shared_memory():
    """Return the names of shared memory that a cache server made."""
    return {path.name for path in Path("/dev/shm").iterdir() if "lmcache" in path.name}


def test_kvtier_is_driven_through_its_tiers_and_leaves_nothing(tiny_model):
    before = children()
    with running("kvtier", setup(tiny_model, Tiers.DISK)) as peer:
        assert cached(peer.engine) == 0
        peer.settle()
        assert came_from(peer, lambda: cached(peer.engine)) == (CACHED, 0, {})
        peer.forget_device()
        from_host = (CACHED, CACHED, {Tiers.HOST: CACHED})
        assert came_from(peer, lambda: cached(peer.engine)) == from_host
        peer.drop_host()
        from_disk = (CACHED, CACHED, {Tiers.DISK: CACHED})
        assert came_from(peer, lambda: cached(peer.engine)) == from_disk
        server = peer.host.server.child.pid
        peer.restart_server()
        assert peer.host.server.child.pid != server
        peer.forget_device()
        assert came_from(peer, lambda: cached(peer.engine)) == from_disk
        other = peer.second_engine()
        assert came_from(peer, lambda: cached(other)) == from_host
        engine = peer.engine.child.pid
        peer.restart_engine()
        assert peer.engine.child.pid != engine
        assert came_from(peer, lambda: cached(peer.engine))[0] == CACHED
        assert peer.settings()["host"]["disk"]["admission"] == "always"
    assert children() == before


def test_hosts_of_kvtier_share_redis_and_nothing_else(tiny_model):
    with running("kvtier", setup(tiny_model, Tiers.REDIS)) as peer:
        cached(peer.engine)
        peer.settle()
        other = peer.second_host()
        assert came_from(peer, lambda: cached(other)) == (CACHED, CACHED, {Tiers.REDIS: CACHED})


def test_vllm_by_itself_has_nothing_outside_its_own_cache(tiny_model):
    with running("vllm", setup(tiny_model, Tiers.DEVICE)) as peer:
        assert cached(peer.engine) == 0
        assert came_from(peer, lambda: cached(peer.engine)) == (CACHED, 0, {})
        peer.drop_host()
        assert came_from(peer, lambda: cached(peer.engine)) == (0, 0, {})


@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-lmcache: run `make venv-lmcache`")
def test_lmcache_is_driven_through_its_tiers_and_leaves_nothing(tiny_model):
    before, memory = children(), shared_memory()
    with running("lmcache", setup(tiny_model, Tiers.DISK)) as peer:
        made = shared_memory() - memory
        assert made
        assert cached(peer.engine) == 0
        peer.settle()
        peer.forget_device()
        from_host = (CACHED, CACHED, {Tiers.HOST: CACHED})
        assert came_from(peer, lambda: cached(peer.engine)) == from_host
        peer.drop_host()
        from_disk = (CACHED, CACHED, {Tiers.DISK: CACHED})
        assert came_from(peer, lambda: cached(peer.engine)) == from_disk
        peer.restart_server()
        peer.forget_device()
        assert came_from(peer, lambda: cached(peer.engine)) == from_disk
    assert children() == before
    assert not made & shared_memory()


@pytest.mark.parametrize(("name", "tiers"), [("vllm", Tiers.HOST), ("example", Tiers.REDIS)])
def test_a_system_without_a_tier_refuses_it(tiny_model, name, tiers):
    started = running(name, setup(tiny_model, tiers))
    with pytest.raises(PeerError, match=f"{name} has no {tiers.value} tier"), started:
        pass


def test_offloading_without_a_gpu_is_refused_in_one_sentence(tiny_model):
    started = running("offloading", setup(tiny_model, Tiers.HOST))
    with pytest.raises(PeerError, match="needs a GPU"), started:
        pass
