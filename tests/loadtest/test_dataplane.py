"""The data plane's benchmark: it runs, its numbers fit each other, and wrong bytes end it."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvtier.core import PAGE_BYTES
from servers import clean_environment

from loadtest.dataplane.engine import Engine, Work
from loadtest.dataplane.points import Point
from loadtest.dataplane.prompts import Shape
from loadtest.dataplane.verdict import stops
from loadtest.rig import RigError

ROOT = Path(__file__).parents[2]
SHAPE = Shape(block_bytes=2 * PAGE_BYTES, prompt_blocks=6, store_blocks=3)
CALLS = {
    "lookup": {"lookup"},
    "load": {"lookup", "load"},
    "store": {"reserve", "copy_to_slots", "commit"},
}


@pytest.fixture
def engine(serve):
    served = serve().ready()
    engine = Engine(served.socket, "engine", SHAPE)
    yield served, engine
    engine.close()


@pytest.mark.slow
def test_the_command_writes_numbers_that_fit_each_other_and_curves(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.dataplane", "--quick", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert [len(found[name]) for name in ("engines", "copies", "directory")] == [8, 4, 6]
    for sweep in ("engines", "copies", "directory"):
        for point in found[sweep]:
            _check(point, found["plan"])
        for suffix in ("svg", "png"):
            assert (tmp_path / f"{sweep}.{suffix}").stat().st_size > 10_000
        assert f"({sweep}.svg)" in (tmp_path / "README.md").read_text()


def _check(point, plan):
    shape = plan["small" if point["block_bytes"] == PAGE_BYTES else "large"]
    whole = shape["store_blocks" if point["work"] == "store" else "prompt_blocks"]
    blocks = point["blocks_per_second"]
    assert blocks == pytest.approx(point["requests_per_second"] * whole)
    copied = 0 if point["work"] == "lookup" else shape["block_bytes"]
    assert point["bytes_per_second"] == pytest.approx(blocks * copied)
    assert point["latency_seconds"].keys() == CALLS[point["work"]]
    for times in point["latency_seconds"].values():
        assert 0 < times["p50"] <= times["p95"] <= times["p99"]
    assert point["server_cpu_per_block"] * blocks == pytest.approx(point["server_core_share"])
    assert point["engine_cpu_per_block"] > 0
    assert 0 < point["machine_share"] <= 1


def test_an_engine_gets_the_bytes_that_another_one_stored(engine):
    served, first = engine
    first.add("prompt", SHAPE.prompt_blocks)
    second = Engine(served.socket, "second", SHAPE)
    second.load_whole("prompt")
    assert second.turn(Work.LOAD, "prompt") == SHAPE.prompt_blocks
    second.close()


def test_one_changed_byte_inside_a_block_is_noticed(engine):
    served, one = engine
    one.add("prompt", SHAPE.prompt_blocks)
    one.load_whole("prompt")
    _change(served.process.pid, one, SHAPE.block_bytes // 2)
    with pytest.raises(RigError, match="1 of 6 blocks have wrong bytes"):
        one.load_whole("prompt")


def test_another_blocks_bytes_are_noticed_in_every_load(engine):
    served, one = engine
    one.add("prompt", SHAPE.prompt_blocks)
    _change(served.process.pid, one, 0)
    with pytest.raises(RigError, match="1 of 6 blocks have wrong bytes"):
        one.turn(Work.LOAD, "prompt")


def test_a_prompt_that_is_not_there_ends_the_measurement(engine):
    _, one = engine
    with pytest.raises(RigError, match="0 of 6 blocks of nothing were there"):
        one.turn(Work.LOOKUP, "nothing")


def _change(pid, engine, at):
    """Change one byte of a stored block in the server's memory."""
    [slab] = [link for link in Path(f"/proc/{pid}/fd").iterdir() if _holds_blocks(link)]
    descriptor = os.open(slab, os.O_RDWR)
    with mmap.mmap(descriptor, os.fstat(descriptor).st_size) as memory:
        memory[at] ^= 0xFF
    os.close(descriptor)


def _holds_blocks(link):
    if "memfd:kvtier" not in str(link.readlink()):
        return False
    with link.open("rb") as slab:
        return any(slab.read(SHAPE.block_bytes))


@pytest.mark.parametrize(
    ("rates", "server", "machine", "said"),
    [
        ((100, 190, 300), 0.5, 0.5, "still rises at 4 engines (300 requests/s)."),
        ((100, 105, 300), 0.5, 0.5, "still rises at 4 engines (300 requests/s)."),
        ((100, 190, 195), 0.95, 1.0, "2 engines (190 requests/s): the server's one core is full"),
        ((100, 101, 102), 0.5, 1.0, "1 engine (100 requests/s): all cores of the machine are busy"),
        ((100, 101, 102), 0.5, 0.5, "nothing is full (server 50 % of a core, machine 50 %)"),
    ],
)
def test_a_curve_that_stops_says_why(rates, server, machine, said):
    points = [_point(2**at, rate, server, machine) for at, rate in enumerate(rates)]
    assert said in stops(points)


def _point(engines, rate, server, machine):
    return Point(
        work=Work.LOOKUP,
        engines=engines,
        directory_blocks=1,
        block_bytes=1,
        think_seconds=0.0,
        requests_per_second=rate,
        blocks_per_second=rate,
        bytes_per_second=0.0,
        latency_seconds={},
        server_cpu_per_block=0.0,
        engine_cpu_per_block=0.0,
        server_core_share=server,
        engines_core_share=0.0,
        machine_share=machine,
    )
