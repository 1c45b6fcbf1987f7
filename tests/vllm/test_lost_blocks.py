"""Blocks that vanish between lookup and load: the answer is the uncached one, at once and later.

vLLM recomputes what could not be loaded. In the meantime its own prefix cache serves the lost
blocks to others, and lets requests of the same step build on them: what happens then is here too.
"""

from __future__ import annotations

import pytest
from faulty import ALL, FIRST, LAST, MIDDLE, corrupting, losing
from harness import BLOCK, late_config, no_leaks, prompt
from inprocess import Ask

DECODE = 24
PREFIX = 10


@pytest.fixture(scope="module")
def server(module_lab):
    return module_lab.server()


@pytest.fixture(scope="module")
def wide(module_lab, server):
    """A step takes everything, but of one prompt no more than two blocks while others wait."""
    return module_lab.local_engine(
        server.socket, max_num_batched_tokens=1024, long_prefill_token_threshold=2 * BLOCK
    )


@pytest.fixture(scope="module")
def narrow(module_lab, server):
    """Steps are far smaller than what is lost."""
    return module_lab.local_engine(server.socket, max_num_batched_tokens=80, max_num_seqs=8)


@pytest.fixture(scope="module")
def failing(module_lab, server):
    """A lost block ends its request."""
    return module_lab.local_engine(server.socket, policy="fail")


@pytest.fixture(scope="module")
def verifying(module_lab, server):
    """Checksums tell changed bytes from stored ones."""
    return module_lab.local_engine(server.socket, {"verify_loads": True})


@pytest.fixture(scope="module")
def late(module_lab, server):
    """Loads go on beside the model."""
    config = late_config(server.socket)
    return module_lab.local_engine(kv_transfer_config=config, max_num_batched_tokens=80)


@pytest.fixture(params=["wide", "narrow", "late"])
def engine(request):
    return request.getfixturevalue(request.param)


class Prompts:
    """One prefix in the host tier only, and prompts that begin with it and end on their own."""

    def __init__(self, plain):
        self.shared = prompt(1, PREFIX * BLOCK)
        self.short = self.shared + prompt(2, 7)
        self.other = self.shared + prompt(3, 40)
        self.long = self.shared + prompt(4, 6 * BLOCK + 9)
        self.all = [self.short, self.other, self.long]
        self.cold = [each.tokens for each in plain.complete_all(self.all, DECODE)]

    def right(self, tokens):
        return self.cold[self.all.index(tokens)]


@pytest.fixture(scope="module")
def prompts(plain):
    return Prompts(plain)


def greedy(tokens):
    return Ask(tokens, sampling={"max_tokens": DECODE})


def only_in_the_host_tier(engine, prompts):
    engine.forget_all()
    engine.complete(prompts.shared, 2)
    engine.forget()


def right_everywhere(engine, prompts):
    """Ask all prompts as the caches are now, and then from the host tier alone."""
    for _ in range(2):
        answers = engine.generate([greedy(each) for each in prompts.all])
        assert [each.tokens for each in answers] == prompts.cold
        engine.forget()
    assert all(each.cached for each in answers), "nothing came from the host tier"


@pytest.mark.parametrize("which", [FIRST, MIDDLE, LAST])
def test_a_corrupted_block_changes_the_answer(which, narrow, prompts):
    """So that the comparisons below mean something."""
    only_in_the_host_tier(narrow, prompts)
    with corrupting(narrow, which):
        damaged = narrow.complete(prompts.short, DECODE)
    assert damaged.cached == PREFIX * BLOCK
    assert damaged.tokens != prompts.right(prompts.short)


@pytest.mark.parametrize("which", [FIRST, MIDDLE, LAST, ALL])
def test_lost_blocks_are_computed_and_what_stood_on_them_is_never_stored(
    which, engine, server, prompts
):
    """The long prompt: a step that loses blocks computes further whole blocks on top of them."""
    only_in_the_host_tier(engine, prompts)
    with losing(engine, which):
        got = engine.complete(prompts.long, DECODE)
    assert got.tokens == prompts.right(prompts.long)
    engine.forget()
    again = engine.complete(prompts.long, DECODE)
    assert again.tokens == prompts.right(prompts.long)
    assert again.cached == len(prompts.long) // BLOCK * BLOCK, "computed again, and not stored"
    right_everywhere(engine, prompts)
    no_leaks(server, engine)


@pytest.mark.parametrize("later", [0, 1, 2])
def test_others_with_a_lost_prefix_answer_right_whenever_they_come(later, engine, server, prompts):
    only_in_the_host_tier(engine, prompts)
    with losing(engine, times=1):
        ids = engine.start([greedy(prompts.long)])
        for _ in range(later):
            engine.step()
        ids += engine.start([greedy(prompts.other), greedy(prompts.short)])
        found = engine.drain()
    asked = [prompts.long, prompts.other, prompts.short]
    assert [found[each].tokens for each in ids] == [prompts.right(each) for each in asked]
    right_everywhere(engine, prompts)
    no_leaks(server, engine)


@pytest.mark.parametrize("others", [0, 1])
def test_a_request_aborted_right_after_it_lost_blocks_leaves_no_wrong_ones(
    others, engine, server, prompts
):
    only_in_the_host_tier(engine, prompts)
    with losing(engine, times=1):
        first, *rest = engine.start([greedy(prompts.long), greedy(prompts.other)][: others + 1])
        engine.step()
        engine.abort([first])
        found = engine.drain()
    assert [found[each].tokens for each in rest] == [prompts.right(prompts.other)] * others
    right_everywhere(engine, prompts)
    no_leaks(server, engine)


def test_a_load_that_fails_again_and_again_ends(engine, server, prompts):
    only_in_the_host_tier(engine, prompts)
    with losing(engine):
        answers = engine.generate([greedy(each) for each in prompts.all * 3])
    assert [each.tokens for each in answers] == prompts.cold * 3
    right_everywhere(engine, prompts)
    no_leaks(server, engine)


@pytest.mark.parametrize("which", [FIRST, MIDDLE, LAST, ALL])
def test_with_the_policy_fail_the_request_ends_with_an_error(which, failing, server, prompts):
    only_in_the_host_tier(failing, prompts)
    before = failing.counters()
    with losing(failing, which):
        got = failing.complete(prompts.long, DECODE)
    assert got.finish == "error"
    assert got.tokens == []
    lost = failing.counters()["load_failed_blocks"] - before["load_failed_blocks"]
    loaded = failing.counters()["loaded_blocks"] - before["loaded_blocks"]
    assert (lost, loaded) == ((PREFIX, 0) if which == ALL else (1, PREFIX - 1))
    no_leaks(server, failing)
    right_everywhere(failing, prompts)


@pytest.mark.parametrize("which", [FIRST, MIDDLE, LAST, ALL])
def test_where_loads_are_verified_corrupted_blocks_are_computed_again(
    which, verifying, server, prompts
):
    only_in_the_host_tier(verifying, prompts)
    before = verifying.counters()["corrupt_blocks"]
    with corrupting(verifying, which):
        got = verifying.complete(prompts.long, DECODE)
    assert got.tokens == prompts.right(prompts.long)
    assert verifying.counters()["corrupt_blocks"] - before == (PREFIX if which == ALL else 1)
    verifying.forget()
    again = verifying.complete(prompts.long, DECODE)
    assert again.tokens == prompts.right(prompts.long)
    assert again.cached == len(prompts.long) // BLOCK * BLOCK, "the damaged ones are still there"
    right_everywhere(verifying, prompts)
    no_leaks(server, verifying)
