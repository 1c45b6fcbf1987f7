"""What makes the tiny model fit to prove something: its answers depend on every block."""

import pytest
from harness import BLOCK, MODEL_TOKENS, prompt

KV_TOOLS = """
def negate(worker, block):
    for cache in worker.model_runner.kv_caches:
        cache[block] = -cache[block]

def flip(block):
    llm.collective_rpc(negate, args=(block,))

def cached_blocks():
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return [block.block_id for block in pool.blocks if block.block_hash is not None]
"""


@pytest.fixture(scope="module")
def engine(module_lab):
    engine = module_lab.local_engine()
    engine.run(KV_TOOLS)
    return engine


@pytest.mark.parametrize("tokens", [1, BLOCK, 10 * BLOCK, MODEL_TOKENS - 16])
def test_an_answer_is_not_one_token_for_ever(engine, tokens):
    assert len(set(engine.complete(prompt(tokens, tokens)).tokens)) >= 5


def test_different_prompts_have_different_answers(engine):
    prompts = [prompt(seed, 100) for seed in range(20)]
    answers = engine.complete_all(prompts)
    assert len({tuple(answer.tokens) for answer in answers}) == len(prompts)


def test_an_answer_from_cached_blocks_is_the_computed_one(engine):
    engine.forget()
    asked = prompt(1, 10 * BLOCK + 1)
    cold, warm = engine.complete(asked), engine.complete(asked)
    assert (cold.cached, warm.cached) == (0, 10 * BLOCK)
    assert warm.tokens == cold.tokens


@pytest.mark.parametrize("blocks", [1, 3, 10, 31])
def test_the_answer_differs_when_any_one_cached_block_is_corrupted(engine, blocks):
    engine.forget()
    asked = prompt(blocks, blocks * BLOCK + 1)
    good = engine.complete(asked).tokens
    cached = engine.run("result = cached_blocks()")
    assert len(cached) == blocks
    for block in cached:
        engine.run(f"flip({block})")
        spoilt = engine.complete(asked)
        engine.run(f"flip({block})")
        assert spoilt.cached == blocks * BLOCK
        assert spoilt.tokens != good, f"block {block} of {cached} has no influence"
    assert engine.complete(asked).tokens == good
