"""Other arrangements of vLLM: beside another connector, and with several API servers."""

from __future__ import annotations

import collections
import http.client
import json
import random
import re
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

import pytest
from faulty import corrupting
from harness import BLOCK, no_leaks, prompt, transfer_config
from inprocess import Ask
from support import until

DECODE = 24


@pytest.fixture(scope="module")
def server(module_lab):
    return module_lab.server()


# Beside another connector.


@pytest.fixture(scope="module", params=["first", "second"])
def beside(request, module_lab, server):
    """kvtier as a child of vLLM's MultiConnector; the other child keeps whole prompts in files."""
    files = module_lab.folder / f"files-{request.param}"
    files.mkdir()
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }
    children = [transfer_config(server.socket), other]
    if request.param == "second":
        children.reverse()
    return module_lab.local_engine(kv_transfer_config=with_children(children))


def with_children(children):
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }


def test_beside_another_connector_its_prefixes_come_back(beside, server, plain):
    """Prompts that share a prefix with earlier ones: the other child has whole prompts only."""
    asked = [prompt(1, 5 * BLOCK) + prompt(2 + n, BLOCK + 3) for n in range(4)]
    cold = [each.tokens for each in plain.complete_all(asked, DECODE)]
    beside.forget_all()
    assert beside.complete(asked[0], DECODE).tokens == cold[0]
    beside.forget()
    host = beside.cached_by_source()["host"]
    warm = beside.complete_all(asked[1:], DECODE)
    assert [each.tokens for each in warm] == cold[1:]
    assert all(each.cached == 5 * BLOCK for each in warm)
    assert beside.cached_by_source()["host"] - host == 5 * BLOCK
    no_leaks(server, beside)


def test_beside_another_connector_a_corrupted_block_changes_the_answer(beside, plain):
    """So that the comparison above means something."""
    shared = prompt(20, 5 * BLOCK)
    asked = shared + prompt(21, 7)
    cold = plain.complete(asked, DECODE)
    beside.complete(shared, 2)
    beside.forget()
    with corrupting(beside, "slice(2, 3)"):
        damaged = beside.complete(asked, DECODE)
    assert damaged.cached == 5 * BLOCK
    assert damaged.tokens != cold.tokens
    beside.forget_all()


def test_beside_another_connector_an_answer_is_a_prefix_of_the_next_turn(beside, plain):
    asked = prompt(30, 2 * BLOCK)
    answer = beside.complete(asked, 2 * BLOCK + 1)
    turn = [*asked, *answer.tokens, *prompt(31, 5)]
    beside.forget()
    warm = beside.complete(turn, DECODE)
    assert warm.cached == 4 * BLOCK
    assert warm.tokens == plain.complete(turn, DECODE).tokens


def test_beside_another_connector_ended_and_aborted_requests_leave_nothing(beside, server):
    asks = [Ask(prompt(40 + n, 3 * BLOCK), sampling={"max_tokens": DECODE}) for n in range(6)]
    beside.generate(asks[:3])
    beside.forget()
    ids = beside.start(asks)
    beside.step()
    beside.abort(ids[::2])
    beside.drain()
    assert beside.run("result = len(scheduler_side()._requests)") == 0, "ended, and remembered"
    no_leaks(server, beside)


def test_what_another_connector_failed_to_load_is_never_stored(lab, plain):
    """The step in which it fails computes whole blocks on what is not there."""
    server = lab.server()
    broken = {
        "kv_connector": "BrokenConnector",
        "kv_connector_module_path": "broken_child",
        "kv_role": "kv_both",
    }
    children = with_children([broken, transfer_config(server.socket)])
    engine = lab.local_engine(kv_transfer_config=children)
    asked = prompt(45, 6 * BLOCK + 3)
    cold = plain.complete(asked, DECODE)
    promised = engine.complete(asked, DECODE)
    assert (promised.cached, promised.tokens) == (2 * BLOCK, cold.tokens)
    no_leaks(server, engine)
    other = lab.local_engine(server.socket)
    for _ in range(2):
        assert other.complete(asked, DECODE).tokens == cold.tokens
        other.forget()
    assert other.complete(asked, DECODE).cached == 6 * BLOCK
    no_leaks(server, engine, other)


# Several API servers.


@pytest.fixture(scope="module")
def online(module_lab, server):
    options = ("--api-server-count", "2", "--enable-log-requests")
    return module_lab.engine(server.socket, *options)


def test_two_api_servers_both_serve_what_one_engine_has_stored(online, server, plain):
    asked = [prompt(50, 6 * BLOCK) + prompt(51 + n, 5) for n in range(4)]
    cold = [each.tokens for each in plain.complete_all(asked, DECODE)]
    assert [online.complete(each, DECODE).tokens for each in asked] == cold
    online.forget()
    with ThreadPoolExecutor(8) as pool:
        warm = list(pool.map(lambda n: online.complete(asked[n % 4], DECODE), range(40)))
    assert [each.tokens for each in warm] == cold * 10
    assert all(each.cached == 6 * BLOCK for each in warm)
    log = online.part.log.read_text()
    servers = re.findall(r"^\(ApiServer_(\d) .* Received request", log, re.MULTILINE)
    assert len(set(servers)) == 2, "one API server did everything"
    no_leaks(server, online)


def test_each_series_stands_once_with_one_value_in_every_scrape(online):
    """Case B42: whichever API server is asked tells of all, and no gauge outlives a process."""
    ours = set()
    for _ in range(20):
        series = online.series()
        times = collections.Counter(name for name, _ in series)
        assert not [name for name, n in times.items() if n > 1]
        ours.add(tuple(one for one in series if one[0].startswith("kvtier_engine_")))
    assert len(ours) == 1, "nothing happened meanwhile"
    assert any(name.startswith("kvtier_engine_loaded_blocks_total{") for name, _ in ours.pop())
    assert online.sum("kvtier_engine_loaded_blocks_total") >= 6
    told = online.part.get("/metrics")
    kinds = re.findall(r"^# TYPE kvtier_engine_\S+ (\w+)$", told, re.MULTILINE)
    assert set(kinds) == {"counter"}, "what a killed process leaves are sums, which stay true"


ABORTS = 200


def hang_up(online, number):
    """Ask for a stream, read a random number of its lines, and go away."""
    dice = random.Random(number)
    address = urllib.parse.urlsplit(online.part.url)
    tokens = prompt(60, 3 * BLOCK) + prompt(61 + dice.randrange(20), dice.randrange(1, 6 * BLOCK))
    body = {"model": online.model, "prompt": tokens, "max_tokens": 200, "stream": True}
    line = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    line.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if lines := dice.randrange(12):
        answer = line.getresponse()
        for _ in range(lines):
            answer.readline()
        answer.close()
    line.close()


def test_200_clients_that_hang_up_leave_nothing_behind(online, server, plain):
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(lambda number: hang_up(online, number), range(ABORTS)):
            pass
    waiting = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    until(lambda: not any(map(online.sum, waiting)), "the end of all requests", 60)
    no_leaks(server, online)
    asked = [prompt(60, 3 * BLOCK) + prompt(61 + n, 2 * BLOCK + n) for n in range(6)]
    cold = [each.tokens for each in plain.complete_all(asked, DECODE)]
    assert [online.complete(each, DECODE).tokens for each in asked] == cold
    no_leaks(server, online)
