"""The load generator against real vLLM: cached tokens, their sources and the outputs are right."""

from __future__ import annotations

import httpx
import pytest
from harness import BLOCK, MODEL_TOKENS, holds

from loadtest import tiny
from loadtest.traffic.records import Failure
from loadtest.traffic.requests import Request, Workload
from loadtest.traffic.runner import Closed, RunOptions, run
from loadtest.traffic.stream import digest
from loadtest.traffic.summary import Labelled, summarise
from loadtest.traffic.texts import SeededWriter, TextWriter
from loadtest.traffic.workloads import build

FIRST = len(tiny.SPECIAL_TOKENS)
SIZES = {"sessions": 3, "turns": 3, "system": 4 * BLOCK, "message": 2 * BLOCK, "output": BLOCK}
USERS = Closed(1)
"""Who come after each other, so that each finds what the ones before left."""


@pytest.fixture(scope="module")
def served(module_lab):
    server = module_lab.server()
    return server, module_lab.engine(server.socket)


@pytest.fixture
def chat():
    return build("chat", SeededWriter(3, FIRST, FIRST + 256), MODEL_TOKENS, SIZES)


async def ask(engine, workload, **options):
    options = RunOptions(**options)
    return await run(
        engine.part.url, engine.model, workload, USERS, progress=False, options=options
    )


def text(engine, prompt, tokens):
    """Return the text of an answer that is not streamed."""
    body = {"model": engine.model, "prompt": prompt, "max_tokens": tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    answer = httpx.post(engine.part.url + "/v1/completions", json=body, timeout=60)
    return answer.json()["choices"][0]["text"]


async def test_cached_tokens_sources_and_outputs_are_those_of_vllm(served, chat):
    server, engine = served
    reusable = chat.facts(BLOCK).reusable_tokens
    assert reusable > 0.5 * chat.prompt_tokens
    cold = await ask(engine, chat)
    assert [record.error for record in cold.records] == [None] * len(chat.requests)
    assert sum(record.cached_tokens for record in cold.records) == reusable
    assert (cold.sources.prompt, cold.sources.device) == (chat.prompt_tokens, reusable)
    assert cold.sources.tiers == {"device": reusable}

    holds(server, chat.distinct_tokens(BLOCK) // BLOCK)
    engine.forget()
    warm = await ask(engine, chat, metrics=(engine.part.url, server.url))
    told = summarise(Labelled("kvtier", "warm", chat.facts(BLOCK), warm))
    all_but_one = sum((len(each.prompt) - 1) // BLOCK * BLOCK for each in chat.requests)
    assert told.cached_tokens == all_but_one > reusable, "all is cached but the last token's block"
    assert warm.sources.tiers.keys() == {"device", "host"}
    assert sum(warm.sources.tiers.values()) == all_but_one
    assert warm.sources.connector == warm.sources.by_tier["host"]
    counted = {name: tokens for name, tokens in warm.sources.by_source.items() if tokens}
    assert counted == warm.sources.tiers, "vLLM and the server count alike"
    assert warm.sources.computed == chat.prompt_tokens - all_but_one

    outputs = {record.name: record.digest for record in cold.records}
    assert {record.name: record.digest for record in warm.records} == outputs
    assert len(set(outputs.values())) == len(outputs), "every answer is another one"


async def test_a_digest_is_of_the_text_that_vllm_answers(served):
    _, engine = served
    prompt = SeededWriter(4, FIRST, FIRST + 256).write("any", 3 * BLOCK)
    workload = Workload("one", "One request.", 4, (Request("one", prompt, 24),))
    (record,) = (await ask(engine, workload)).records
    assert record.digest == digest(text(engine, prompt, 24))
    assert record.output_tokens == 24
    assert 0 < len(record.gaps) <= 23, "tokens that vLLM sent together have one gap"
    assert 0 < record.ttft < record.seconds


async def test_what_vllm_refuses_is_recorded_with_its_reason(served):
    _, engine = served
    writer = SeededWriter(5, FIRST, FIRST + 256)
    requests = (Request("long", writer.write("long", MODEL_TOKENS), 8), Request("good", (9, 9), 2))
    long, good = (await ask(engine, Workload("two", "", 5, requests))).records
    assert long.failure is Failure.STATUS
    assert long.error.startswith("The server answered 400: ")
    assert "BadRequestError" in long.error
    assert good.failure is None


def test_real_text_is_cut_by_the_models_tokenizer(tiny_model):
    assert len(TextWriter(1, tiny_model).write("a", 500)) == 500
