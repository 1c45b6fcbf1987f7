"""Loads that are shared, fail, or turn out to be something else than what was stored."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm.distributed")

from kvtier.core import StoreOutcome
from simulated import TOKENS, Request, blocks, end_session, leased, lose
from support import tokens, until

pytestmark = pytest.mark.vllm


def test_a_lookup_asked_again_keeps_its_lease_when_the_first_one_ends(plane, engines):
    """The late release of the first lookup must not open the second one's slots to eviction."""
    one, two = engines("one"), engines("two")
    one.run("r")
    request = Request("s", blocks=range(20, 36))
    assert two.scheduler.matched_tokens(request, 0) == 4 * TOKENS
    assert two.scheduler.matched_tokens(request, TOKENS) == 3 * TOKENS
    two.scheduler.allocated(request, request.blocks, 3 * TOKENS)
    plan = two.plan({request: 1})
    until(lambda: leased(plane) == 3, "the end of the first lease alone")
    for number in range(30):
        one.run(f"other {number}", f"other {number}", first_block=40)
    request.num_computed_tokens = 4 * TOKENS
    assert two.carry_out(plan, {request: 1})[0] == set()
    assert all(two.holds(0, 21 + at, key) for at, key in enumerate(request.block_hashes[1:]))


def test_requests_with_a_prefix_that_is_being_loaded_wait_for_it(plane, engines):
    one, two = engines("one"), engines("two")
    one.run("r")
    first, second = Request("s", blocks=range(20, 36)), Request("t", blocks=range(36, 52))
    other = Request("u", "q", blocks=range(40, 56))
    assert two.admit(first) == 4 * TOKENS
    assert two.admit(second) is None
    assert two.scheduler.matched_tokens(second, 2 * TOKENS) is None, "half of it is not there yet"
    assert two.admit(other) == 0, "another prefix waits for nothing"
    two.step({first: 1, other: 1})
    assert two.admit(second, computed=4 * TOKENS) == 0, "the device holds it now"


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_nothing_computed_on_top_of_a_failed_load_is_stored(plane, engines, lost):
    one, two = engines("one"), engines("two")
    one.run("r")
    request = Request("s", tokens=8 * TOKENS, blocks=range(20, 36))
    assert two.admit(request) == 4 * TOKENS
    lose(two.workers[0], two.scheduler._loads[0].slots[lost])
    plan = two.plan({request: 4 * TOKENS})
    assert len(plan.stores) == 4, "planned before anybody knows"
    failed, _ = two.carry_out(plan, {request: 4 * TOKENS})
    assert failed == {20 + lost}
    stores = plane.do(plane.readings.stores)
    until(lambda: plane.do(plane.readings.stores)[StoreOutcome.ABORTED] == 4, "the aborts")
    assert stores[StoreOutcome.COMMITTED] == 4, "those of the first engine"
    request.num_computed_tokens = (lost) * TOKENS
    two.step({request: (8 - lost) * TOKENS})
    until(lambda: blocks(plane) == 8, "what was computed again")


def test_nothing_becomes_visible_that_another_connectors_failed_load_may_lie_under(plane, engines):
    engine = engines()
    request = Request("r", tokens=6 * TOKENS)
    engine.admit(request)
    plan = engine.plan({request: 6 * TOKENS})
    engine.workers[0].store(plan)
    engine.scheduler.distrust()
    engine.collect()
    until(lambda: plane.do(plane.readings.stores)[StoreOutcome.ABORTED] == 6, "the aborts")
    assert blocks(plane) == 0


def test_vllm_forgets_what_it_took_for_loaded(plane, engines):
    """Its prefix cache would serve the lost block, and what follows, to the next request."""
    one, two = engines("one"), engines("two")
    one.run("r")
    request = Request("s", tokens=6 * TOKENS, blocks=range(20, 26))
    two.admit(request)
    lose(two.workers[0], two.scheduler._loads[0].slots[2])
    two.step({request: 2 * TOKENS})
    assert two.manager.evicted == set(range(22, 26))


def test_a_load_that_failed_is_not_tried_twice(plane, engines):
    one, two = engines("one"), engines("two")
    one.run("r")
    request = Request("s", blocks=range(20, 36))
    two.admit(request)
    lose(two.workers[0], two.scheduler._loads[0].slots[0])
    two.step({request: 1})
    request.num_computed_tokens = 0
    assert two.scheduler.matched_tokens(request, 0) == 0
    assert two.scheduler.matched_tokens(Request("t"), 0) == 4 * TOKENS, "others may"


SEALED = {"checksum": "xxh3_128"}


@pytest.mark.parametrize("at", [0, 1, 3])
def test_changed_bytes_are_not_loaded_and_the_block_is_dropped(plane, engines, at):
    one, two = engines("one", fields=SEALED), engines("two", fields=SEALED)
    one.run("r")
    request = Request("s", blocks=range(20, 36))
    assert two.admit(request) == 4 * TOKENS
    slot = two.scheduler._loads[0].slots[at]
    two.workers[0]._slabs.shard(slot)[7] ^= 1
    assert two.step({request: 1}) == {20 + at}
    assert two.workers[0].take_stats().data["corrupt_blocks"] == 1
    until(lambda: blocks(plane) == 3, "the drop")
    other = Request("t", blocks=range(20, 36))
    assert two.admit(other) == at * TOKENS
    assert two.step({other: 1}) == set()


def test_another_blocks_bytes_are_not_loaded(plane, engines):
    """A sound shard under the wrong key: its seal is bound to its own key."""
    one, two = engines("one", fields=SEALED), engines("two", fields=SEALED)
    one.run("r")
    request = Request("s", blocks=range(20, 36))
    two.admit(request)
    slots = two.scheduler._loads[0].slots
    shard = two.workers[0]._slabs.shard
    shard(slots[1]).copy_(shard(slots[2]).clone())
    assert two.step({request: 1}) == {21}


def test_a_sealed_block_is_loaded_whole(plane, engines):
    one, two = engines("one", 2, fields=SEALED), engines("two", 2, fields=SEALED)
    one.run("r")
    request, matched = two.run("s", first_block=20)
    assert matched == 4 * TOKENS
    for rank in range(2):
        assert all(two.holds(rank, 20 + at, key) for at, key in enumerate(request.block_hashes))


def test_engines_that_verify_share_among_themselves_only(plane, engines):
    engines("one", fields=SEALED).run("r")
    assert engines("two").run("s")[1] == 0


@pytest.mark.parametrize("replicas", [2, 4])
def test_equal_shards_are_stored_once_and_loaded_by_all(plane, engines, replicas):
    one, two = engines("one", 4, replicas=replicas), engines("two", 4, replicas=replicas)
    one.run("r")
    stored = [worker.take_stats() for worker in one.workers]
    assert sum(each.data["stored_blocks"] for each in stored if each) == 4 * 4 // replicas
    assert sum(1 for each in stored if each) > 1, "the ranks share the work"
    request, matched = two.run("s", first_block=20)
    assert matched == 4 * TOKENS
    for rank in range(4):
        assert all(two.holds(rank, 20 + at, key) for at, key in enumerate(request.block_hashes))
    [space] = plane.cache.directory.namespaces.values()
    assert space.manifest.shards == 4 // replicas


def test_a_reset_without_a_server_is_made_up_for_before_anything_hits(planes, engines, plane):
    engine = engines(pause_first=0.01)
    engine.run("r")
    until(lambda: blocks(plane) == 4, "the commits")
    client, reset = engine.scheduler_client, engine.scheduler_client.reset
    client.reset = lambda: None
    assert engine.scheduler.reset() is True
    client.reset = reset
    end_session(plane, client)
    until(lambda: client.lookup(b"k" * 32, 0) is None, "the loss of the session")
    assert engine.scheduler.matched_tokens(Request("s"), 0) == 0
    until(lambda: client.meet() is not None, "the new session")
    assert engine.scheduler.matched_tokens(Request("t"), 0) == 0
    assert blocks(plane) == 0


def test_a_reset_takes_back_what_was_matched_before_it(plane, engines):
    one, two = engines("one"), engines("two")
    one.run("r")
    request = Request("s", blocks=range(20, 36))
    assert two.scheduler.matched_tokens(request, 0) == 4 * TOKENS
    assert two.scheduler.reset() is True
    assert two.scheduler.matched_tokens(request, 0) == 0


def controlled(name, prompt="p", **controls):
    request = Request(name, prompt, tokens=6 * TOKENS, blocks=range(16))
    request.kv_transfer_params = {"kvtier": controls}
    return request


def test_a_request_may_decline_to_be_stored(plane, engines):
    engine = engines()
    request = controlled("r", store=False)
    engine.admit(request)
    assert engine.plan({request: 6 * TOKENS}).stores == []


def test_a_request_may_decline_to_load(plane, engines):
    engine = engines()
    engine.run("r", tokens=6 * TOKENS)
    assert engine.admit(controlled("s", load=False)) == 0


def test_a_request_may_limit_what_is_cached_of_it(plane, engines):
    engine = engines()
    request = controlled("r", limit_tokens=3 * TOKENS - 1)
    engine.admit(request)
    assert [move.block for move in engine.plan({request: 6 * TOKENS}).stores] == [0, 1]
    whole = engines("whole")
    whole.run("s", "q", tokens=6 * TOKENS)
    assert engine.admit(controlled("t", "q", limit_tokens=2 * TOKENS)) == 2 * TOKENS


def test_unknown_controls_are_refused_to_the_user_and_go_past_the_cache(plane, engines):
    engine = engines()
    engine.run("r", tokens=6 * TOKENS)
    request = controlled("s", stor=False)
    assert engine.admit(request) == 0
    assert engine.plan({request: 6 * TOKENS}).stores == []
    waits, answer = engine.scheduler.finished(request, request.blocks)
    assert not waits
    assert "stor" in answer["kvtier"]["error"]
    assert "store" in answer["kvtier"]["error"]
    assert engine.scheduler.take_stats().data == {"bypassed_requests:controls": 1}


def test_requests_are_counted_for_their_tenants(plane, engines):
    engine = engines()
    for name in ("r", "s"):
        request = controlled(name, tenant="a")
        engine.admit(request)
        engine.step({request: 6 * TOKENS})

    def counted():
        readings = {each.tenant: each for each in plane.do(plane.readings.tenants)}
        a = readings.get("a")
        of_a = a and tokens(a.traffic)
        return a and (of_a["device"][0], of_a["host"][1], a.stored_blocks)

    until(lambda: counted() == (10 * TOKENS, 5 * TOKENS, 6), "the counts")
