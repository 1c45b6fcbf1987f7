"""Two figures of the data plane: how it bears a large directory, and many engines.

`directory_scale`: two servers at once, one with a thousand blocks of the smallest size and one with
a million. An engine asks both in turn (ABBA) for prompts of 640 blocks that are there, each time
for any of those that the server has. With a million blocks that is one which neither the server
nor the processor's caches have seen lately, as it is when a user comes back to a chat: with a
thousand there is one prompt only. What a prompt that was asked for just before takes is printed
beside it. What a server does after its answer is done before the next question.

`engine_scale`: requests of 16 engines a second ÷ of one, in turn on one server. A request is what
a scheduler asks for one: a lookup of 640 blocks, and the end of the lease. Engines think for 5 ms
between requests, as long as a fast step takes: one that asked 200 times a second for 10,000 tokens
would compute nothing any more. Without that pause one engine alone nearly fills the server's core,
because it waits for nothing but the server, and no number of engines could do three times as much;
that is printed beside it, with the server's share of a core.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

from ..report import Row, show
from .engine import Engine, Work
from .fleet import Fleet
from .points import Filled, Point, filled, measure
from .prompts import Shape
from .sweeps import FILLERS, THINK_SECONDS

SHAPE = Shape(block_bytes=4096, prompt_blocks=640, store_blocks=64)
SMALL, LARGE = 1_000, 1_000_000
PAIRS = 300
WARM_UP = 30
ENGINES = 16
ENGINE_BLOCKS = 10_000
SECONDS = 3.0
RUNS = 5


def directory_scale() -> list[float]:
    """Return the time of a lookup with a million blocks ÷ with a thousand, pair by pair."""
    with contextlib.ExitStack() as ends:
        fleet = ends.enter_context(Fleet(FILLERS))
        servers = [
            ends.enter_context(filled(fleet, SHAPE, blocks, FILLERS)) for blocks in (SMALL, LARGE)
        ]
        small, large = (_Asker(server) for server in servers)
        ends.callback(small.engine.close)
        ends.callback(large.engine.close)
        pairs = [_pair(small, large) for _ in range(WARM_UP + PAIRS)][WARM_UP:]
    few, many, again = zip(*pairs, strict=True)
    ratios = [b / a for a, b in zip(few, many, strict=True)]
    rows = [
        Row(f"{SMALL:,} blocks", few, "µs", 1e6),
        Row(f"{LARGE:,} blocks", many, "µs", 1e6),
        Row(f"{LARGE:,} blocks, the same prompt again", again, "µs", 1e6),
        Row("ratio", ratios),
        Row("ratio, the same prompt again", [b / a for a, b in zip(few, again, strict=True)]),
    ]
    show(f"a lookup of {SHAPE.prompt_blocks} blocks", rows)
    return ratios


class _Asker:
    """An engine of a server's own, which asks for its prompts in any order."""

    def __init__(self, server: Filled) -> None:
        self.engine = Engine(server.socket, "asker", SHAPE)
        self._prompts = server.prompts
        self._random = random.Random(1)

    def any(self) -> str:
        """Return one of the server's prompts."""
        return self._random.choice(self._prompts)

    def ask(self, prompt: str) -> float:
        """Return the seconds of a lookup."""
        self.engine.turn(Work.LOOKUP, prompt)
        self.engine.settle()
        return self.engine.seconds["lookup"].pop()


def _pair(small: _Asker, large: _Asker) -> tuple[float, float, float]:
    """Ask in turn. Returns the mean of both servers, and what a prompt asked for again took."""
    first, second = large.any(), large.any()
    a = small.ask(small.any())
    b = large.ask(first)
    again = large.ask(first)
    b += large.ask(second)
    a += small.ask(small.any())
    return a / 2, b / 2, again


def engine_scale() -> list[float]:
    """Return the requests a second of 16 engines ÷ of one, run by run."""
    with Fleet(ENGINES) as fleet, filled(fleet, SHAPE, ENGINE_BLOCKS, FILLERS) as at:
        counts = (1, ENGINES)
        found = [[_by(fleet, at, count, THINK_SECONDS) for count in counts] for _ in range(RUNS)]
        bare = [_by(fleet, at, count, 0.0) for count in counts]
    ratios = [many.requests_per_second / one.requests_per_second for one, many in found]
    rows = [Row("ratio", ratios)]
    for points in zip(*found, strict=True):
        rows += _rows(points, "")
    for point in bare:
        rows += _rows([point], "without a pause, ")
    show(f"requests of {SHAPE.prompt_blocks} blocks, {THINK_SECONDS * 1e3:g} ms apart", rows)
    return ratios


def _rows(points: Sequence[Point], how: str) -> list[Row]:
    what = f"{how}engines: {points[0].engines}"
    return [
        Row(f"{what}, a second", [each.requests_per_second for each in points]),
        Row(f"{what}, server's share of a core", [each.server_core_share for each in points]),
        Row(f"{what}, share of the machine", [each.machine_share for each in points]),
    ]


def _by(fleet: Fleet, at: Filled, engines: int, think: float) -> Point:
    with at.joined(fleet, engines) as joined:
        return measure(joined, at, Work.LOOKUP, SECONDS, think)
