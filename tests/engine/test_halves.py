"""Both halves of the connector against a real data plane, with simulated requests and ranks.

What vLLM does between the hooks is played here step by step, so that faults can be put exactly
between two of them: a lost block, a rank that fails, a server that dies or comes back.
"""

from __future__ import annotations

import hashlib
import logging
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvtier.core import Role, SlotState, StoreOutcome, unpack_slot
from kvtier.engine.paging import HostPaging
from kvtier.engine.plan import WorkerReport
from kvtier.engine.scheduler import SchedulerSide, chains
from kvtier.engine.worker import WorkerSide
from kvtier.integrity import check_integrity
from support import MANIFEST, manifest, until

pytestmark = pytest.mark.vllm
TOKENS = MANIFEST.block_tokens
BLOCKS = 64
LOG = logging.getLogger("test.engine")


class Request:
    """The parts of vLLM's request that the connector reads. `blocks` are its pages."""

    def __init__(self, name, prompt, tokens, blocks):
        self.request_id = name
        self.num_tokens = tokens
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.pooling_params = self.lora_request = self.prompt_embeds = None
        self.skip_reading_prefix_cache = False
        self.status = SimpleNamespace(name="FINISHED_STOPPED")
        self.blocks = blocks
        parent, self.block_hashes = prompt.encode(), []
        for _ in range(tokens // TOKENS):
            parent = hashlib.sha256(parent).digest()
            self.block_hashes.append(parent)


class Engine:
    """A scheduler side and its ranks, over caches whose bytes say what was computed."""

    def __init__(self, plane, name="engine", ranks=1, **options):
        self.manifest = manifest(shards=ranks)
        self.scheduler_client = plane.client(engine=name, manifest=self.manifest, **options)
        self.scheduler = SchedulerSide(self.scheduler_client, TOKENS, ranks)
        self.caches, self.workers = [], []
        for rank in range(ranks):
            caches = [torch.zeros(BLOCKS, 2, TOKENS, 16) for _ in range(2)]
            client = plane.client(Role.WORKER, name, rank, self.manifest, **options)
            client.close()
            from kvtier.client import Client

            client = Client(client._options, client._hello, LOG)
            worker = WorkerSide(client, HostPaging(caches, BLOCKS), self.manifest, rank, LOG)
            worker.start()
            self.caches.append(caches)
            self.workers.append(worker)

    def close(self):
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def value(self, rank, key, layer):
        return float(int.from_bytes(key[:2], "big") + rank * 0.25 + layer * 0.5)

    def holds(self, rank, block, key):
        return all(
            bool((self.caches[rank][layer][block] == self.value(rank, key, layer)).all())
            for layer in range(2)
        )

    def admit(self, request, computed=0):
        """Do what vLLM does when it takes up a request. Returns the matched tokens."""
        matched = self.scheduler.matched_tokens(request, computed)
        self.scheduler.allocated(request, request.blocks, matched)
        request.num_computed_tokens = computed + matched
        return matched

    def plan(self, scheduled):
        """`scheduled`: request → tokens to compute in this step."""
        tables = {request.request_id: (request.blocks,) for request in scheduled}
        return self.scheduler.plan_step(
            SimpleNamespace(
                num_scheduled_tokens={r.request_id: n for r, n in scheduled.items()},
                kv_connector_block_state=SimpleNamespace(get_block_ids=tables.__getitem__),
            )
        )

    def compute(self, scheduled):
        """Write what the model would: each block that is complete after this step."""
        for request, tokens in scheduled.items():
            after = request.num_computed_tokens + tokens
            first = request.num_computed_tokens // TOKENS
            for position in range(first, min(after // TOKENS, len(request.block_hashes))):
                for rank, caches in enumerate(self.caches):
                    for layer in range(2):
                        caches[layer][request.blocks[position]] = self.value(
                            rank, request.block_hashes[position], layer
                        )
            request.num_computed_tokens = after

    def step(self, scheduled):
        """One engine step. Returns the blocks that no rank or not every rank could load."""
        plan = self.plan(scheduled)
        failed = set()
        for worker in self.workers:
            worker.load(plan)
            failed |= worker.take_failed_blocks()
        self.compute(scheduled)
        report = None
        for worker in self.workers:
            worker.store(plan)
            own = worker.take_report()
            report = own if report is None else report.aggregate(own)
        if report is not None:
            self.scheduler.reported(report)
        return failed

    def run(self, name, prompt="p", tokens=4 * TOKENS + 1, first_block=0, computed=0):
        """Serve a prompt in one step. Returns the request and its matched tokens."""
        request = Request(name, prompt, tokens, list(range(first_block, first_block + 16)))
        matched = self.admit(request, computed)
        self.step({request: tokens - request.num_computed_tokens})
        return request, matched


@pytest.fixture
def engines(plane):
    started = []

    def start(name="engine", ranks=1, **options):
        started.append(Engine(plane, name, ranks, **options))
        return started[-1]

    yield start
    for engine in started:
        engine.close()
    if not plane.thread.is_alive():
        return
    until(lambda: not plane.do(plane.cache.sessions), "the end of all sessions")
    slots = plane.do(plane.cache.tiers)[0].slots
    assert slots[SlotState.RESERVED] == slots[SlotState.LIMBO] == 0
    assert not any(
        block.leases
        for space in plane.cache.directory.namespaces.values()
        for block in space.blocks.values()
    )


def settled(plane):
    plane.do(check_integrity, plane.cache)
    return plane.do(plane.cache.tiers)[0].blocks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_one_engine_computed_another_loads(plane, engines, ranks):
    one, two = engines("one", ranks), engines("two", ranks)
    assert one.run("r")[1] == 0
    again, matched = two.run("s", first_block=20)
    assert matched == 4 * TOKENS
    for rank in range(ranks):
        for position, key in enumerate(again.block_hashes):
            assert two.holds(rank, again.blocks[position], key)
            assert not two.holds(rank, again.blocks[position], b"\0" * 32)


@pytest.mark.parametrize("tokens", range(3 * TOKENS - 1, 3 * TOKENS + 3))
def test_at_least_one_token_is_left_to_compute(plane, engines, tokens):
    one, two = engines("one"), engines("two")
    one.run("r", tokens=5 * TOKENS)
    _, matched = two.run("s", tokens=tokens)
    assert matched == (tokens - 1) // TOKENS * TOKENS
    assert matched < tokens


def test_device_and_host_hits_join(plane, engines):
    engine, other = engines("one"), engines("two")
    other.run("r", tokens=8 * TOKENS + 1)
    request = Request("s", "p", 8 * TOKENS + 1, list(range(16)))
    assert engine.admit(request, computed=3 * TOKENS) == 5 * TOKENS
    plan = engine.plan({request: 1})
    assert [block for block, _ in plan.loads] == list(range(3, 8))


def test_blocks_only_the_device_holds_are_stored_again(plane, engines):
    engine = engines()
    request, _ = engine.run("r", tokens=6 * TOKENS + 1)
    plane.do(plane.cache.reset, next(iter(plane.cache.directory.namespaces.values())))
    again = Request("s", "p", 8 * TOKENS, request.blocks)
    engine.admit(again, computed=6 * TOKENS)
    engine.step({again: 2 * TOKENS})
    until(lambda: settled(plane) == 8, "all blocks are back")


def test_chunks_and_decode_are_stored_as_they_fill(plane, engines):
    engine = engines()
    request = Request("r", "p", 5 * TOKENS, list(range(16)))
    engine.admit(request)
    for chunk in (TOKENS - 1, 1, 2 * TOKENS + 3, TOKENS - 3, TOKENS):
        engine.step({request: chunk})
        full = request.num_computed_tokens // TOKENS
        until(lambda full=full: settled(plane) == full, f"{full} blocks")


def test_a_step_that_fills_no_block_says_nothing(plane, engines):
    engine = engines()
    request = Request("r", "p", 3 * TOKENS, list(range(16)))
    engine.admit(request)
    engine.step({request: TOKENS})
    handled = plane.metrics.frame_seconds.labels("step")._sum
    until(lambda: settled(plane) == 1, "the commit")
    before = plane.do(handled.get)
    engine.step({request: 3})
    assert engine.plan({request: 3}).seq == 0
    assert plane.do(handled.get) == before


def test_one_prompt_in_many_requests_is_copied_once(plane, engines):
    engine = engines()
    requests = [Request(f"r{n}", "p", 4 * TOKENS, list(range(16))) for n in range(10)]
    for request in requests:
        engine.admit(request)
    plan = engine.plan(dict.fromkeys(requests, 4 * TOKENS))
    assert len(plan.stores) == 4


def test_a_failed_store_is_never_visible(plane, engines):
    """Whichever block fails, on whichever rank: a lookup misses it, and its slot is free again."""
    for failing in range(4):
        engine = engines(f"engine-{failing}", ranks=2)
        request = Request("r", f"prompt {failing}", 4 * TOKENS, list(range(16)))
        engine.admit(request)
        plan = engine.plan({request: 4 * TOKENS})
        engine.compute({request: 4 * TOKENS})
        bad = plan.stores[failing][1]
        reports = []
        for rank, worker in enumerate(engine.workers):
            if rank == 1:
                take = worker._shard
                worker._shard = lambda slot, take=take, bad=bad: None if slot == bad else take(slot)
            worker.store(plan)
            reports.append(worker.take_report())
        aborted = plane.do(plane.cache.traffic).stores[StoreOutcome.ABORTED]
        engine.scheduler.reported(reports[0])
        assert engines(f"early-{failing}", 2).run("q", f"prompt {failing}")[1] == 0, "one rank"
        engine.scheduler.reported(reports[1])
        probe = Request("probe", f"prompt {failing}", 4 * TOKENS + 1, list(range(16)))
        assert engine.scheduler.matched_tokens(probe, 0) <= 4 * TOKENS
        engine.scheduler.finished(probe, [])
        now = plane.do(plane.cache.traffic).stores[StoreOutcome.ABORTED]
        assert now == aborted + 1


def test_a_block_dropped_between_lookup_and_load_stays_readable(plane, engines):
    """A lease holds the bytes: neither eviction nor a reset can take them before the load."""
    one, two = engines("one"), engines("two")
    one.run("r")
    request = Request("s", "p", 4 * TOKENS + 1, list(range(20, 36)))
    assert two.admit(request) == 4 * TOKENS
    plane.do(plane.cache.reset, next(iter(plane.cache.directory.namespaces.values())))
    for number in range(30):
        one.run(f"other {number}", prompt=f"other {number}", first_block=40)
    assert two.step({request: 1}) == set()
    assert all(two.holds(0, 20 + n, key) for n, key in enumerate(request.block_hashes))


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_rank_that_cannot_read_a_block_reports_it(plane, engines, lost):
    """Any rank's failure counts for the block, so that all ranks compute from there on."""
    one, two = engines("one", ranks=2), engines("two", ranks=2)
    one.run("r")
    request = Request("s", "p", 4 * TOKENS + 1, list(range(20, 36)))
    assert two.admit(request) == 4 * TOKENS
    worker = two.workers[1]
    slot = two.scheduler._loads[0][1].slots[lost]
    take = worker._shard
    worker._shard = lambda asked: None if asked == slot else take(asked)
    assert two.step({request: 1}) == {20 + lost}


def test_slots_of_a_lost_session_are_refused_by_workers_that_know(plane, engines):
    """A server that restarted promised nothing of what the old one did."""
    engine = engines()
    engine.run("r")
    request = Request("s", "p", 4 * TOKENS + 1, list(range(20, 36)))
    assert engine.admit(request) == 4 * TOKENS
    plan = engine.plan({request: 1})
    plan.server = "another start"
    engine.workers[0].load(plan)
    assert engine.workers[0].take_failed_blocks() == {20, 21, 22, 23}
    plan.server, plan.session = engine.scheduler_client.meet().server, 0
    engine.workers[0].load(plan)
    assert engine.workers[0].take_failed_blocks() == {20, 21, 22, 23}
    engine.scheduler.reported(WorkerReport({plan.seq: 1}))


def test_a_reconnected_scheduler_commits_nothing_of_before(plane, engines):
    engine = engines(pause_first=0.01)
    request = Request("r", "p", 4 * TOKENS, list(range(16)))
    engine.admit(request)
    plan = engine.plan({request: 4 * TOKENS})
    assert len(plan.stores) == 4
    number = engine.scheduler_client.meet().session
    plane.do(
        lambda: [
            each.close("error") for each in list(plane.plane.open) if each._session.number == number
        ]
    )
    assert engine.scheduler_client.lookup("x", request.block_hashes[0], 0) is None
    until(lambda: engine.scheduler_client.meet() is not None, "the new session")
    [limbo] = plane.do(lambda: plane.cache.engines["engine"].limbo)
    assert {slot for _, slot in plan.stores} <= limbo.reserved
    engine.plan({})
    assert plane.do(lambda: plane.cache.engines["engine"].limbo), "a plan is still out"
    engine.workers[0].store(plan)
    engine.scheduler.reported(engine.workers[0].take_report())
    engine.plan({})
    until(lambda: not plane.do(lambda: plane.cache.engines["engine"].limbo), "settled")
    assert settled(plane) == 0
    assert engine.run("s")[1] == 0
    until(lambda: settled(plane) == 4, "the next request stores them")


def test_a_reset_lets_nothing_in_flight_become_visible(plane, engines):
    engine = engines()
    request = Request("r", "p", 4 * TOKENS, list(range(16)))
    engine.admit(request)
    plan = engine.plan({request: 4 * TOKENS})
    engine.workers[0].store(plan)
    assert engine.scheduler.reset()
    engine.scheduler.reported(engine.workers[0].take_report())
    assert engine.run("s")[1] == 0


def test_a_reset_without_a_server_is_not_claimed(plane, engines):
    engine = engines(pause_first=10.0)
    plane.stop()
    assert engine.scheduler.reset() is False


def test_the_last_block_of_an_answer_is_stored_after_its_request(plane, engines):
    """With asynchronous scheduling the last hashes are known only when the request is over."""
    engine = engines()
    request = Request("r", "p", 4 * TOKENS, list(range(16)))
    known, request.block_hashes = request.block_hashes, request.block_hashes[:2]
    engine.admit(request)
    engine.step({request: 4 * TOKENS})
    request.block_hashes = known
    engine.caches[0][0][2:4] = engine.value(0, known[2], 0)
    assert engine.scheduler.finished(request, request.blocks)
    plan = engine.plan({})
    assert plan.finished == ["r"]
    assert [block for block, _ in plan.stores] == [2, 3]
    engine.workers[0].store(plan)
    assert engine.workers[0].take_finished() == {"r"}
    engine.scheduler.reported(engine.workers[0].take_report())
    until(lambda: settled(plane) == 4, "the whole answer")


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_an_aborted_request_leaves_no_lease(plane, engines, status):
    one, two = engines("one"), engines("two")
    one.run("r")
    request = Request("s", "p", 4 * TOKENS + 1, list(range(20, 36)))
    assert two.scheduler.matched_tokens(request, 0) == 4 * TOKENS
    request.status = SimpleNamespace(name=status)
    assert two.scheduler.finished(request, []) is False
    two.plan({})

    def leased():
        return sum(session.leased_blocks for session in plane.do(plane.cache.sessions))

    until(lambda: leased() == 0, "the release")


@pytest.mark.parametrize("kind", ["pooling_params", "lora_request", "prompt_embeds"])
def test_what_block_hashes_do_not_tell_apart_is_bypassed(plane, engines, kind):
    engine = engines()
    engine.run("r")
    request = Request("s", "p", 4 * TOKENS + 1, list(range(16)))
    setattr(request, kind, object())
    assert engine.admit(request) == 0
    other = Request("t", "q", 4 * TOKENS + 1, list(range(16)))
    setattr(other, kind, object())
    engine.admit(other)
    assert engine.plan({other: 4 * TOKENS + 1}).stores == []


def test_a_full_tier_stores_the_heads_and_tries_the_rest_again(plane, engines):
    engine = engines()
    hog = plane.client(engine="hog")
    from kvtier import protocol as wire

    held = hog.step(wire.Step(0, need=62)).slots
    request = Request("r", "p", 6 * TOKENS, list(range(16)))
    engine.admit(request)
    plan = engine.plan({request: 6 * TOKENS})
    assert [block for block, _ in plan.stores] == [0, 1]
    hog.send(wire.Step(0, aborts=held))
    engine.compute({request: 6 * TOKENS})
    engine.workers[0].store(plan)
    engine.scheduler.reported(engine.workers[0].take_report())
    for _ in range(10):
        engine.step({request: 0})
    until(lambda: settled(plane) == 6, "the rest")
    hog.close()


def test_chains_join_consecutive_blocks_only():
    def candidate(key, parent):
        return SimpleNamespace(key=key, parent=parent)

    found = chains(
        [(candidate(b"a", b""), 1), (candidate(b"b", b"a"), 2), (candidate(b"d", b"c"), 3)]
    )
    assert [(c.parent, c.keys, c.slots) for c in found] == [(b"", b"ab", [1, 2]), (b"c", b"d", [3])]


def test_slots_of_all_ranks_lie_apart(plane, engines):
    engine = engines(ranks=3)
    engine.run("r")
    [space] = plane.cache.directory.namespaces.values()
    assert space.pool.slot_bytes == 3 * 4096
    assert all(unpack_slot(block.slot).index < 1 << 24 for block in space.blocks.values())
