"""Both halves of the connector against a real data plane: what is copied, committed and leased."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm.distributed")

from kvtier import protocol as wire
from kvtier.core import StoreOutcome, unpack_slot
from kvtier.engine.controls import Controls
from kvtier.engine.inflight import Candidate, chains
from kvtier.engine.plan import Promise, WorkerReport
from kvtier.engine.requests import Tracked
from kvtier.salts import Salts
from simulated import TOKENS, Engine, Request, blocks, end_session, leased, lose
from support import until

pytestmark = pytest.mark.vllm


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
    assert [move.block for load in plan.loads for move in load.moves] == list(range(3, 8))


def test_blocks_only_the_device_holds_are_stored_again(plane, engines):
    engine = engines()
    request, _ = engine.run("r", tokens=6 * TOKENS + 1)
    plane.do(plane.cache.reset, next(iter(plane.cache.directory.namespaces.values())))
    again = Request("s", "p", 8 * TOKENS, request.blocks)
    engine.admit(again, computed=6 * TOKENS)
    engine.step({again: 2 * TOKENS})
    until(lambda: blocks(plane) == 8, "all blocks are back")


def test_chunks_and_decode_are_stored_as_they_fill(plane, engines):
    engine = engines()
    request = Request("r", "p", 5 * TOKENS, list(range(16)))
    engine.admit(request)
    for chunk in (TOKENS - 1, 1, 2 * TOKENS + 3, TOKENS - 3, TOKENS):
        engine.step({request: chunk})
        full = request.num_computed_tokens // TOKENS
        until(lambda full=full: blocks(plane) == full, f"{full} blocks")


def test_a_step_that_fills_no_block_says_nothing(plane, engines):
    engine = engines()
    request = Request("r", "p", 3 * TOKENS, list(range(16)))
    engine.admit(request)
    engine.step({request: TOKENS})
    handled = plane.metrics.frame_seconds.labels("step")._sum
    until(lambda: blocks(plane) == 1, "the commit")
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
        bad = plan.stores[failing].slot
        reports = []
        for rank, worker in enumerate(engine.workers):
            if rank == 1:
                lose(worker, bad)
            worker.store(plan)
            reports.append(worker.take_report())
        aborted = plane.do(plane.readings.stores)[StoreOutcome.ABORTED]
        engine.scheduler.reported(reports[0])
        assert engines(f"early-{failing}", 2).run("q", f"prompt {failing}")[1] == 0, "one rank"
        engine.scheduler.reported(reports[1])
        probe = Request("probe", f"prompt {failing}", 4 * TOKENS + 1, list(range(16)))
        assert engine.scheduler.matched_tokens(probe, 0) <= 4 * TOKENS
        engine.scheduler.finished(probe, [])
        now = plane.do(plane.readings.stores)[StoreOutcome.ABORTED]
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
    lose(two.workers[1], two.scheduler._loads[0].slots[lost])
    assert two.step({request: 1}) == {20 + lost}


def test_slots_of_a_lost_session_are_refused_by_workers_that_know(plane, engines):
    """A server that restarted promised nothing of what the old one did."""
    engine = engines()
    engine.run("r")
    request = Request("s", "p", 4 * TOKENS + 1, list(range(20, 36)))
    assert engine.admit(request) == 4 * TOKENS
    plan = engine.plan({request: 1})
    [load] = plan.loads
    load.by = Promise("another start", load.by.session)
    engine.workers[0].load(plan)
    assert engine.workers[0].take_failed_blocks() == {20, 21, 22, 23}
    load.by = Promise(engine.scheduler_client.meet().server, 0)
    engine.workers[0].load(plan)
    assert engine.workers[0].take_failed_blocks() == {20, 21, 22, 23}
    engine.scheduler.reported(WorkerReport(loaded={plan.seq: 1}))


def test_a_reconnected_scheduler_commits_nothing_of_before(plane, engines):
    engine = engines(pause_first=0.01)
    request = Request("r", "p", 4 * TOKENS, list(range(16)))
    engine.admit(request)
    plan = engine.plan({request: 4 * TOKENS})
    assert len(plan.stores) == 4
    end_session(plane, engine.scheduler_client)
    assert engine.scheduler_client.lookup(request.block_hashes[0], 0) is None
    until(lambda: engine.scheduler_client.meet() is not None, "the new session")
    [limbo] = plane.do(lambda: plane.cache.roster.engines["engine"].limbo)
    assert {move.slot for move in plan.stores} <= limbo.reserved
    engine.plan({})
    assert plane.do(lambda: plane.cache.roster.engines["engine"].limbo), "a plan is still out"
    engine.workers[0].store(plan)
    engine.scheduler.reported(engine.workers[0].take_report())
    engine.plan({})
    until(lambda: not plane.do(lambda: plane.cache.roster.engines["engine"].limbo), "settled")
    assert blocks(plane) == 0
    assert engine.run("s")[1] == 0
    until(lambda: blocks(plane) == 4, "the next request stores them")


def test_a_reset_lets_nothing_in_flight_become_visible(plane, engines):
    engine = engines()
    request = Request("r", "p", 4 * TOKENS, list(range(16)))
    engine.admit(request)
    plan = engine.plan({request: 4 * TOKENS})
    engine.workers[0].store(plan)
    assert engine.scheduler.reset()
    engine.scheduler.reported(engine.workers[0].take_report())
    assert engine.run("s")[1] == 0


def test_the_last_block_of_an_answer_is_stored_after_its_request(plane, engines):
    """With asynchronous scheduling the last hashes are known only when the request is over."""
    engine = engines()
    request = Request("r", "p", 4 * TOKENS, list(range(16)))
    known, request.block_hashes = request.block_hashes, request.block_hashes[:2]
    engine.admit(request)
    engine.step({request: 4 * TOKENS})
    request.block_hashes = known
    engine.caches[0][0][2:4] = engine.value(0, known[2], 0)
    assert engine.scheduler.finished(request, request.blocks) == (True, None)
    plan = engine.plan({})
    assert plan.finished == ["r"]
    assert [move.block for move in plan.stores] == [2, 3]
    engine.workers[0].store(plan)
    assert engine.workers[0].take_finished() == ({"r"}, set())
    engine.scheduler.reported(engine.workers[0].take_report())
    until(lambda: blocks(plane) == 4, "the whole answer")


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_an_aborted_request_leaves_no_lease(plane, engines, status):
    one, two = engines("one"), engines("two")
    one.run("r")
    request = Request("s", "p", 4 * TOKENS + 1, list(range(20, 36)))
    assert two.scheduler.matched_tokens(request, 0) == 4 * TOKENS
    request.status = SimpleNamespace(name=status)
    assert two.scheduler.finished(request, []) == (False, None)
    two.plan({})

    until(lambda: leased(plane) == 0, "the release")


@pytest.mark.parametrize("kind", ["pooling_params", "lora_request"])
def test_what_block_hashes_do_not_tell_apart_is_bypassed_and_counted(plane, engines, kind):
    engine = engines()
    engine.run("r")
    request = Request("s", "p")
    setattr(request, kind, object())
    assert engine.admit(request) == 0
    other = Request("t", "q")
    setattr(other, kind, object())
    engine.admit(other)
    assert engine.plan({other: 4 * TOKENS + 1}).stores == []
    reason = kind.split("_")[0].replace("params", "")
    assert engine.scheduler.take_stats().data == {f"bypassed_requests:{reason}": 2}


def test_a_refused_request_costs_no_other_its_stores(plane, engines):
    """The next one is asked for, too: there may be room by then."""
    engine = engines()
    hog = plane.client(engine="hog")
    held = hog.step(wire.Step(0, need=62)).slots
    refused = Request("r", "p", 6 * TOKENS, list(range(16)))
    engine.admit(refused)
    engine.step({refused: 6 * TOKENS})
    hog.send(wire.Step(0, aborts=held))
    hog.close()
    other = Request("s", "q", 40 * TOKENS, list(range(20, 60)))
    engine.admit(other)
    engine.step({other: 40 * TOKENS})
    until(lambda: blocks(plane) >= 40, "all of the second prompt")


def test_a_prompt_larger_than_the_tier_keeps_its_head(plane, engines):
    """Its rest would evict what it continues, and be of no use without."""
    engine = engines()
    hog = plane.client(engine="hog")
    held = hog.step(wire.Step(0, need=50)).slots
    request = Request("r", "p", 40 * TOKENS, list(range(40)))
    engine.admit(request)
    engine.step({request: 40 * TOKENS})
    for _ in range(30):
        engine.step({request: 0})
    until(lambda: blocks(plane) >= 10, "what fits, less what is kept free")
    again = Request("s", "p", 40 * TOKENS)
    assert engine.scheduler.matched_tokens(again, 0) >= 10 * TOKENS
    engine.scheduler.finished(again, [])
    hog.send(wire.Step(0, aborts=held))
    hog.close()


def test_a_restarted_server_is_noticed_by_workers_that_ask_it_nothing(planes, engines):
    plane = planes(name="again.sock")

    engine = Engine(plane, "noticing", pause_first=0.01)
    engine.run("r")
    plane.stop()
    engine.run("s")
    again = planes(name="again.sock")

    def served():
        engine.run(f"t {served.count}")
        served.count += 1
        return again.do(again.readings.tiers)[0].blocks == 4

    served.count = 0
    until(served, "a store on the new server")
    engine.close()


def test_a_full_tier_stores_the_heads_and_leaves_the_rest_to_the_next_request(plane, engines):
    engine = engines()
    hog = plane.client(engine="hog")
    held = hog.step(wire.Step(0, need=62)).slots
    request = Request("r", "p", 6 * TOKENS, list(range(16)))
    engine.admit(request)
    plan = engine.plan({request: 6 * TOKENS})
    assert [move.block for move in plan.stores] == [0, 1]
    hog.send(wire.Step(0, aborts=held))
    engine.compute({request: 6 * TOKENS})
    engine.workers[0].store(plan)
    engine.scheduler.reported(engine.workers[0].take_report())
    for _ in range(10):
        engine.step({request: 0})
    assert blocks(plane) == 2
    for number in range(10):
        engine.run(f"s {number}", "p", 6 * TOKENS, first_block=20)
    until(lambda: blocks(plane) == 6, "the rest")
    hog.close()


def test_chains_join_consecutive_blocks_of_one_tenant():
    def candidate(key, parent, tenant=""):
        request = Request("r")
        tracked = Tracked(request, Controls(tenant=tenant), None, "", None)
        return Candidate(tracked, 0, key, parent, 0)

    found = chains(
        [
            (candidate(b"a", b""), 1),
            (candidate(b"b", b"a"), 2),
            (candidate(b"d", b"c"), 3),
            (candidate(b"e", b"d", "x"), 4),
        ],
        b"",
    )
    assert [(c.parent, c.keys, c.slots, c.tenant) for c in found] == [
        (b"", b"ab", [1, 2], ""),
        (b"c", b"d", [3], ""),
        (b"d", b"e", [4], "x"),
    ]


def test_slots_of_all_ranks_lie_apart(plane, engines):
    engine = engines(ranks=3)
    engine.run("r")
    [space] = plane.cache.directory.namespaces.values()
    assert space.pool.slot_bytes == 3 * 4096
    assert all(unpack_slot(block.slot).index < 1 << 24 for block in space.blocks.values())


def heard(monkeypatch):
    """Return a list that gets each frame which the server hears."""
    frames = []
    decode = wire.decode_request

    def listen(body):
        frames.append(bytes(body))
        return decode(body)

    monkeypatch.setattr(wire, "decode_request", listen)
    return frames


def test_a_salt_says_whose_a_request_is_and_never_leaves_the_engine(plane, engines, monkeypatch):
    frames = heard(monkeypatch)
    key = bytes(range(32))
    digest = wire.salted(key, "pepper").removeprefix(wire.SALT_MARK)
    plane.plane.salts = Salts(key, {digest: "acme"})
    engine = engines()
    for number, (salt, named) in enumerate(
        [("pepper", None), ("paprika", None), ("pepper", "globex"), (None, None)]
    ):
        request = Request(f"r{number}", "abcd"[number])
        request.cache_salt = salt
        if named is not None:
            request.kv_transfer_params = {"kvtier": {"tenant": named}}
        engine.serve(request)
    until(lambda: blocks(plane) == 16, "the stores")
    of = {one.tenant: one for one in plane.do(plane.readings.tenants)}
    assert {name: one.stored_blocks for name, one in of.items()} == {"": 8, "acme": 4, "globex": 4}
    assert {name: one.lookups for name, one in of.items()} == {"": 2, "acme": 1, "globex": 1}
    assert of["acme"].traffic[0].tokens_asked == 4 * TOKENS
    assert any(digest.encode() in frame for frame in frames)
    assert not any(salt in frame for salt in (b"pepper", b"paprika") for frame in frames)


def test_a_server_that_knows_no_salts_is_told_of_none(plane, engines, monkeypatch):
    frames = heard(monkeypatch)
    engine = engines()
    request = Request("r")
    request.cache_salt = "pepper"
    engine.serve(request)
    until(lambda: blocks(plane) == 4, "the stores")
    assert not any(wire.SALT_MARK.encode() + b"0" in frame for frame in frames)
    assert [one.tenant for one in plane.do(plane.readings.tenants)] == [""]


def test_a_full_tier_makes_room_for_a_tenants_store_with_the_tenants_own(plane, engines):
    """The step says whose the slots are that it wants, before anything is copied into them."""
    plane.do(plane.cache.accounts.limit, {"noisy": {"host_hard": 12 * 4096}})
    quiet = engines("quiet")
    quiet.run("q", "q", 4 * TOKENS + 1)
    noisy = engines("noisy")
    for number in range(40):
        request = Request(f"n{number}", chr(0x4E00 + number), 4 * TOKENS + 1)
        request.kv_transfer_params = {"kvtier": {"tenant": "noisy"}}
        noisy.serve(request)
    until(lambda: plane.do(lambda: plane.cache.accounts.of("noisy").used["host"]) > 0, "stores")
    assert plane.do(lambda: plane.cache.accounts.of("noisy").used["host"]) <= 12 * 4096
    assert quiet.run("again", "q", 4 * TOKENS + 1, first_block=20)[1] == 4 * TOKENS
