"""Requests with equal tokens whose KV differs: adapters, pooling, other models' layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

from adapters import make_adapter
from harness import BLOCK, holds, host_blocks, make_model, no_leaks, prompt
from inprocess import Ask
from support import until

from loadtest.stack import StackError

DECODE = 24


@pytest.fixture(scope="module")
def server(module_lab):
    return module_lab.server()


@pytest.fixture(scope="module")
def adapted(module_lab, server):
    return module_lab.local_engine(
        server.socket, enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=2
    )


def test_base_model_and_adapters_never_share(adapted, server, plain, tmp_path):
    """Base, A, B, and A after its folder got other weights, each cold and then asked again."""
    asked = prompt(1, 5 * BLOCK + 3)
    first, second = (make_adapter(tmp_path / name, seed) for name, seed in (("A", 1), ("B", 2)))

    def ask(*adapter):
        lora = (adapter[0], adapter[1], str(adapter[2])) if adapter else None
        [got] = adapted.generate([Ask(asked, lora=lora, sampling={"max_tokens": DECODE})])
        adapted.forget()
        return got

    base = ask()
    assert base.tokens == plain.complete(asked, DECODE).tokens
    one, other = ask("A", 1, first), ask("B", 2, second)
    make_adapter(first, 3)
    adapted.run("llm.llm_engine.remove_lora(1); result = None")
    reloaded = ask("A", 1, first)
    identities = [base, one, other, reloaded]
    assert len({tuple(each.tokens) for each in identities}) == 4
    assert [each.cached for each in identities] == [0, 0, 0, 0]
    assert ask().cached == 5 * BLOCK
    assert ask("A", 1, first).tokens == reloaded.tokens
    assert ask("B", 2, second).tokens == other.tokens
    assert adapted.counters()["bypassed_requests:lora"] == 5
    holds(server, (len(asked) + DECODE - 1) // BLOCK)
    no_leaks(server, adapted)


EMBED = """
asked = {asked}
found = llm.embed([{{"prompt_token_ids": each}} for each in asked], use_tqdm=False)
result = [each.outputs.embedding for each in found]
"""


def test_requests_for_embeddings_neither_load_nor_store(module_lab, server):
    """Pooling models are engines of their own: with and without the cache, they agree."""
    asked = [prompt(20 + n, 3 * BLOCK + n) for n in range(3)]
    pooling = {"runner": "pooling", "convert": "embed"}
    code = EMBED.format(asked=asked)
    right = module_lab.local_engine(enable_prefix_caching=False, **pooling).run(code)
    engine = module_lab.local_engine(server.socket, enable_prefix_caching=True, **pooling)
    before = host_blocks(server)
    for _ in range(2):
        for got, cold in zip(engine.run(code), right, strict=True):
            assert got == pytest.approx(cold, abs=1e-5)
        engine.forget()
    counted = engine.counters()
    assert counted["bypassed_requests:pooling"] == 6
    assert (counted["loaded_blocks"], counted["stored_blocks"]) == (0, 0)
    holds(server, before)
    no_leaks(server, engine)


def test_a_model_with_sliding_windows_is_refused_with_one_sentence(lab):
    """A tiny Gemma 3: vLLM gives it more than one group of KV caches."""
    model = make_model(Path(__file__).with_name("gemma.py"), "tiny-gemma")
    server = lab.server()
    with pytest.raises(StackError, match="did not start"):
        lab.local_engine(server.socket, model=str(model), tokenizer=str(lab.model))
    said = (lab.folder / "part1.log").read_text()
    assert "kvtier supports models whose layers are all full attention in one group" in said
    until(lambda: json.loads(server.get("/v1/sessions")) == [], "no session")
