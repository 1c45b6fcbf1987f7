"""An operator and an engine: what HTTP says of a prompt's blocks is what the engine then gets."""

from __future__ import annotations

import json
import urllib.request

import pytest
from harness import BLOCK, BLOCK_BYTES, holds, host_blocks, no_leaks, prompt
from inprocess import Ask
from support import until

BLOCKS = 96
PRESSURE = 8
"""Prompts of 24 blocks each that come after the pinned one: twice the tier."""


@pytest.fixture(scope="module")
def server(module_lab):
    return module_lab.server("--capacity", f"{BLOCKS * BLOCK_BYTES >> 10}KiB")


@pytest.fixture(scope="module")
def engine(module_lab, server):
    return module_lab.local_engine(server.socket)


def post(server, path, **body):
    data = json.dumps(body).encode()
    asked = urllib.request.Request(
        server.url + path, data, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return json.loads(answer.read())


def test_a_prompt_is_looked_up_pinned_and_dropped_by_its_tokens(engine, server):
    asked = prompt(1, 8 * BLOCK + 3)
    assert engine.complete(asked).cached == 0
    holds(server, 8)
    found = post(server, "/v1/blocks/lookup", tokens=asked)
    assert (found["block_tokens"], found["blocks"], found["matched_blocks"]) == (BLOCK, 8, 8)
    other = post(server, "/v1/blocks/lookup", tokens=prompt(2, 8 * BLOCK))
    assert other["matched_blocks"] == 0

    pin = post(server, "/v1/pins", tokens=asked, ttl_seconds=600)
    assert pin["blocks"] == 8
    cold = engine.complete(asked)
    for seed in range(PRESSURE):
        engine.complete(prompt(100 + seed, 24 * BLOCK))
    assert host_blocks(server) <= BLOCKS
    engine.forget()
    warm = engine.complete(asked)
    assert warm.cached == 8 * BLOCK, "a pin holds under pressure"
    assert warm.tokens == cold.tokens

    gone = post(server, "/v1/blocks/drop", tokens=asked[:BLOCK])["gone"]
    assert gone[0]["blocks"] >= 8
    engine.forget()
    missed = engine.complete(asked)
    assert missed.cached == 0, "what was dropped is computed"
    assert missed.tokens == cold.tokens
    no_leaks(server, engine)


def test_a_salted_prompt_is_found_with_its_salt_only(engine, server):
    asked = prompt(7, 4 * BLOCK + 1)
    engine.generate([Ask(asked, salt="acme", sampling={"max_tokens": 1})])

    def found():
        return post(server, "/v1/blocks/lookup", tokens=asked, salt="acme")["matched_blocks"] == 4

    until(found, "the blocks")
    assert post(server, "/v1/blocks/lookup", tokens=asked)["matched_blocks"] == 0
