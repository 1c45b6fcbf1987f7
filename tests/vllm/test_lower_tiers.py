"""L2 end to end: what comes back from disk or Redis gives the cold answer, token for token."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from faulty import corrupting
from harness import BLOCK, BLOCK_BYTES, no_leaks, prompt
from support import until

sys.path[:0] = [str(Path(__file__).parents[1] / "tiers")]  # for redis_servers.py

from redis_servers import RedisServer, needs_redis

DECODE = 24
BLOCKS = 5


class Site:
    """One engine and the server at its socket, which comes and goes."""

    def __init__(self, lab, name, *options):
        self._lab = lab
        self._options = ("--capacity", "64MiB", *map(str, options))
        self._name = name
        self.start()
        self.engine = lab.local_engine(self.server.socket)

    def start(self):
        self.server = self._lab.server(*self._options, name=self._name)
        return self.server

    def tier(self, name):
        return json.loads(self.server.get(f"/v1/tiers/{name}"))

    def holds(self, tier, blocks):
        until(lambda: self.tier(tier)["blocks"] == blocks, f"{blocks} blocks in {tier}")

    def restart(self):
        """Forget memory: a new server on the same socket, and nothing in the device."""
        self.server.stop()
        self.start()
        self.engine.forget()

        def connected():
            return len(json.loads(self.server.get("/v1/sessions"))) == 2

        def met():
            self.engine.complete(prompt(99, BLOCK + 3), 1)
            return connected()

        until(met, "the engine's sessions")
        self.engine.forget()
        self.engine.complete(prompt(99, BLOCK + 3), 1)  # Now the worker has let go of old slabs.
        until(lambda: all(each["lower"]["scanned"] for each in self.lowers()), "the scan")

    def lowers(self):
        return [each for each in json.loads(self.server.get("/v1/tiers")) if each["lower"]]

    def hits(self):
        stats = json.loads(self.server.get("/v1/stats"))
        return {each["tier"]: each["tokens_hit"] for each in stats["traffic"]}


def test_a_restarted_server_answers_from_disk_as_if_cold(lab, plain, tmp_path):
    site = Site(lab, "site", "--disk", tmp_path / "blocks")
    asked = prompt(1, BLOCKS * BLOCK + 3)
    cold = plain.complete(asked, DECODE)
    assert site.engine.complete(asked, DECODE).tokens == cold.tokens
    site.holds("disk", (BLOCKS * BLOCK + 3 + DECODE) // BLOCK)
    site.restart()
    warm = site.engine.complete(asked, DECODE)
    assert warm.tokens == cold.tokens
    assert warm.cached == BLOCKS * BLOCK
    until(lambda: site.hits()["disk"] == BLOCKS * BLOCK, "the count")
    assert site.tier("disk")["used_bytes"] > BLOCKS * BLOCK_BYTES
    no_leaks(site.server, site.engine)


def test_a_corrupted_block_from_disk_changes_the_answer(lab, plain, tmp_path):
    """So that the comparisons here mean something."""
    site = Site(lab, "site", "--disk", tmp_path / "blocks")
    asked = prompt(1, BLOCKS * BLOCK + 3)
    cold = plain.complete(asked, DECODE)
    site.engine.complete(asked, DECODE)
    site.holds("disk", (BLOCKS * BLOCK + 3 + DECODE) // BLOCK)
    site.restart()
    with corrupting(site.engine, "slice(2, 3)"):
        damaged = site.engine.complete(asked, DECODE)
    assert damaged.cached == BLOCKS * BLOCK
    assert damaged.tokens != cold.tokens


@needs_redis
def test_a_second_host_answers_from_redis_as_if_cold(lab, plain, tmp_path):
    folder = tmp_path / "redis"
    folder.mkdir()
    from kvtier.endpoints import free_port

    redis = RedisServer(folder, free_port("127.0.0.1"), ()).start()
    try:
        one = Site(lab, "one", "--redis", redis.url)
        asked = prompt(3, BLOCKS * BLOCK + 3)
        cold = plain.complete(asked, DECODE)
        one.engine.complete(asked, DECODE)
        one.holds("redis", (BLOCKS * BLOCK + 3 + DECODE) // BLOCK)
        two = Site(lab, "two", "--redis", redis.url)
        warm = two.engine.complete(asked, DECODE)
        assert warm.tokens == cold.tokens
        assert warm.cached == BLOCKS * BLOCK
        until(lambda: two.hits()["redis"] == BLOCKS * BLOCK, "the count")
        no_leaks(two.server, two.engine)
    finally:
        redis.kill()
