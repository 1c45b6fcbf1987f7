"""Lower tiers under simulated engines: what was stored comes back from them, byte for byte."""

from __future__ import annotations

import dataclasses
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm.distributed")
sys.path[:0] = [str(Path(__file__).parents[1] / "tiers")]  # for wrappers.py

from kvtier.core import EvictReason, Fault, ReadOutcome, Tier, WriteMode
from kvtier.looks import NEVER
from kvtier.tiers.base import TierFault
from kvtier.tiers.breaker import BreakerOptions
from kvtier.tiers.disk import DiskOptions, DiskStore
from kvtier.worth import LoadMode
from simulated import TOKENS, Engine, Request, blocks
from support import tokens, until
from wrappers import FaultyStore, SlowStore

pytestmark = pytest.mark.vllm

LONG = 4 * TOKENS + 1


@pytest.fixture
def disk(tmp_path):
    """A factory of stores over one directory, as servers that are started one after the other."""
    return lambda: DiskStore(DiskOptions(tmp_path / "blocks", 0))


@pytest.fixture
def engine_on():
    """A factory of engines on a plane; each is closed at the end."""
    started = []

    def start(plane, name="engine", **options):
        started.append(Engine(plane, name, **options))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def written(plane, blocks):
    """Wait until so many blocks are on disk."""
    until(lambda: len(plane.lowers[0]) == blocks, f"{blocks} blocks on disk")


def admit(engine, request, computed=0):
    """Do what vLLM does with a request, step by step, until it can be scheduled."""
    answers = []

    def answered():
        answers.append(engine.admit(request, computed))
        engine.step({})
        return answers[-1] is not None

    until(answered, "the answer to a lookup")
    return answers[-1]


def serve(engine, name, prompt="p", tokens=LONG, first_block=16):
    request = Request(name, prompt, tokens, range(first_block, first_block + 16))
    matched = admit(engine, request)
    engine.step({request: tokens - request.num_computed_tokens})
    return request, matched


def hits(plane):
    return {tier: hit for tier, (_, hit) in tokens(plane.do(plane.readings.traffic)).items()}


def stored_then_restarted(planes, disk, engine_on, **lower):
    """Return a plane that has 4 blocks on disk and none in memory."""
    first = planes(name="first.sock", stores=[disk()], lower=lower)
    engine_on(first).run("r")
    written(first, 4)
    second = planes(name="second.sock", stores=[disk()], lower=lower)
    assert len(second.lowers[0]) == 4, "the index is rebuilt"
    return second


def test_a_restarted_server_serves_the_prefix_from_disk(planes, disk, engine_on):
    second = stored_then_restarted(planes, disk, engine_on)
    engine = engine_on(second)
    request, matched = serve(engine, "s")
    assert matched == 4 * TOKENS
    for position, key in enumerate(request.block_hashes):
        assert engine.holds(0, 16 + position, key), f"block {position}"
    until(lambda: hits(second) == {"device": 0, "host": 0, "disk": 4 * TOKENS}, "the counts")
    assert serve(engine, "t", first_block=32)[1] == 4 * TOKENS, "from memory now"
    until(lambda: hits(second)["host"] == 4 * TOKENS, "the second count")
    assert blocks(second) == 4


def test_a_prefix_spans_memory_and_disk(planes, disk, engine_on):
    plane = planes(stores=[disk()])
    engine = engine_on(plane)
    engine.run("r")
    written(plane, 4)
    space = next(iter(plane.cache.directory.namespaces.values()))

    def forget(position):
        block = space.blocks[Request("x").block_hashes[position]]
        plane.cache.evictor.drop(space, block, EvictReason.CAPACITY)

    for position in (3, 1):
        plane.do(forget, position)
    request, matched = serve(engine, "s")
    assert matched == 4 * TOKENS
    assert all(engine.holds(0, 16 + at, key) for at, key in enumerate(request.block_hashes))
    until(lambda: hits(plane)["disk"] == 2 * TOKENS, "two blocks from disk")
    assert hits(plane)["host"] == 2 * TOKENS


@pytest.mark.parametrize("outcome", [ReadOutcome.MISSING, ReadOutcome.CORRUPT, Fault.IO])
@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_block_that_cannot_be_read_ends_the_prefix(planes, disk, engine_on, outcome, lost):
    stored_then_restarted(planes, disk, engine_on)
    keys = Request("x").block_hashes

    class Losing(FaultyStore):
        def read(self, space, key, into, report):
            if key != keys[lost]:
                return self.inner.read(space, key, into, report)
            if isinstance(outcome, Fault):
                raise TierFault(outcome, "lost")
            return outcome

    plane = planes(name="third.sock", stores=[Losing(disk())])
    engine = engine_on(plane)
    request, matched = serve(engine, "s")
    assert matched == lost * TOKENS
    assert all(engine.holds(0, 16 + at, key) for at, key in enumerate(request.block_hashes))
    until(lambda: blocks(plane) == 4, "what was computed is in memory")


def test_requests_that_wait_for_the_same_blocks_share_one_read(planes, disk, engine_on):
    stored_then_restarted(planes, disk, engine_on)
    gate = threading.Event()
    slow = SlowStore(disk(), read=gate.wait)
    plane = planes(name="third.sock", stores=[slow])
    engine = engine_on(plane)
    other = engine_on(plane, "other")
    requests = [Request(f"s{n}", blocks=range(16 * n, 16 * n + 16)) for n in range(3)]
    assert [engine.admit(request) for request in requests] == [None] * 3
    third = Request("t")
    assert other.admit(third) is None
    gate.set()
    assert admit(engine, requests[0]) == 4 * TOKENS
    assert admit(other, third) == 4 * TOKENS
    assert plane.metrics.reads.labels(Tier.DISK, ReadOutcome.READ)._value.get() == 4
    for request in requests[1:]:
        engine.scheduler.finished(request, [])
    engine.step({})


def test_a_lookup_that_is_given_up_leaves_nothing(planes, disk, engine_on):
    stored_then_restarted(planes, disk, engine_on)
    gate = threading.Event()
    plane = planes(name="third.sock", stores=[SlowStore(disk(), read=gate.wait)])
    engine = engine_on(plane)
    request = Request("s")
    assert engine.admit(request) is None
    engine.scheduler.finished(request, [])
    engine.step({})
    assert engine.admit(Request("t")) is None
    engine.close()
    until(lambda: not plane.do(plane.readings.sessions), "the end of the sessions")
    gate.set()
    until(lambda: not plane.do(lambda: plane.cache.promotions.incoming), "the reads under way")
    blocks(plane)


def test_a_lookup_waits_no_longer_than_its_time(planes, disk, engine_on):
    stored_then_restarted(planes, disk, engine_on)
    gate = threading.Event()
    plane = planes(name="third.sock", stores=[SlowStore(disk(), read=gate.wait)])
    options = plane.cache.promotions.options
    plane.cache.promotions.options = type(options)(LoadMode.AUTO, 0.05)
    engine = engine_on(plane)
    assert serve(engine, "s")[1] == 0
    gate.set()
    until(lambda: not plane.do(lambda: plane.cache.promotions.incoming), "the reads under way")
    assert blocks(plane) == 4


def test_a_reset_drops_what_is_on_disk_and_what_is_being_read(planes, disk, engine_on):
    stored_then_restarted(planes, disk, engine_on)
    gate = threading.Event()
    plane = planes(name="third.sock", stores=[SlowStore(disk(), read=gate.wait)])
    engine = engine_on(plane)
    request = Request("s")
    assert engine.admit(request) is None
    engine.scheduler.reset()
    gate.set()
    until(lambda: not plane.do(lambda: plane.cache.promotions.incoming), "the reads under way")
    assert blocks(plane) == 0
    until(lambda: not plane.lowers[0]._wiping, "the wipe")
    assert serve(engine, "t")[1] == 0
    assert len(disk_files(plane)) <= 4


def disk_files(plane):
    return list(plane.lowers[0].store.inner.options.path.rglob("*.kv"))


def test_a_tier_that_fails_is_left_alone_and_comes_back(planes, disk, engine_on):
    stored_then_restarted(planes, disk, engine_on)
    faulty = FaultyStore(disk())
    faulty.next("read", *[Fault.IO] * 4)
    lower = {"breaker": BreakerOptions(failures=1, pause_first=0.05)}
    plane = planes(name="third.sock", stores=[faulty], lower=lower)
    engine = engine_on(plane)
    assert serve(engine, "s", "p")[1] == 0
    until(lambda: not plane.lowers[0].health.up, "the breaker")
    plane.do(plane.cache.reset, next(iter(plane.cache.directory.namespaces.values())))

    def back():
        plane.do(plane.lowers[0].tick)
        return plane.lowers[0].health.up

    until(back, "the tier")


def test_what_memory_evicts_is_written_first_where_the_mode_says_so(planes, disk, engine_on):
    lower = {"write_mode": WriteMode.ON_EVICT}
    plane = planes(slots=200, stores=[disk()], lower=lower)
    engine = engine_on(plane)
    for number in range(60):
        engine.run(f"r{number}", chr(ord("0") + number))
        until(lambda: not plane.do(lambda: plane.cache.cascade.writing), "the writes")
        blocks(plane)
    assert len(plane.lowers[0]) > 10
    assert serve(engine, "again", "0")[1] == 4 * TOKENS
    assert blocks(plane) < 200


def test_a_block_is_written_when_it_is_used_again_where_the_mode_says_so(planes, disk, engine_on):
    plane = planes(stores=[disk()], lower={"write_mode": WriteMode.ON_REUSE})
    engine = engine_on(plane)
    engine.run("r")
    assert len(plane.lowers[0]) == 0
    engine.run("s", first_block=16)
    written(plane, 4)


def test_a_slow_tier_is_not_waited_for_where_computing_is_sooner(planes, disk, engine_on):
    stored_then_restarted(planes, disk, engine_on)
    plane = planes(name="third.sock", stores=[disk()])
    engine = engine_on(plane)
    serve(engine, "warm", "other")  # So that there is a session.

    def measured():
        plane.lowers[0].measures.speed.bandwidth = 10.0  # Bytes a second.
        plane.lowers[0].measures.speed._measured = plane.cache.clock()
        for each in plane.cache.roster.engines.values():
            each.prefill_rate = 1e6

    plane.do(measured)
    assert serve(engine, "s", first_block=32)[1] == 0
    assert plane.metrics.skipped_blocks.labels(Tier.DISK)._value.get() == 4
    assert plane.metrics.skipped_seconds.labels(Tier.DISK)._value.get() > 100


def test_writes_that_a_tier_cannot_keep_up_with_are_dropped(planes, disk, engine_on):
    gate = threading.Event()
    slow = SlowStore(disk(), write=gate.wait)
    plane = planes(stores=[slow], lower={"queue_bytes": 5 * 4096 * 2})
    engine = engine_on(plane)
    for number in range(4):
        engine.run(f"r{number}", chr(ord("a") + number))
    dropped = plane.metrics.writes.labels(Tier.DISK, "queue_full")._value.get
    until(lambda: blocks(plane) == 16, "all blocks in memory")
    assert dropped() == 11
    gate.set()
    written(plane, 5)


def test_only_an_engine_that_has_nothing_else_to_do_waits_for_an_answer(planes, disk, engine_on):
    stored_then_restarted(planes, disk, engine_on)
    gate = threading.Event()
    plane = planes(name="third.sock", stores=[SlowStore(disk(), read=gate.wait)])
    engine = engine_on(plane)
    waited = []
    answer = engine.scheduler_client.answer
    engine.scheduler_client.answer = lambda lease, patience=0.0: (
        waited.append(patience),
        answer(lease, patience),
    )[1]
    busy = Request("busy", "other", 3 * TOKENS, range(32, 48))
    requests = [Request(f"s{n}", blocks=range(16 * n, 16 * n + 16)) for n in range(2)]
    for request in requests:
        assert engine.admit(request) is None
    assert engine.admit(busy) == 0
    engine.step({busy: 3 * TOKENS})
    for _ in range(2):
        assert [engine.admit(request) for request in requests] == [None, None]
        engine.step({})
    assert [each > 0 for each in waited] == [False, False, True, False], "once a step, if idle"
    for request in (*requests, busy):
        engine.scheduler.finished(request, [])
    gate.set()
    engine.step({})


def test_a_look_that_takes_long_is_no_failure_and_lookups_are_answered_meanwhile(
    planes, disk, engine_on
):
    gate = threading.Event()
    gate.set()
    store = SlowStore(disk(), scan=gate.wait)
    plane = planes(stores=[store], lower={"breaker": BreakerOptions(failures=1, slow=20.0)})
    lower = plane.lowers[0]
    gate.clear()
    plane.do(lower._look)
    until(lambda: store.waiting["scan"], "the look")
    engine = engine_on(plane)
    engine.run("r")
    assert serve(engine, "s")[1] == 4 * TOKENS
    lower.options = dataclasses.replace(lower.options, stuck_seconds=0.0)
    until(lambda: plane.do(lower._pool.oldest_seconds) == 0.0, "the writes")
    plane.do(lower.tick)
    opened = plane.metrics.tier_faults.labels(Tier.DISK, Fault.TIMEOUT)._value.get
    assert opened() == 0
    gate.set()
    until(lambda: lower._looks.again != NEVER, "the end of the look")
    assert opened() == 0
