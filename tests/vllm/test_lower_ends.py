"""How a server with lower tiers ends: in time, with nothing left behind, and no secret shown."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import harness
import pytest
from harness import BLOCK, no_leaks, prompt
from inprocess import Ask
from lower_site import BLOCKS, DECODE, Site, ended
from servers import run_kvtier
from support import until

sys.path[:0] = [str(Path(__file__).parents[1] / "tiers")]  # for disks.py

from disks import du
from redis_servers import needs_redis, redis_server

WHOLE = BLOCKS * BLOCK
LONG = 3 * BLOCK
"""Tokens of an answer during which blocks are stored."""
SECRET = "a-s3cr3t-for-kvtier"
PATHS = ("/metrics", "/v1/config", "/v1/tiers", "/v1/tiers/redis", "/v1/tiers/other", "/v1/stats",
         "/v1/sessions", "/v1/namespaces", "/v1/tenants", "/readyz", "/healthz")  # fmt: skip


@pytest.fixture(scope="module")
def engine(module_lab):
    return module_lab.local_engine(module_lab.folder / "site.sock")


@pytest.fixture
def site_with(module_lab, engine):
    """Start a server with settings; it ends with the test."""
    with harness.lab(module_lab.folder, module_lab.model) as lab:

        def start(**settings):
            loads = {"mode": "always", "wait_seconds": 120}
            site = Site(lab, "site", engine=engine, **{"loads": loads} | settings)
            site.meet()
            return site

        yield start


@pytest.fixture
def redis(tmp_path):
    with redis_server(tmp_path / "redis") as server:
        yield server


def fresh(first, count):
    return [prompt(1000 + first + n, BLOCKS * BLOCK + 3) for n in range(count)]


def asks(prompts, tokens=DECODE):
    return [Ask(each, sampling={"max_tokens": tokens}) for each in prompts]


def ends_well(site):
    """The server ends within its time, for else its exit code is another, and leaves nothing."""
    child, socket = site.server.child, site.server.socket
    assert site.server.stop() == 0, site.server.tail()
    assert ended(child.pid)
    assert not socket.exists()
    assert "Traceback" not in site.server.log.read_text()


def test_a_server_that_is_told_to_end_as_it_writes_leaves_whole_records(site_with, tmp_path, plain):
    path = tmp_path / "blocks"
    site = site_with(disk={"path": path, "keep_free": "4KiB"})
    asked = fresh(0, 16)
    cold = [each.tokens for each in plain.complete_all(asked, DECODE)]
    ids = site.engine.start(asks(asked))
    found = site.steps_until(lambda: site.writes("written") >= BLOCKS, "writes")
    site.server.child.send(signal.SIGTERM)
    found |= site.engine.drain()
    until(lambda: site.server.child.exit_code() is not None, "its end")
    ends_well(site)
    assert [found[each].tokens for each in ids] == cold
    left = [each for each in path.rglob("*") if each.is_file()]
    assert {each.suffix for each in left} <= {".kv", ".json", ""}, "a temporary file was left"
    site.start()
    site.meet()
    assert site.tier("disk")["used_bytes"] == du(path)
    warm = site.engine.complete_all(asked, DECODE)
    assert [each.tokens for each in warm] == cold
    assert sum(each.cached for each in warm) > 0
    assert not site.reads("corrupt")
    no_leaks(site.server, site.engine)


def test_what_is_stored_when_a_server_is_told_to_end_is_on_disk_afterwards(
    site_with, tmp_path, plain
):
    site = site_with(disk={"path": tmp_path / "blocks", "keep_free": "4KiB"})
    asked = fresh(20, 12)
    cold = [each.tokens for each in plain.complete_all(asked, DECODE)]
    site.engine.complete_all(asked, DECODE)
    ends_well(site)
    site.start()
    site.meet()
    warm = site.engine.complete_all(asked, DECODE)
    assert [each.tokens for each in warm] == cold
    assert [each.cached for each in warm] == [WHOLE] * len(asked)


@needs_redis
@pytest.mark.parametrize("seconds", [0.25, 30])
def test_a_server_that_writes_to_a_frozen_redis_ends_in_time(
    seconds, site_with, redis, tmp_path, plain
):
    settings = {"url": redis.url, "timeout_seconds": seconds}
    site = site_with(redis=settings, disk={"path": tmp_path / "blocks", "keep_free": "4KiB"})
    until(lambda: site.up("redis"), "the first connection")
    asked = fresh(40, 4)
    cold = [each.tokens for each in plain.complete_all(asked, LONG)]
    site.engine.start(asks(asked, LONG))
    site.steps_until(lambda: site.writes("written", "redis"), "a write")  # No lookup waits now.
    with redis.frozen():
        site.steps_until(lambda: site.tier("redis")["lower"]["queued_write_bytes"], "writes")
        ends_well(site)
        site.engine.drain()
        site.start(redis={})
        site.meet()
        warm = site.engine.complete_all(asked, LONG)
        assert [each.tokens for each in warm] == cold
        assert sum(each.cached for each in warm) > 0


@needs_redis
def test_a_server_ends_in_time_while_lookups_wait_for_a_frozen_redis(site_with, redis, plain):
    site = site_with(redis={"url": redis.url, "timeout_seconds": 30})
    until(lambda: site.up("redis"), "the first connection")
    asked = fresh(60, 8)
    cold = [each.tokens for each in plain.complete_all(asked, DECODE)]
    with redis.frozen():
        ids = site.engine.start(asks(asked))
        assert not site.engine.step()
        assert site.engine.used_blocks() == 0, "a lookup did not wait"
        ends_well(site)
        found = site.engine.drain()
    assert [found[each].tokens for each in ids] == cold


@needs_redis
@pytest.mark.parametrize("right", [True, False])
def test_no_password_is_shown(right, serve, redis, engine, module_lab, plain):
    redis.ask("CONFIG", "SET", "requirepass", SECRET if right else "another")
    socket = module_lab.folder / "site.sock"
    served = serve("--redis", redis.url, socket=socket, KVTIER_REDIS__PASSWORD=SECRET).ready()

    def told():
        return served.json("/v1/tiers/redis")["lower"]["up"] or "password" in served.log

    until(told, "the tier's first answer")
    assert served.json("/v1/tiers/redis")["lower"]["up"] is right
    asked = fresh(80, 1)[0]
    engine.forget()
    assert engine.complete(asked, DECODE).tokens == plain.complete(asked, DECODE).tokens
    shown = {path: served.get(path)[1] for path in PATHS}
    shown["command line"] = Path(f"/proc/{served.process.pid}/cmdline").read_text()
    status = run_kvtier("status", "--url", served.url)
    shown["status"] = status.stdout + status.stderr
    config = run_kvtier("config", KVTIER_REDIS__PASSWORD=SECRET)
    shown["config"] = config.stdout + config.stderr
    bad = run_kvtier("serve", KVTIER_REDIS__PASSWORD=SECRET, KVTIER_REDIS__PASSWORDS=SECRET)
    assert bad.returncode == 1
    shown["refusal"] = bad.stdout + bad.stderr
    code, _ = served.end()
    assert code == 0
    shown["log"] = served.log
    assert [where for where, text in shown.items() if SECRET in text] == []
    assert right or "check the user name and the password" in served.log
