"""L2 end to end: what comes back from disk or Redis gives the cold answer, token for token."""

from __future__ import annotations

import sys
from pathlib import Path

from faulty import corrupting
from harness import BLOCK, BLOCK_BYTES, no_leaks, prompt
from lower_site import DECODE, Site
from support import until

sys.path[:0] = [str(Path(__file__).parents[1] / "tiers")]  # for redis_servers.py

from redis_servers import needs_redis, redis_server

BLOCKS = 5


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
    site.engine.complete(prompt(2, BLOCK + 3), 1)  # Now the worker has let go of old slabs.
    with corrupting(site.engine, "slice(2, 3)"):
        damaged = site.engine.complete(asked, DECODE)
    assert damaged.cached == BLOCKS * BLOCK
    assert damaged.tokens != cold.tokens


@needs_redis
def test_a_second_host_answers_from_redis_as_if_cold(lab, plain, tmp_path):
    with redis_server(tmp_path / "redis") as redis:
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
