"""A device cache much smaller than what is asked of it: requests preempt each other.

Everything that comes back here comes from the host tier, and each answer is that of an engine
without kvtier.
"""

from __future__ import annotations

import random

import pytest
from faulty import FIRST, corrupting, losing
from harness import BLOCK, BLOCK_BYTES, late_config, no_leaks, prompt
from inprocess import Ask

BLOCKS = 24
"""Blocks of the device cache."""
TOKENS = 16 * BLOCK
PREEMPTIONS = "vllm:num_preemptions"
DECODE = 24


@pytest.fixture(scope="module")
def server(module_lab):
    return module_lab.server()


def small(lab, socket, **options):
    return lab.local_engine(
        socket,
        max_model_len=TOKENS,
        kv_cache_memory_bytes=(BLOCKS + 1) * BLOCK_BYTES,
        max_num_seqs=16,
        **options,
    )


@pytest.fixture(scope="module")
def whole(module_lab, server):
    """Prefill goes in one step."""
    return small(module_lab, server.socket)


@pytest.fixture(scope="module")
def chunked(module_lab, server):
    """Prefill goes in chunks that are no multiple of a block."""
    return small(module_lab, server.socket, max_num_batched_tokens=80)


@pytest.fixture(scope="module")
def late(module_lab, server):
    """Copies go on beside the model, and blocks are taken again before they are stored."""
    config = late_config(server.socket)
    return small(module_lab, None, kv_transfer_config=config, max_num_batched_tokens=80)


@pytest.fixture(params=["whole", "chunked", "late"])
def engine(request):
    return request.getfixturevalue(request.param)


def tokens(answers):
    return [each.tokens for each in answers]


def test_requests_that_preempt_each_other_answer_as_if_alone(engine, server, plain):
    asked = [prompt(100 + n, 2 * BLOCK + 5 * n) for n in range(8)]
    cold = plain.complete_all(asked, 5 * BLOCK)
    engine.forget_all()
    before, loaded = engine.count(PREEMPTIONS), engine.counters()["loaded_blocks"]
    assert tokens(engine.complete_all(asked, 5 * BLOCK)) == tokens(cold)
    assert engine.count(PREEMPTIONS) - before >= 3
    assert engine.counters()["loaded_blocks"] > loaded, "none came back from the host tier"
    no_leaks(server, engine)


SESSIONS = 30


def test_each_of_30_sessions_recalls_its_own_secret(engine, server, plain):
    """Prompts differ in one block in their middle only: what follows shows whose it is."""
    start, question = prompt(200, 3 * BLOCK), prompt(201, 3 * BLOCK + 7)
    secrets = [prompt(210 + n, BLOCK) for n in range(SESSIONS)]
    asked = [start + secret + question for secret in secrets]
    cold = plain.complete_all(asked, DECODE)
    assert len({tuple(each.tokens) for each in cold}) == SESSIONS
    engine.forget_all()
    assert tokens(engine.complete_all(asked, DECODE)) == tokens(cold)
    engine.forget()
    order = random.Random(1).sample(range(SESSIONS), SESSIONS)
    again = engine.complete_all([asked[n] for n in order], DECODE)
    assert [each.tokens for each in again] == [cold[n].tokens for n in order]
    assert all(each.cached == 7 * BLOCK for each in again)
    turns = [[*asked[n], *cold[n].tokens, *prompt(300 + n, 9)] for n in order]
    turned = engine.complete_all(turns, DECODE)
    assert tokens(turned) == tokens(plain.complete_all(turns, DECODE))
    assert all(each.cached >= 7 * BLOCK for each in turned)
    no_leaks(server, engine)


@pytest.mark.parametrize("which", ["slice(3, 4)", FIRST])
def test_a_secret_whose_block_is_corrupted_is_not_recalled(which, whole, plain):
    """So that the comparisons above mean something."""
    asked = prompt(400, 7 * BLOCK + 7)
    cold = plain.complete(asked, DECODE)
    whole.complete(asked, DECODE)
    whole.forget()
    with corrupting(whole, which):
        damaged = whole.complete(asked, DECODE)
    assert damaged.cached == 7 * BLOCK
    assert damaged.tokens != cold.tokens
    whole.forget_all()


ABORTS = 200


def test_200_aborted_requests_leave_nothing_behind(engine, server, plain):
    dice = random.Random(2)
    shared = prompt(500, 3 * BLOCK)
    left, live = ABORTS, []
    while left or live:
        for _ in range(min(left, dice.randrange(4))):
            tail = prompt(510 + dice.randrange(20), dice.randrange(1, 5 * BLOCK))
            live += engine.start([Ask(shared + tail, sampling={"max_tokens": 3 * BLOCK})])
            left -= 1
        for _ in range(dice.randrange(3)):
            ended = engine.step()
            live = [each for each in live if each not in ended]
        ending = dice.sample(live, min(len(live), dice.randrange(4)))
        engine.abort(ending)
        live = [each for each in live if each not in ending]
    engine.drain()
    no_leaks(server, engine)
    asked = [shared + prompt(510 + n, 2 * BLOCK + n) for n in range(6)]
    assert tokens(engine.complete_all(asked, DECODE)) == tokens(plain.complete_all(asked, DECODE))
    no_leaks(server, engine)


def test_a_request_that_cannot_fit_is_refused_and_leaves_nothing(engine, server, plain):
    with pytest.raises(AssertionError, match="maximum"):
        engine.complete(prompt(600, TOKENS + 1))
    no_leaks(server, engine)
    asked = prompt(601, TOKENS - 40)
    longest = engine.complete(asked, 1_000)
    assert len(asked) + len(longest.tokens) == TOKENS
    assert longest.tokens == plain.complete(asked, len(longest.tokens)).tokens
    no_leaks(server, engine)


def test_a_request_preempted_between_a_failed_load_and_its_recomputation_is_right(
    whole, server, plain
):
    """Loader and earlier request fill the cache; the next block of the earlier one preempts."""
    earlier = prompt(700, 13 * BLOCK - 1)
    asked = prompt(701, 10 * BLOCK + 7)
    cold = plain.complete_all([earlier, asked], DECODE)
    whole.forget_all()
    whole.complete(asked, 1)
    whole.forget()
    before = whole.count(PREEMPTIONS)
    [first] = whole.start([Ask(earlier, sampling={"max_tokens": DECODE})])
    whole.step()
    with losing(whole):
        [second] = whole.start([Ask(asked, sampling={"max_tokens": DECODE})])
        whole.step()
    found = whole.drain()
    assert whole.count(PREEMPTIONS) == before + 1
    assert [found[first].tokens, found[second].tokens] == tokens(cold)
    whole.forget()
    assert whole.complete(asked, DECODE).tokens == cold[1].tokens
    no_leaks(server, whole)
