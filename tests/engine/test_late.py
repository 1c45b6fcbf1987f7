"""Copies that go on beside the model: what must wait for what.

`LatePaging` carries everything out as late as it may, so a missing fence, or a block that is
given away too early, gives wrong bytes here.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm.distributed")

from late_paging import LatePaging
from simulated import TOKENS, Request, blocks, end_session, leased
from support import tokens, until

pytestmark = pytest.mark.vllm
POLLS = 6


@pytest.fixture
def late(engines):
    def start(name="late", ranks=1, polls=POLLS, **options):
        return engines(name, ranks, page=lambda inner: LatePaging(inner, polls), **options)

    return start


def finish(engine):
    """Step without requests until nothing is under way, as vLLM does while `busy` says so."""
    received = []
    for _ in range(10 * POLLS):
        if not engine.scheduler.busy:
            break
        received += engine.carry_out(engine.plan({}), {})[1]
    assert not engine.scheduler.busy
    return [each for group in received for each in group]


def test_stores_are_committed_when_they_are_over_even_without_requests(plane, late):
    engine = late()
    request = Request("r", tokens=4 * TOKENS)
    engine.admit(request)
    engine.step({request: 4 * TOKENS})
    assert blocks(plane) == 0
    assert engine.scheduler.busy
    finish(engine)
    until(lambda: blocks(plane) == 4, "the commits")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_is_reported_when_its_bytes_are_there(plane, engines, late, ranks):
    engines("one", ranks).run("r")
    two = late("two", ranks)
    request = Request("s", blocks=range(20, 36))
    assert two.admit(request) == 4 * TOKENS
    _, received = two.carry_out(two.plan({}), {})
    assert received == [set()] * ranks
    assert leased(plane) == 4
    assert finish(two) == ["s"] * ranks
    for rank in range(ranks):
        assert all(two.holds(rank, 20 + at, key) for at, key in enumerate(request.block_hashes))
    until(lambda: leased(plane) == 0, "the end of the lease")


def test_a_block_is_stored_before_it_is_written_again(plane, engines, late):
    """A request ended, and its blocks went to the next one while they were being stored."""
    engine = late()
    first = Request("r", "p", tokens=4 * TOKENS, blocks=range(16))
    engine.admit(first)
    engine.step({first: 4 * TOKENS})
    assert engine.scheduler.finished(first, first.blocks) == (False, None)
    second = Request("s", "q", tokens=4 * TOKENS, blocks=range(2, 18))
    engine.admit(second)
    engine.step({second: 4 * TOKENS})
    finish(engine)
    until(lambda: blocks(plane) == 8, "all commits")
    check = engines("check")
    for prompt in "pq":
        again, matched = check.run(f"check {prompt}", prompt, first_block=30)
        assert matched == 4 * TOKENS
        assert all(check.holds(0, 30 + at, key) for at, key in enumerate(again.block_hashes))


def test_without_the_fence_the_bytes_would_be_wrong(plane, engines, late):
    """So that the test above means something."""
    engine = late()
    first = Request("r", "p", tokens=4 * TOKENS, blocks=range(16))
    engine.admit(first)
    engine.step({first: 4 * TOKENS})
    second = Request("s", "q", tokens=4 * TOKENS, blocks=range(2, 18))
    engine.admit(second)
    plan = engine.plan({second: 4 * TOKENS})
    assert plan.fences
    plan.fences = []
    engine.carry_out(plan, {second: 4 * TOKENS})
    finish(engine)
    until(lambda: blocks(plane) == 8, "all commits")
    check = engines("check")
    again, _ = check.run("check", "p", first_block=30)
    assert not all(check.holds(0, 30 + at, key) for at, key in enumerate(again.block_hashes))


def test_a_block_is_stored_before_something_else_is_loaded_into_it(plane, engines, late):
    engines("one").run("r", "q")
    engine = late()
    first = Request("r", "p", tokens=4 * TOKENS, blocks=range(16))
    engine.admit(first)
    engine.step({first: 4 * TOKENS})
    second = Request("s", "q", blocks=range(16))
    assert engine.admit(second) == 4 * TOKENS
    engine.carry_out(engine.plan({}), {})
    finish(engine)
    until(lambda: blocks(plane) == 8, "all commits")
    check = engines("check")
    again, _ = check.run("check", "p", first_block=30)
    assert all(check.holds(0, 30 + at, key) for at, key in enumerate(again.block_hashes))


def test_a_step_that_writes_no_block_being_stored_has_no_fence(plane, late):
    engine = late()
    first = Request("r", "p", tokens=4 * TOKENS, blocks=range(16))
    engine.admit(first)
    engine.step({first: 4 * TOKENS})
    second = Request("s", "q", tokens=4 * TOKENS, blocks=range(16, 32))
    engine.admit(second)
    assert engine.plan({second: 4 * TOKENS}).fences == []


def test_a_request_aborted_during_its_load_keeps_its_lease_until_the_load_is_over(
    plane, engines, late
):
    engines("one").run("r")
    two = late("two")
    request = Request("s", blocks=range(20, 36))
    two.admit(request)
    two.carry_out(two.plan({}), {})
    request.status = SimpleNamespace(name="FINISHED_ABORTED")
    assert two.scheduler.finished(request, request.blocks) == (False, None)
    two.carry_out(two.plan({}), {})
    assert leased(plane) == 4
    assert finish(two) == ["s"], "vLLM frees the blocks only then"
    until(lambda: leased(plane) == 0, "the end of the lease")


def test_followers_of_a_load_wait_for_its_end_and_no_longer(plane, engines, late):
    engines("one").run("r")
    two = late("two")
    first = Request("s", blocks=range(20, 36))
    two.admit(first)
    two.carry_out(two.plan({}), {})
    follower = Request("t", blocks=range(36, 52))
    assert two.admit(follower) is None
    finish(two)
    assert two.admit(follower, computed=4 * TOKENS) == 0


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_lost_block_of_a_late_load_is_reported_not_later_than_its_end(plane, engines, late, lost):
    engines("one", 2).run("r")
    two = late("two", 2)
    request = Request("s", blocks=range(20, 36))
    two.admit(request)
    slot = two.scheduler._loads[0].slots[lost]
    take = two.workers[1]._slabs.shard
    two.workers[1]._slabs.shard = lambda asked: None if asked == slot else take(asked)
    failed, received = two.carry_out(two.plan({}), {})
    assert failed == {20 + lost}
    assert received == [set(), set()]
    finish(two)
    assert two.scheduler._requests["s"].stored == lost


def test_a_request_that_comes_back_after_its_load_is_counted_once(plane, engines, late):
    engines("one").run("r")
    two = late("two")
    before = tokens(plane.do(plane.readings.traffic))
    request = Request("s", blocks=range(20, 36))
    two.admit(request)
    two.carry_out(two.plan({}), {})
    finish(two)
    two.scheduler.allocated(request, request.blocks, 0)
    two.step({request: 1})
    finish(two)

    def hits():
        return tokens(plane.do(plane.readings.traffic))["host"][1] - before["host"][1]

    until(lambda: hits() == 4 * TOKENS, "the count")
    assert tokens(plane.do(plane.readings.traffic))["device"][1] == before["device"][1]


def test_sealed_blocks_are_sealed_when_their_bytes_are_there(plane, engines, late):
    fields = {"checksum": "xxh3_128"}
    engine = late(fields=fields)
    request = Request("r", tokens=4 * TOKENS)
    engine.admit(request)
    engine.step({request: 4 * TOKENS})
    finish(engine)
    until(lambda: blocks(plane) == 4, "the commits")
    check = engines("check", fields=fields)
    again, matched = check.run("s", first_block=30)
    assert matched == 4 * TOKENS
    assert all(check.holds(0, 30 + at, key) for at, key in enumerate(again.block_hashes))


def test_a_lost_session_frees_nothing_that_is_still_being_copied(plane, late):
    engine = late(pause_first=0.01)
    request = Request("r", tokens=4 * TOKENS)
    engine.admit(request)
    engine.step({request: 4 * TOKENS})
    end_session(plane, engine.scheduler_client)
    assert engine.scheduler_client.lookup(request.block_hashes[0], 0) is None
    until(lambda: engine.scheduler_client.meet() is not None, "the new session")
    engine.plan({})
    assert plane.do(lambda: plane.cache.roster.engines["late"].limbo), "a store is still under way"
    finish(engine)
    engine.plan({})
    until(lambda: not plane.do(lambda: plane.cache.roster.engines["late"].limbo), "settled")
    assert blocks(plane) == 0


def test_copies_are_over_before_a_worker_drops_its_connection(plane, late):
    """With its last worker gone, the engine's slots are given to others."""
    engine = late()
    request = Request("r", tokens=4 * TOKENS)
    engine.admit(request)
    engine.step({request: 4 * TOKENS})
    [worker] = engine.workers
    [job] = worker._stores.values()
    client = worker._client
    client._fail(client._link, OSError("cut"))
    assert job.transfer._carry_out is None, "carried out"
    finish(engine)
