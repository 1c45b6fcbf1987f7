"""What comes back from the host tier gives the answers of an uncached run, token for token.

Each engine here is real vLLM on the tiny model, whose answers depend on every block of the prompt;
the corruption test shows that these comparisons can fail.
"""

from __future__ import annotations

import pytest
from harness import BLOCK, prompt
from support import until

WORKER = """
from vllm.distributed.kv_transfer import get_kv_transfer_group
side = get_kv_transfer_group()._half.side
slabs = side._slabs
if not hasattr(slabs, "whole"):
    slabs.whole = slabs.shard
slabs.shard = slabs.whole
"""
CORRUPT_NTH_LOAD = """
import torch
plain_load = type(side).load
def load(plan):
    moves = [move for each in plan.loads for move in each.moves]
    if len(moves) > {at}:
        slabs.shard(moves[{at}].slot).view(torch.float32).neg_()
    plain_load(side, plan)
side.load = load
result = None
"""
WHOLE_LOADS = "side.__dict__.pop('load', None); result = None"
LOSE_NTH_LOAD = """
plain_load = type(side).load
side.lost = 0
def load(plan):
    moves = [move for each in plan.loads for move in each.moves]
    if moves:
        bad = moves[min({at}, len(moves) - 1)].slot
        slabs.shard = lambda slot: None if slot == bad else slabs.whole(slot)
        side.lost += 1
    plain_load(side, plan)
    slabs.shard = slabs.whole
side.load = load
result = None
"""
DECODE = 24


@pytest.fixture(scope="module")
def server(module_lab):
    return module_lab.server()


@pytest.fixture(scope="module")
def plain(module_lab):
    """vLLM without kvtier."""
    return module_lab.local_engine(enable_prefix_caching=False)


@pytest.fixture(scope="module")
def engine(module_lab, server):
    return module_lab.local_engine(server.socket)


@pytest.fixture(scope="module")
def chunked(module_lab, server):
    """Prefill goes in chunks that are no multiple of a block."""
    return module_lab.local_engine(server.socket, max_num_batched_tokens=80, max_num_seqs=8)


@pytest.fixture(scope="module")
def slivers(module_lab, server):
    """Prefill goes in chunks smaller than a block and a half."""
    return module_lab.local_engine(server.socket, max_num_batched_tokens=40, max_num_seqs=4)


LENGTHS = [n * BLOCK + d for n in (1, 2, 3) for d in (-1, 0, 1)]


@pytest.mark.parametrize("kind", ["engine", "chunked", "slivers"])
@pytest.mark.parametrize("tokens", [*LENGTHS, 10 * BLOCK + 5])
def test_restored_answers_are_the_cold_ones(kind, tokens, plain, request):
    engine = request.getfixturevalue(kind)
    asked = prompt(100_000 * len(kind) + tokens, tokens)
    cold = plain.complete(asked, DECODE)
    assert engine.complete(asked, DECODE).tokens == cold.tokens
    engine.forget()
    warm = engine.complete(asked, DECODE)
    assert warm.tokens == cold.tokens
    assert warm.cached == (tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("at", [0, 4, 9])
def test_one_corrupted_block_changes_the_answer(at, engine, plain):
    """So that equality above means something."""
    asked = prompt(1000 + at, 10 * BLOCK + 1)
    cold = plain.complete(asked, DECODE)
    assert engine.complete(asked, DECODE).tokens == cold.tokens
    engine.forget()
    engine.run(WORKER + CORRUPT_NTH_LOAD.format(at=at))
    damaged = engine.complete(asked, DECODE)
    engine.run(WORKER + WHOLE_LOADS)
    assert damaged.cached == 10 * BLOCK
    assert damaged.tokens != cold.tokens


@pytest.mark.parametrize("at", [0, 4, 9])
@pytest.mark.parametrize("kind", ["engine", "chunked"])
def test_a_block_that_cannot_be_loaded_is_computed_again(at, kind, plain, request):
    engine = request.getfixturevalue(kind)
    asked = prompt(2000 + at, 10 * BLOCK + 7)
    cold = plain.complete(asked, DECODE)
    engine.complete(asked, DECODE)
    engine.forget()
    engine.run(WORKER + LOSE_NTH_LOAD.format(at=at))
    answer = engine.complete(asked, DECODE)
    assert engine.run("result = side.lost") >= 1
    engine.run(WORKER + WHOLE_LOADS)
    assert answer.tokens == cold.tokens
    engine.forget()
    assert engine.complete(asked, DECODE).tokens == cold.tokens


def test_ten_sessions_with_one_prefix_get_their_own_answers(engine, plain):
    shared = prompt(3000, 6 * BLOCK)
    asked = [shared + prompt(3001 + n, 2 * BLOCK + n) for n in range(10)]
    cold = plain.complete_all(asked, DECODE)
    first = engine.complete_all(asked, DECODE)
    engine.forget()
    again = engine.complete_all(asked, DECODE)
    assert [each.tokens for each in first] == [each.tokens for each in cold]
    assert [each.tokens for each in again] == [each.tokens for each in cold]
    assert all(each.cached >= 6 * BLOCK for each in again)
    assert len({tuple(each.tokens) for each in cold}) == 10


def test_an_answer_is_a_prefix_of_the_next_turn(engine, plain):
    asked = prompt(4000, 2 * BLOCK)
    answer = engine.complete(asked, 4 * BLOCK)
    turn = [*asked, *answer.tokens, *prompt(4001, 5)]
    engine.forget()
    warm = engine.complete(turn, DECODE)
    assert warm.cached >= 5 * BLOCK
    assert warm.tokens == plain.complete(turn, DECODE).tokens


def test_what_the_device_and_the_host_hold_joins(engine, plain):
    asked = prompt(5000, 8 * BLOCK + 1)
    engine.complete(asked)
    engine.forget()
    engine.complete(asked[: 3 * BLOCK + 1])
    sources = engine.cached_by_source()
    warm = engine.complete(asked, DECODE)
    assert warm.cached == 8 * BLOCK
    assert warm.tokens == plain.complete(asked, DECODE).tokens
    after = engine.cached_by_source()
    assert after["device"] - sources.get("device", 0) == 3 * BLOCK
    assert after["host"] - sources.get("host", 0) == 5 * BLOCK


NOTHING_STORED_UNTIL_THE_END = """
side = llm.llm_engine.engine_core.engine_core.scheduler.connector._half.side
side._candidates = lambda scheduler_output: []
def finished(request, blocks):
    side.__dict__.pop("_candidates", None)
    answer = type(side).finished(side, request, blocks)
    side.__dict__.pop("finished")
    side.waited = answer[0]
    return answer
side.finished = finished
result = None
"""


def test_what_is_left_to_store_at_the_end_is_stored_and_its_blocks_are_freed(engine, plain):
    asked = prompt(8000, 4 * BLOCK + 1)
    cold = plain.complete(asked, DECODE)
    engine.run(NOTHING_STORED_UNTIL_THE_END)
    assert engine.complete(asked, DECODE).tokens == cold.tokens
    assert engine.run("result = side.waited") is True
    engine.complete(prompt(8001, BLOCK), 4)
    engine.forget()
    warm = engine.complete(asked, DECODE)
    assert warm.cached == 4 * BLOCK
    assert warm.tokens == cold.tokens


KILL_AND_COPY = """
import os, signal
plain_copy = type(side).{copy}
def copy_once(plan):
    if plan.{copy}s:
        side.__dict__.pop("{copy}")
        os.kill({pid}, signal.SIGKILL)
    plain_copy(side, plan)
side.{copy} = copy_once
result = None
"""


@pytest.mark.parametrize("copy", ["load", "store"])
def test_a_server_killed_in_the_middle_of_a_copy_changes_no_answer(copy, lab, plain):
    server = lab.server()
    engine = lab.local_engine(server.socket)
    asked = [prompt(6000 + n, 4 * BLOCK + n) for n in range(8)]
    cold = plain.complete_all(asked, DECODE)
    if copy == "load":
        engine.complete_all(asked, DECODE)
        engine.forget()
        assert engine.complete(asked[1], DECODE).cached == 4 * BLOCK
        engine.forget()
    engine.run(WORKER + KILL_AND_COPY.format(copy=copy, pid=server.child.pid))
    killed = engine.complete_all(asked, DECODE)
    assert [each.tokens for each in killed] == [each.tokens for each in cold]
    until(lambda: server.child.exit_code() is not None, "the server's death")
    engine.forget()
    alone = engine.complete_all(asked, DECODE)
    assert [each.tokens for each in alone] == [each.tokens for each in cold]
    assert all(each.cached == 0 for each in alone)


def test_without_a_server_an_engine_serves_as_if_every_lookup_missed(lab, plain):
    engine = lab.local_engine(lab.folder / "late.sock")
    asked = [prompt(7000 + n, 3 * BLOCK + n) for n in range(4)]
    assert [each.tokens for each in engine.complete_all(asked, DECODE)] == [
        each.tokens for each in plain.complete_all(asked, DECODE)
    ]
    engine.forget()
    assert engine.complete(asked[1]).cached == 0
    assert lab.server(name="late").socket == lab.folder / "late.sock"

    def served():
        engine.forget()
        return engine.complete(asked[1], DECODE).cached == 3 * BLOCK

    until(served, "hits from the server that came late", 30)
