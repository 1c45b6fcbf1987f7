"""Every way a request can take through vLLM's scheduler, with the cache beside it.

Where a request may use the cache, what comes back gives the answer of an engine without kvtier.
Where it may not, nothing comes back and nothing is stored.
"""

from __future__ import annotations

import pytest
from faulty import corrupting
from harness import BLOCK, holds, host_blocks, no_leaks, prompt
from inprocess import Ask

from loadtest import tiny

WIDTH = tiny.HEADS * tiny.HEAD_SIZE
DECODE = 24


@pytest.fixture(scope="module")
def server(module_lab):
    return module_lab.server()


@pytest.fixture(scope="module")
def engine(module_lab, server):
    return module_lab.local_engine(server.socket, enable_prompt_embeds=True)


@pytest.fixture(scope="module")
def drafting(module_lab, server):
    """Proposes tokens that stood in the prompt after the same last token."""
    drafts = {"method": "ngram", "num_speculative_tokens": 5}
    lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return module_lab.local_engine(server.socket, speculative_config=drafts | lookup)


def greedy(tokens, most=DECODE, **fields):
    return Ask(tokens, sampling={"max_tokens": most}, **fields)


def test_a_corrupted_block_changes_an_answer(engine, plain):
    """So that the comparisons below mean something."""
    asked = prompt(10, 8 * BLOCK + 3)
    cold = plain.complete(asked, DECODE)
    engine.complete(asked, DECODE)
    engine.forget()
    with corrupting(engine, "slice(5, 6)"):
        damaged = engine.complete(asked, DECODE)
    assert damaged.cached == 8 * BLOCK
    assert damaged.tokens != cold.tokens
    engine.forget_all()


# Speculative decoding.


def test_drafts_change_neither_answers_nor_hits_nor_what_is_stored(drafting, engine, server, plain):
    phrase = prompt(20, 24)
    asked = [phrase * 6 + prompt(21 + n, 7 + n) for n in range(5)]
    cold = plain.complete_all(asked, 2 * BLOCK)
    drafting.forget_all()
    counted = drafting.counters()["stored_blocks"]
    assert [each.tokens for each in drafting.complete_all(asked, 2 * BLOCK)] == [
        each.tokens for each in cold
    ]
    proposed = drafting.count("vllm:spec_decode_num_draft_tokens")
    accepted = drafting.count("vllm:spec_decode_num_accepted_tokens")
    assert 0 < accepted < proposed
    whole = {
        tuple([*tokens, *answer.tokens][: n * BLOCK])
        for tokens, answer in zip(asked, cold, strict=True)
        for n in range(1, (len(tokens) + len(answer.tokens) - 1) // BLOCK + 1)
    }
    holds(server, len(whole))
    assert drafting.counters()["stored_blocks"] - counted == len(whole)
    turns = [[*asked[n], *cold[n].tokens, *prompt(30 + n, 5)] for n in range(5)]
    following = plain.complete_all(turns, DECODE)
    for asking, computed in ((engine, 6), (drafting, 1)):
        asking.forget()
        again = asking.complete_all(turns, DECODE)
        assert [each.tokens for each in again] == [each.tokens for each in following]
        held = [(len(turn) - computed) // BLOCK * BLOCK for turn in turns]
        assert [each.cached for each in again] == held
        no_leaks(server, asking)


# Sampling.


def test_samples_of_one_prompt_share_its_blocks(engine, server):
    asked = prompt(40, 6 * BLOCK + 4)
    seeded = {"n": 4, "seed": 7, "temperature": 1.0, "max_tokens": 2 * BLOCK}
    engine.forget_all()
    [cold] = engine.generate([Ask(asked, sampling=seeded)])
    assert len({tuple(each) for each in cold.samples}) == 4
    engine.forget()
    before = engine.counters()["loaded_blocks"]
    [warm] = engine.generate([Ask(asked, sampling=seeded)])
    assert warm.samples == cold.samples
    assert engine.counters()["loaded_blocks"] - before == 6
    no_leaks(server, engine)


def test_prompt_logprobs_are_computed_and_never_loaded(engine, server, plain):
    asked = prompt(50, 5 * BLOCK + 2)
    wanted = {"prompt_logprobs": 2, "max_tokens": DECODE}
    [cold] = plain.generate([Ask(asked, sampling=wanted)])
    engine.forget_all()
    for _ in range(2):
        [got] = engine.generate([Ask(asked, sampling=wanted)])
        assert got.cached == 0
        assert got.tokens == cold.tokens
        assert len(got.prompt_logprobs) == len(asked) - 1
        for place, right in zip(got.prompt_logprobs, cold.prompt_logprobs, strict=True):
            assert dict(place) == pytest.approx(dict(right), abs=1e-3)
        engine.forget()
    assert engine.complete(asked, DECODE).cached == 5 * BLOCK, "its blocks serve others"
    no_leaks(server, engine)


# What makes two equal runs of tokens different.


def test_a_salt_separates_tenants_in_the_host_tier_and_stands_nowhere(engine, server):
    asked, salt, other = prompt(60, 5 * BLOCK + 1), "sEsAmE-salt-of-A", "sEsAmE-salt-of-B"
    engine.forget_all()
    [first] = engine.generate([greedy(asked, salt=salt)])
    engine.forget()
    strangers = engine.generate([greedy(asked, salt=other), greedy(asked)])
    assert [each.cached for each in strangers] == [0, 0]
    engine.forget()
    [again] = engine.generate([greedy(asked, salt=salt)])
    assert again.cached == 5 * BLOCK
    assert again.tokens == first.tokens == strangers[1].tokens
    paths = ("/metrics", "/v1/stats", "/v1/tiers", "/v1/namespaces", "/v1/sessions", "/v1/config")
    said = [server.get(path) for path in paths] + [server.log.read_text()]
    assert all(said)
    assert not any("sEsAmE" in text for text in [*said, engine.part.log.read_text()])


def test_prompt_embeddings_match_only_themselves(engine, server):
    rows = 5 * BLOCK + 3
    engine.forget_all()
    cold = engine.generate([greedy((), embeds=(seed, rows, WIDTH)) for seed in (1, 2)])
    assert cold[0].tokens != cold[1].tokens
    assert [each.cached for each in cold] == [0, 0]
    engine.forget()
    [third] = engine.generate([greedy((), embeds=(3, rows, WIDTH))])
    assert third.cached == 0
    engine.forget()
    warm = engine.generate([greedy((), embeds=(seed, rows, WIDTH)) for seed in (2, 1)])
    assert [each.tokens for each in warm] == [cold[1].tokens, cold[0].tokens]
    assert [each.cached for each in warm] == [5 * BLOCK, 5 * BLOCK]
    no_leaks(server, engine)


# Emptying caches.


def test_a_reset_of_the_connector_empties_the_host_tier(engine, server, plain):
    asked = prompt(70, 4 * BLOCK + 9)
    engine.complete(asked, DECODE)
    assert host_blocks(server)
    engine.forget_all()
    holds(server, 0)
    again = engine.complete(asked, DECODE)
    assert again.cached == 0
    assert again.tokens == plain.complete(asked, DECODE).tokens
    holds(server, (len(asked) + DECODE - 1) // BLOCK)


def test_an_engine_that_sleeps_and_wakes_serves_right_answers(engine, server, plain):
    """vLLM empties all caches of an engine that goes to sleep, also where it frees no memory."""
    asked = prompt(80, 4 * BLOCK + 9)
    cold = plain.complete(asked, DECODE)
    engine.complete(asked, DECODE)
    engine.run("llm.sleep(1); llm.wake_up(); result = None")
    assert engine.complete(asked, DECODE).tokens == cold.tokens
    engine.forget()
    warm = engine.complete(asked, DECODE)
    assert (warm.tokens, warm.cached) == (cold.tokens, 4 * BLOCK)
    no_leaks(server, engine)


# Many requests with one prefix.

CONVOY = 50
PREFIX = 12


@pytest.fixture
def convoy(plain):
    shared = prompt(90, PREFIX * BLOCK)
    asked = [shared + prompt(91 + n, 3) for n in range(CONVOY)]
    return asked, [each.tokens for each in plain.complete_all(asked, 4)]


def test_a_prefix_on_the_device_is_not_loaded_by_anybody(convoy, engine, server):
    asked, cold = convoy
    engine.forget_all()
    engine.complete(asked[0], 4)
    before = engine.counters()
    answers = engine.complete_all(asked, 4)
    assert [each.tokens for each in answers] == cold
    assert all(each.cached == PREFIX * BLOCK for each in answers)
    after = engine.counters()
    assert after["loaded_blocks"] == before["loaded_blocks"]
    assert after["stored_blocks"] == before["stored_blocks"]
    no_leaks(server, engine)


def test_a_prefix_in_the_host_tier_is_loaded_once_for_all(convoy, engine, server):
    asked, cold = convoy
    engine.forget_all()
    engine.complete(asked[0], 4)
    engine.forget()
    before = engine.counters()
    answers = engine.complete_all(asked, 4)
    assert [each.tokens for each in answers] == cold
    assert all(each.cached == PREFIX * BLOCK for each in answers)
    after = engine.counters()
    assert after["loaded_blocks"] - before["loaded_blocks"] == PREFIX
    assert after["stored_blocks"] == before["stored_blocks"]
    no_leaks(server, engine)


def test_a_prefix_in_no_tier_is_stored_once(convoy, engine, server):
    asked, cold = convoy
    engine.forget_all()
    before = engine.counters()
    assert [each.tokens for each in engine.complete_all(asked, 4)] == cold
    assert engine.counters()["stored_blocks"] - before["stored_blocks"] == PREFIX
    holds(server, PREFIX)
    no_leaks(server, engine)


# What a request asks for.


def controlled(tokens, **controls):
    extra = {"kv_transfer_params": {"kvtier": controls}}
    return Ask(tokens, sampling={"max_tokens": DECODE, "extra_args": extra})


def test_a_request_that_declines_is_neither_stored_nor_loaded(engine, server, plain):
    asked = prompt(900, 4 * BLOCK + 3)
    cold = plain.complete(asked, DECODE)
    engine.forget_all()
    [silent] = engine.generate([controlled(asked, store=False)])
    assert silent.tokens == cold.tokens
    assert host_blocks(server) == 0
    engine.forget()
    engine.complete(asked, DECODE)
    engine.forget()
    [alone] = engine.generate([controlled(asked, load=False)])
    assert (alone.tokens, alone.cached) == (cold.tokens, 0)
    no_leaks(server, engine)


def test_a_request_with_an_unknown_control_is_answered_and_told_so(engine, server, plain):
    asked = prompt(910, 4 * BLOCK + 3)
    cold = plain.complete(asked, DECODE)
    engine.forget_all()
    [answer] = engine.generate([controlled(asked, stor=False)])
    assert answer.tokens == cold.tokens
    assert "stor" in answer.transfer["kvtier"]["error"]
    assert host_blocks(server) == 0
    assert engine.generate([controlled(asked)])[0].transfer is None
    no_leaks(server, engine)
