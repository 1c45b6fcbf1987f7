"""The Redis tier fails while an engine serves: no answer changes, and the tier is back by itself.

"Left alone" is told by counters: a lookup that does not wait is as quick as without Redis.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import harness
import pytest
from harness import BLOCK, no_leaks, prompt
from inprocess import Ask
from lower_site import BLOCKS, DECODE, Site, filled_shelf
from support import until

sys.path[:0] = [str(Path(__file__).parents[1] / "tiers")]  # for proxy.py

from proxy import Proxy
from redis_servers import needs_redis, redis_cluster, redis_server

pytestmark = needs_redis

WHOLE = BLOCKS * BLOCK
FAILURES = 3
"""In a row, until a tier is left alone."""
CONNECTIONS = 4


@pytest.fixture(scope="module")
def engine(module_lab):
    return module_lab.local_engine(module_lab.folder / "site.sock")


@pytest.fixture(scope="module")
def shelf(module_lab, engine, plain, tmp_path_factory):
    return filled_shelf(module_lab, engine, plain, tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def redis(shelf, tmp_path):
    """A Redis that has all pages of the shelf."""
    with redis_server(tmp_path / "redis") as server:
        shelf.fill(server)
        yield server


@pytest.fixture
def proxy(redis):
    """A proxy before it."""
    with Proxy(redis.port) as between:
        yield between


@pytest.fixture
def site_at(module_lab, engine):
    """Start a server with a Redis tier at a URL; it ends with the test."""
    with harness.lab(module_lab.folder, module_lab.model) as lab:

        def start(url, **sections):
            redis = {"url": url, "timeout_seconds": 10, "connections": CONNECTIONS}
            sections["redis"] = redis | sections.get("redis", {})
            loads = {"mode": "always", "wait_seconds": 60}
            site = Site(lab, "site", engine=engine, **{"loads": loads} | sections)
            site.meet()
            until(lambda: site.up("redis"), "the first connection")
            return site

        yield start


def fresh(first, count, blocks=BLOCKS):
    return [prompt(1000 + first + n, blocks * BLOCK + 3) for n in range(count)]


def left_alone(site, pages):
    """Ask page after page until the tier is left alone; then none waits for it any more."""
    asked = 0
    while site.up("redis"):
        site.answers_cold([pages[asked]], cached=0)
        asked += 1
    assert asked <= FAILURES
    waits = site.count("waits_total")
    site.answers_cold(pages[-4:], cached=0)
    assert site.count("waits_total") == waits, "a lookup waited for a tier that is left alone"


# A server that fails.


def test_a_redis_that_dies_is_left_alone_and_comes_back(redis, site_at, shelf):
    site = site_at(redis.url)
    site.answers_cold(shelf.pages[:2], cached=WHOLE)
    redis.kill()
    left_alone(site, shelf.pages[2:12])
    assert site.faults("unreachable", "redis") >= FAILURES
    assert site.count("breaker_openings_total", tier="redis") == 1
    shelf.fill(redis.start())
    site.comes_back("redis", shelf.pages[12:])


def test_a_redis_that_freezes_is_left_alone_and_comes_back(redis, site_at, shelf):
    site = site_at(redis.url, redis={"timeout_seconds": 0.3})
    site.answers_cold(shelf.pages[:1], cached=WHOLE)
    with redis.frozen():
        left_alone(site, shelf.pages[2:12])
        assert 0 < site.faults("timeout", "redis") <= FAILURES + CONNECTIONS
    site.comes_back("redis", shelf.pages[12:])


def test_many_lookups_at_a_frozen_redis_do_not_time_out_one_after_the_other(redis, site_at, shelf):
    site = site_at(redis.url, redis={"timeout_seconds": 0.3})
    with redis.frozen():
        site.answers_cold(shelf.pages, cached=0)
        assert not site.up("redis")
        assert site.faults("timeout", "redis") <= FAILURES + 2 * CONNECTIONS
    site.comes_back("redis", shelf.pages)


def test_a_redis_that_is_empty_after_a_restart_is_filled_again(redis, site_at, plain):
    site = site_at(redis.url, host={"capacity": "6MiB"})
    asked = fresh(0, 2)
    cold = [each.tokens for each in plain.complete_all(asked, DECODE)]
    assert [site.ask(each).tokens for each in asked] == cold
    site.holds("redis", 2 * BLOCKS)
    redis.kill()
    redis.start()
    for filling in fresh(10, 2, blocks=60):
        site.ask(filling)
        site.quiet()
    until(lambda: site.up("redis"), "the tier", 40)
    site.engine.forget()
    again = site.engine.complete_all(asked, DECODE)
    assert [each.tokens for each in again] == cold
    assert [each.cached for each in again] == [0, 0], "memory had it, and this test shows nothing"
    site.quiet()
    site.restart()
    until(lambda: site.up("redis"), "the first connection")
    again = site.engine.complete_all(asked, DECODE)
    assert [each.tokens for each in again] == cold
    assert [each.cached for each in again] == [WHOLE, WHOLE]
    no_leaks(site.server, site.engine)


def test_a_redis_at_its_maxmemory_still_serves_and_takes_blocks_once_there_is_room(
    redis, site_at, shelf, plain
):
    site = site_at(redis.url)
    asked = fresh(20, 4)
    cold = [each.tokens for each in plain.complete_all(asked, DECODE)]
    redis.ask("CONFIG", "SET", "maxmemory", 2 << 20)
    assert [each.tokens for each in site.engine.complete_all(asked, DECODE)] == cold
    site.quiet()
    assert site.faults("full", "redis") > 0
    assert site.writes("written", "redis") == 0
    assert site.up("redis")
    site.answers_cold(shelf.pages[:4], cached=WHOLE)
    redis.ask("CONFIG", "SET", "maxmemory", 0)
    others = iter(fresh(30, 100))

    def writes_again():
        site.ask(next(others))
        site.quiet()
        return site.writes("written", "redis") >= BLOCKS

    until(writes_again, "writes", 30)
    no_leaks(site.server, site.engine)


def test_connections_that_redis_closes_while_they_are_idle_cost_nothing(redis, site_at, shelf):
    site = site_at(redis.url)
    for page in shelf.pages[:4]:
        site.answers_cold([page], cached=WHOLE)
        assert redis.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") > 0
    site.answers_cold(shelf.pages[4:8], cached=WHOLE)
    assert not site.count("tier_faults_total", tier="redis")
    no_leaks(site.server, site.engine)


@contextmanager
def repeating(call):
    """Call something over and over beside the block."""
    over = threading.Event()

    def run():
        while not over.is_set():
            call()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_connections_that_are_closed_in_use_change_no_answer(redis, site_at, shelf):
    site = site_at(redis.url)
    with repeating(lambda: redis.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")):
        for at in range(0, 12, 4):
            site.answers_cold(shelf.pages[at : at + 4])
    site.comes_back("redis", shelf.pages[12:])


# A record that is not what it was.


def overwrite(ask, name, other):
    ask("SETRANGE", name, 20_000, b"other bytes")


def swap(ask, name, other):
    ask("RENAME", name, "aside")
    ask("RENAME", other, name)
    ask("RENAME", "aside", other)


def expire(ask, name, other):
    ask("PEXPIRE", name, 0)


def shorten(ask, name, other):
    ask("SET", name, "of another program")


def retype(ask, name, other):
    ask("DEL", name)
    ask("HSET", name, "of", "another program")


@pytest.mark.parametrize("damage", [overwrite, swap, expire, shorten, retype])
def test_a_record_in_redis_that_is_not_what_it_was_ends_the_prefix_and_is_replaced(
    damage, redis, site_at, shelf
):
    site = site_at(redis.url)
    names = {name.decode().rpartition(":")[2]: name for name in redis.ask("KEYS", "kvtier:*")}
    pages = iter(shelf.pages)
    bad = 0
    for position in (0, 1, BLOCKS - 1):
        mine, other = next(pages), next(pages)
        damage(redis.ask, *(names[page.keys[position]] for page in (mine, other)))
        site.answers_cold([mine], cached=position * BLOCK)
        site.answers_cold([other], cached=position * BLOCK if damage is swap else WHOLE)
        bad += 2 if damage is swap else 1
    assert site.reads("corrupt", "redis") == (0 if damage is expire else bad)
    assert site.up("redis")
    site.quiet()
    no_leaks(site.server, site.engine)
    site.restart()
    until(lambda: site.up("redis"), "the first connection")
    site.answers_cold(shelf.pages[:6], cached=WHOLE)


# A network that fails.


def delayed(proxy):
    proxy.delay = 0.05


def cut(proxy):
    proxy.cut_after = 30_000


def silent(proxy):
    proxy.silent_after = 30_000


def flipping(proxy):
    proxy.flips = 1.0


@pytest.mark.parametrize("trouble", [delayed, cut, silent, flipping])
def test_a_network_in_trouble_changes_no_answer(trouble, proxy, site_at, shelf):
    seconds = 10 if trouble is delayed else 0.5
    site = site_at(proxy.url, redis={"timeout_seconds": seconds})
    trouble(proxy)
    proxy.drop_connections()
    for at in range(0, 12, 3):
        site.answers_cold(shelf.pages[at : at + 3], cached=WHOLE if trouble is delayed else None)
    failed = site.count("tier_faults_total", tier="redis") + site.reads("corrupt", "redis")
    assert bool(failed) is (trouble is not delayed), f"seed {proxy.seed}"
    proxy.calm()
    proxy.drop_connections()
    site.comes_back("redis", shelf.pages[12:])


SLOW_BLOCKS = 19
FAMILIES, MEMBERS = 4, 16
STEPS = 40

WATCH = """
side = scheduler_side()
matched_tokens, told = side.matched_tokens, {}

def watching(request, computed):
    told.setdefault(request.request_id, []).append(matched_tokens(request, computed))
    return told[request.request_id][-1]

side.matched_tokens = watching
result = None
"""
WATCHED = "result = [answers[0] for answers in told.values()]"
PROGRESS = """
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
result = [each.num_output_tokens for each in scheduler.running]
"""
STOP_WATCHING = "side.matched_tokens = matched_tokens; result = None"


def test_lookups_at_a_redis_that_is_slow_hold_up_no_step_of_others(proxy, site_at, plain):
    heads = [prompt(300 + n, SLOW_BLOCKS * BLOCK) for n in range(FAMILIES)]
    tails = [prompt(400 + n, BLOCK + 1) for n in range(MEMBERS)]
    asked = [head + tail for head in heads for tail in tails]
    cold = [each.tokens for each in plain.complete_all(asked, 4)]
    site = site_at(proxy.url, redis={"timeout_seconds": 30, "connections": 16})
    site.engine.forget()
    site.engine.complete_all(asked, 4)
    distinct = FAMILIES * SLOW_BLOCKS + len(asked)
    site.holds("redis", distinct)
    site.restart()
    until(lambda: site.up("redis"), "the first connection")
    gate = threading.Event()
    proxy.delay = lambda: gate.wait() and 0.05
    engine = site.engine
    engine.run(WATCH)
    engine.start([Ask(prompt(500, 5), sampling={"max_tokens": 20 * STEPS})])
    engine.step()
    ids = engine.start([Ask(each, sampling={"max_tokens": 4}) for each in asked])
    try:
        for _ in range(STEPS):
            assert not engine.step()
        assert engine.run(WATCHED) == [0] + [None] * len(asked), "a lookup was waited for"
        [progress] = engine.run(PROGRESS)
        assert progress >= STEPS
    finally:
        gate.set()
    found = engine.drain()
    engine.run(STOP_WATCHING)
    assert [found[each].tokens for each in ids] == cold
    assert {found[each].cached for each in ids} == {(SLOW_BLOCKS + 1) * BLOCK}
    assert site.reads("read", "redis") == distinct, "each block is read once"
    assert not site.count("tier_faults_total", tier="redis")
    no_leaks(site.server, site.engine)


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_is_left_alone_and_comes_back(tmp_path, site_at, plain):
    asked = fresh(200, 12)
    cold = [each.tokens for each in plain.complete_all(asked, DECODE)]

    def answers():
        site.engine.forget()
        got = site.engine.complete_all(asked, DECODE)
        assert [each.tokens for each in got] == cold
        return sum(each.cached for each in got)

    with redis_cluster(tmp_path / "cluster") as nodes:
        site = site_at(nodes[0].url, redis={"cluster": True})
        answers()
        site.holds("redis", len(asked) * BLOCKS)
        site.restart()
        until(lambda: site.up("redis"), "the first connection")
        nodes[2].kill()
        answers()
        others = iter(fresh(300, 500))

        def down():
            site.ask(next(others))
            return not site.up("redis")

        until(down, "the breaker", 40)
        nodes[2].start()
        until(lambda: site.up("redis"), "the tier", 60)
        no_leaks(site.server, site.engine)

        def filled():
            site.restart()
            until(lambda: site.up("redis"), "the first connection")
            hits = answers()
            site.quiet()
            return hits == len(asked) * WHOLE

        until(filled, "what the node lost: computed, written, and there again", 120)
