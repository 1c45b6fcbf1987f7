"""The runner against a server that answers right, and in each way wrong."""

import asyncio
import re
import signal
import sys
from itertools import pairwise

import faults
import pytest
from kvtier.endpoints import free_port

from loadtest.traffic.records import Failure, read_records
from loadtest.traffic.requests import Request, TrafficError, Workload
from loadtest.traffic.runner import Closed, Open, RunOptions, run
from loadtest.traffic.stream import Limits, digest

QUICK = Limits(connect=5.0, silence=0.2, answer=0.5)
OUTPUT = 4


def request(number, how=faults.GOOD, **fields):
    return Request(f"r{number}", (how, number, *range(10)), OUTPUT, **fields)


def workload(*requests):
    return Workload("test", "For tests.", 1, requests)


async def ask(server, *requests, loop=None, **options):
    sent = workload(*requests)
    loop = loop or Closed(2)
    return await run(server.url, "m", sent, loop, progress=False, options=RunOptions(**options))


async def one(server, how, **options):
    done = await ask(server, request(0, how), request(1), loop=Closed(1), **options)
    bad, good = done.records
    assert good.failure is None, "the run goes on"
    return bad


async def test_a_right_answer_is_recorded_with_all_that_it_said(server):
    (record,) = (await ask(server, request(7))).records
    assert (record.failure, record.error) == (None, None)
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (12, 4, 4)
    assert len(record.gaps) == OUTPUT - 1, "an end without text is no token"
    assert 0 < record.ttft < record.seconds
    assert record.digest == digest("7.0 7.1 7.2 7.3 ")


async def test_a_request_asks_for_a_greedy_answer_of_fixed_length(server):
    await ask(server, request(7))
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [faults.GOOD, 7, *range(10)],
            "max_tokens": OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize(
    ("how", "failure", "said"),
    [
        (faults.STATUS, Failure.STATUS, "answered 500: .*the engine is dead"),
        (faults.CUT, Failure.LOST, "ended without an end mark, after 2 pieces"),
        (faults.LOST, Failure.LOST, "The connection was lost"),
        (faults.SILENT, Failure.TIMEOUT, r"Nothing came for 0.2 s \(limit: silence\)"),
        (faults.ENDLESS, Failure.TIMEOUT, r"not whole after 0.5 s \(limit: answer\)"),
        (faults.WRONG_USAGE, Failure.USAGE, "counts 5 output tokens, and not 4"),
        (faults.NO_USAGE, Failure.USAGE, "came without usage"),
        (faults.RUBBISH, Failure.MALFORMED, "no completion"),
        (faults.SAYS_ERROR, Failure.STATUS, "said in the stream: .*out of memory"),
    ],
)
async def test_a_wrong_answer_is_recorded_with_what_happened(server, how, failure, said):
    record = await one(server, how, limits=QUICK)
    assert record.failure is failure
    assert re.search(said, record.error), record.error


async def test_a_server_that_is_not_there_refuses_each_request():
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    done = await run(url, "m", workload(request(0), request(1)), Closed(2), progress=False)
    assert [record.failure for record in done.records] == [Failure.REFUSED] * 2
    assert done.sources is None


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://here", "http://", ""])
async def test_what_is_no_url_is_refused(url):
    with pytest.raises(TrafficError, match="no URL"):
        await run(url, "m", workload(request(0)), Closed(1), progress=False)


@pytest.mark.parametrize("loop", [Closed(0), Open(0), Open(-1.0)])
async def test_a_loop_that_sends_nothing_is_refused(server, loop):
    with pytest.raises(TrafficError, match="name"):
        await ask(server, request(0), loop=loop)


@pytest.mark.parametrize("users", [1, 3])
async def test_so_many_users_ask_at_once_and_no_more(server, users):
    server.gate.clear()

    def all_there():
        if server.under_way == users:
            server.gate.set()

    server.arrived = all_there
    done = await ask(server, *map(request, range(9)), loop=Closed(users))
    assert server.most_under_way == users
    assert len(done.records) == 9


async def test_a_turn_is_sent_when_the_one_before_it_has_ended(server):
    turns = [request(0), *(request(n, after=f"r{n - 1}") for n in range(1, 4))]
    for loop in (Closed(4), Open()):
        server.ended.clear()
        done = await ask(server, *turns, loop=loop)
        assert server.ended == [0, 1, 2, 3]
        spans = sorted((record.sent, record.ended) for record in done.records)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


async def test_a_session_goes_on_after_a_turn_that_failed(server):
    done = await ask(server, request(0, faults.STATUS), request(1, after="r0"))
    assert [record.failure for record in done.records] == [Failure.STATUS, None]


async def test_users_take_the_first_request_of_the_workload_that_may_be_sent(server):
    requests = [request(0), request(1, after="r0"), request(2), request(3)]
    await ask(server, *requests, loop=Closed(1))
    assert server.ended == [0, 1, 2, 3]


async def test_the_open_loop_sends_at_its_times_whatever_is_under_way(server):
    server.gate.clear()

    def all_there():
        if server.under_way == 3:
            server.gate.set()

    server.arrived = all_there
    requests = [request(n, at=n * 0.2) for n in range(3)]
    done = await ask(server, *requests, loop=Open(rate=4.0))
    sent = sorted(record.sent for record in done.records)
    assert all(time >= n * 0.05 for n, time in enumerate(sent)), "none before its time"
    assert server.most_under_way == 3


async def test_what_the_open_loop_sends_late_says_so(server):
    requests = [request(0), request(1), request(2, faults.SILENT), request(3, at=0.0, after="r2")]
    done = await ask(server, *requests, loop=Open(at_most=4), limits=QUICK)
    late = {record.name: record.late for record in done.records}
    assert late["r3"] >= QUICK.silence


async def test_no_more_are_under_way_than_the_open_loop_allows(server):
    done = await ask(server, *map(request, range(6)), loop=Open(at_most=2))
    assert server.most_under_way <= 2
    assert len(done.records) == 6


async def test_cached_tokens_are_told_by_source(server):
    before = await ask(server, request(0))
    done = await ask(server, request(1), request(2))
    for found, requests in ((before.sources, 1), (done.sources, 2)):
        assert (found.prompt, found.device, found.connector) == (
            12 * requests,
            requests,
            3 * requests,
        )
        assert found.tiers == {"device": requests, "host": 3 * requests}
        assert found.computed == 8 * requests
        assert found.engine == {"kvtier_engine_loaded_bytes_total": 3 * requests}


async def test_a_server_without_metrics_has_no_sources(server):
    server.metrics = False
    assert (await ask(server, request(0))).sources is None


async def test_records_are_in_the_file_in_the_order_in_which_they_ended(server, tmp_path):
    file = tmp_path / "raw.jsonl"
    done = await ask(server, *map(request, range(5)), request(9, faults.STATUS), raw=file)
    assert read_records(file) == done.records
    assert len(done.records) == 6


async def test_half_a_line_at_the_end_is_passed_over(server, tmp_path):
    file = tmp_path / "raw.jsonl"
    done = await ask(server, request(0), request(1), raw=file)
    file.write_bytes(file.read_bytes()[:-10])
    assert read_records(file) == done.records[:1]


def test_a_line_that_is_no_record_is_named(tmp_path):
    file = tmp_path / "raw.jsonl"
    file.write_text('{"name":"a","sent":0,"ended":1}\n{"name":3}\n')
    with pytest.raises(TrafficError, match="line 2: no record"):
        read_records(file)


KILLED = """
import asyncio, sys
from loadtest.traffic.requests import Request, Workload
from loadtest.traffic.runner import Closed, RunOptions, run
from pathlib import Path
url, raw = sys.argv[1:]
requests = tuple(Request(f"r{n}", (0, n, 1, 2), 2) for n in range(100_000))
options = RunOptions(raw=Path(raw))
asyncio.run(run(url, "m", Workload("w", "", 1, requests), Closed(2), options=options))
"""


async def test_a_run_that_was_killed_leaves_what_it_had(server, tmp_path):
    raw = tmp_path / "raw.jsonl"
    run_it = ("-c", KILLED, server.url, str(raw))
    process = await asyncio.create_subprocess_exec(sys.executable, *run_it)
    while len(server.ended) < 20:
        assert process.returncode is None
        await asyncio.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    records = read_records(raw)
    assert len(records) >= 18, "all but those of the two users"
    assert all(record.failure is None for record in records)
