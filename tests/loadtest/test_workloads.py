"""Workloads are the same for the same seed, share the prefixes that they claim, and fit."""

from __future__ import annotations

import itertools
import json
from itertools import product
from pathlib import Path

import pytest

from loadtest import neutral
from loadtest.rig import MODEL_TOKENS
from loadtest.traffic import texts
from loadtest.traffic.requests import Request, TrafficError, Workload, chain
from loadtest.traffic.texts import SeededWriter, TextWriter
from loadtest.traffic.traces import Window, replay, shapes
from loadtest.traffic.workloads import WORKLOADS, arriving, build

SMALL = {"churn": {"cache_bytes": 400_000, "bytes_a_token": 100}}
"""The default churn is a gigabyte of prompts."""


def made(name, seed=1, model_tokens=1024, **sizes):
    return build(name, SeededWriter(seed), model_tokens, SMALL.get(name, {}) | sizes)


def common(one, other):
    """Return how many tokens two prompts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_requests_and_another_one_others(name):
    assert made(name) == made(name)
    first, other = made(name).requests, made(name, seed=2).requests
    assert all(common(a.prompt, b.prompt) == 0 for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("model_tokens", [1024, 4096, 8192])
def test_its_own_sizes_fit_the_model_and_use_it(name, model_tokens):
    workload = made(name, model_tokens=model_tokens)
    longest = max(len(each.prompt) + each.output_tokens for each in workload.requests)
    assert workload.longest == longest <= model_tokens
    assert longest > 0.2 * model_tokens


def test_the_reference_has_exactly_the_workloads_with_what_they_say_of_themselves():
    page = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text("utf-8")
    rows = page.split("<!-- workloads -->")[1].split("<!-- /workloads -->")[0].splitlines()[3:]
    told = [tuple(cell.strip(" `") for cell in row.split("|")[1:3]) for row in rows]
    assert told[:-1] == [(name, kind.about) for name, kind in WORKLOADS.items()]
    assert told[-1][0] == "replay"


@pytest.mark.parametrize("name", WORKLOADS)
def test_it_says_what_it_is_and_of_which_sizes(name):
    workload = made(name, output=3)
    assert workload.about.endswith(".")
    assert workload.parameters.items() >= {"output": 3}.items()
    assert all(request.output_tokens == 3 for request in workload.requests)


def test_a_system_prompt_is_all_that_users_share():
    workload = made("shared_prompt", users=3, rounds=2, system=200, question=20)
    prompts = [each.prompt for each in workload.requests]
    assert [len(prompt) for prompt in prompts] == [220] * 6
    assert {common(a, b) for a in prompts for b in prompts if a is not b} == {200}
    assert workload.facts(20).reusable_tokens == 5 * 200


def test_readers_of_a_document_share_it_and_others_nothing():
    workload = made("documents", documents=2, readers=2, document=300, question=20)
    first, second, again, _ = (each.prompt for each in workload.requests)
    assert common(first, again) == 300
    assert common(first, second) == 0


def test_a_turn_continues_the_turn_before_it_and_waits_for_it():
    workload = made("chat", sessions=2, turns=3, system=100, message=30, output=10)
    assert [each.name for each in workload.requests][:3] == [
        "session 0 turn 0",
        "session 1 turn 0",
        "session 0 turn 1",
    ]
    turns = workload.requests[::2]
    assert [each.after for each in turns] == [None, "session 0 turn 0", "session 0 turn 1"]
    assert [len(each.prompt) for each in turns] == [130, 170, 210]
    assert all(a.prompt == b.prompt[: len(a.prompt)] for a, b in itertools.pairwise(turns))
    assert common(workload.requests[0].prompt, workload.requests[1].prompt) == 100


def test_agents_replay_their_context_step_by_step():
    workload = made("agents", agents=2, steps=3, tools=100, observation=30, output=10)
    steps = workload.requests[:3]
    assert [each.name for each in steps] == [f"agent 0 turn {step}" for step in range(3)]
    assert [len(each.prompt) for each in steps] == [130, 170, 210]
    assert steps[2].prompt[:170] == steps[1].prompt


def test_unique_prompts_share_nothing():
    workload = made("unique")
    assert workload.reusable_tokens == 0
    assert len({each.prompt[0:4] for each in workload.requests}) == len(workload.requests)


def test_a_churn_is_so_much_larger_than_the_cache():
    sizes = {"cache_bytes": 1_000_000, "bytes_a_token": 100, "times": 1.5, "prompt": 320}
    workload = made("churn", rounds=2, **sizes)
    distinct = workload.distinct_tokens(block_tokens=32) * 100
    assert 1_500_000 <= distinct < 1_500_000 + 320 * 100
    assert len(workload.requests) == 2 * 47
    halves = workload.requests[:47], workload.requests[47:]
    first, second = ([each.prompt for each in half] for half in halves)
    assert first != second
    assert sorted(first) == sorted(second)


def test_reusable_tokens_are_whole_blocks_and_leave_one_to_compute():
    prompts = [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 9, 9), (1, 2), (9, 9, 3, 4)]
    requests = tuple(Request(str(n), prompt, 1) for n, prompt in enumerate(prompts))
    facts = Workload("by hand", "", 1, requests).facts(block_tokens=2)
    assert (facts.prompt_tokens, facts.reusable_tokens) == (19, 2 + 2 + 0 + 0)
    assert facts.reusable_share == 4 / 19
    assert Workload("by hand", "", 1, requests).distinct_tokens(2) == 2 * 5


def test_equal_blocks_after_another_prefix_are_other_blocks():
    one, other = chain((1, 2, 3, 4, 5), 2), chain((9, 9, 3, 4, 5), 2)
    assert len(one) == len(other) == 2
    assert not set(one) & set(other)


def test_arrivals_are_at_random_and_as_many_a_second_as_asked():
    workload = arriving(made("unique", requests=500, prompt=4), 50.0)
    times = [each.at for each in workload.requests]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(10.0, rel=0.2)
    assert times == [
        each.at for each in arriving(made("unique", requests=500, prompt=4), 50).requests
    ]


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("chats", {}, "no workload chats; .* the nearest is chat"),
        ("chat", {"turn": 2}, "no size turn; .* the nearest is turns"),
        ("chat", {"turns": 0}, "turns of 0 makes nothing"),
        ("chat", {"turns": 20}, "needs .* tokens, and the model has 1,024"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(name, sizes, said):
    with pytest.raises(TrafficError, match=said):
        made(name, **sizes)


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ((), "no request"),
        ((Request("a", (), 1),), "0 prompt tokens"),
        ((Request("a", (1,), 0),), "asks for 0"),
        ((Request("a", (1,), 1), Request("a", (2,), 1)), "2 requests are named a"),
        ((Request("a", (1,), 1, after="b"), Request("b", (2,), 1)), "does not stand before"),
    ],
)
def test_a_workload_that_cannot_be_sent_is_refused(requests, said):
    with pytest.raises(TrafficError, match=said):
        Workload("w", "", 1, requests).check(100)


def line(at, tokens, ids, **more):
    return {
        "timestamp": at,
        "input_length": tokens,
        "output_length": 512,
        "hash_ids": ids,
        **more,
    }


@pytest.fixture
def trace(tmp_path):
    lines = [
        line(0, 99, [7]),
        line(2000, 512 * 2, [1, 2]),
        line(2500, 512 * 2 + 256, [1, 2, 3], session=4),
        line(4000, 512 * 40, list(range(100, 140)), session=4),
        line(9000, 512, [5]),
    ]
    file = tmp_path / "mooncake.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return file


def test_a_replay_has_the_shapes_of_the_trace_scaled_and_cut(trace):
    window = Window(requests=3, first=1, block=64, output=16)
    workload = replay(SeededWriter(1), trace, 1024, window)
    assert workload == replay(SeededWriter(1), trace, 1024, window)
    assert [each.name for each in workload.requests] == [f"request {n}" for n in (1, 2, 3)]
    assert [each.at for each in workload.requests] == [0.0, 0.5, 2.0]
    assert [len(each.prompt) for each in workload.requests] == [129, 128 + 32, 1024 - 16]
    assert [each.after for each in workload.requests] == [None, None, "request 2"]
    assert {each.output_tokens for each in workload.requests} == {16}
    first, second, third = (each.prompt for each in workload.requests)
    assert common(first, second) == 128
    assert common(first, third) == 0
    assert workload.parameters["trace"] == "mooncake.jsonl"


def test_another_load_generator_gets_the_same_shapes(trace):
    window = Window(requests=3, first=1, block=64, output=16)
    requests = replay(SeededWriter(1), trace, 1024, window).requests
    timed = shapes(trace, 1, 1024, window)
    assert [(each.seconds, each.tokens, each.output) for each in timed] == [
        (each.at, len(each.prompt), each.output_tokens) for each in requests
    ]
    first, second, third = (each.blocks for each in timed)
    assert first[:2] == second[:2]
    assert not {*first[2:], *second[2:]} & {*first[:2], *third}


def test_a_trace_for_vllm_bench_keeps_its_proportions_at_a_slower_pace(
    trace, tmp_path, monkeypatch
):
    monkeypatch.setattr(neutral, "WINDOW", Window())
    file = neutral._write_trace(trace, 100, tmp_path)
    lines = [json.loads(each) for each in file.read_text().splitlines()]
    seconds = [each["timestamp"] for each in lines]
    assert seconds[-1] == neutral.TRACE_GAP_SECONDS * (len(lines) - 1)
    kept = shapes(trace, neutral.TRACE_SEED, MODEL_TOKENS, neutral.WINDOW)
    assert [each["input_length"] for each in lines] == [each.tokens for each in kept]
    assert [tuple(each["hash_ids"]) for each in lines] == [each.blocks for each in kept]


def test_answers_of_a_replay_are_scaled_as_its_prompts(trace):
    window = Window(requests=1, block=64, output=200)
    assert replay(SeededWriter(1), trace, 1024, window).requests[0].output_tokens == 64


def test_conversations_are_kept_or_left_out_as_a_whole(tmp_path):
    turns = [
        line(n, 512 * (turn + 2), [0, *(100 * talk + each for each in range(1, turn + 2))])
        for n, (turn, talk) in enumerate(product(range(3), range(1, 41)))
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in turns))
    window = Window(requests=1000, conversations=0.3)
    kept = replay(SeededWriter(1), file, 1024, window)
    talks = {request.prompt[64:128] for request in kept.requests}
    assert 4 < len(talks) < 20
    assert len(kept.requests) == 3 * len(talks)
    whole = replay(SeededWriter(1), file, 1024, Window(requests=1000))
    prompts = {(request.name, request.prompt) for request in whole.requests}
    assert {(request.name, request.prompt) for request in kept.requests} < prompts
    share = whole.facts(64).reusable_share
    assert kept.facts(64).reusable_share == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    ("window", "said"),
    [
        (Window(conversations=0), "0 is no share"),
        (Window(first=5), "no request after the first 5"),
        (Window(block=0), "1 at least"),
    ],
)
def test_a_window_without_requests_is_refused(trace, window, said):
    with pytest.raises(TrafficError, match=said):
        replay(SeededWriter(1), trace, 1024, window)


def test_what_is_no_trace_is_refused_with_the_readers_sentence(tmp_path):
    (tmp_path / "x").write_text("hello\n")
    with pytest.raises(TrafficError, match="line 1: this is no trace"):
        replay(SeededWriter(1), tmp_path / "x", 1024, Window())


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """A model's folder with one token a byte."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, tokenizer


def test_real_text_is_text_of_this_system_behind_a_mark_of_its_own(byte_tokenizer, monkeypatch):
    monkeypatch.setattr(texts, "TEXT_BYTES", 20_000)
    folder, tokenizer = byte_tokenizer
    writer = TextWriter(1, folder)
    one, other = writer.write("a", 600), writer.write("b", 600)
    assert (len(one), len(other)) == (600, 600)
    assert common(one, other) < 32, "not one block is shared"
    assert writer.write("a", 300) == one[:300]
    assert TextWriter(1, folder).write("a", 600) == one
    assert TextWriter(2, folder).write("a", 600) != one
    assert " the " in tokenizer.decode(list(one) + list(other))
    assert len(writer.write("a", 5)) == 5
    assert len(writer.write("a", 50_000)) == 50_000, "longer than the text"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(TrafficError, match=r"no tokenizer.json"):
        TextWriter(1, tmp_path)


def test_an_empty_range_of_tokens_is_refused():
    with pytest.raises(TrafficError, match="at least 5 and below 5"):
        SeededWriter(1, 5, 5)
