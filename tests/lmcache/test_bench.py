"""LMCache's own conformance run: it stores, asks, loads and compares every byte."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import until

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest import lmcache_bench
from loadtest.peers.lmcache import PYTHON
from loadtest.stack import start_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="LMCache is not installed: make venv-lmcache"),
]


def test_lmcaches_benchmark_verifies_every_byte(tmp_path):
    server = start_server(tmp_path, "--capacity", "1GiB")
    try:
        server.wait()
        assert lmcache_bench.load_speed(lmcache_bench.kvtier_adapter(server, "bench"), 2) > 0
        until(lambda: server.get("/v1/sessions") == "[]", "the end of all sessions")
    finally:
        server.stop()
