"""Sweeps: points with ever more engines, and with ever more blocks in the directory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .engine import Work
from .fleet import Fleet
from .points import Filled, Point, filled, measure
from .prompts import Shape

THINK_SECONDS = 0.005
"""What an engine that computes takes between two requests, at the least."""
FILLERS = 2
"""Engines that fill a server: more would not do it sooner on a few cores."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    engines: Sequence[int]
    blocks: Sequence[int]
    seconds: float
    """Of each point."""
    small: Shape
    """Blocks of the smallest size: what is measured is bookkeeping."""
    large: Shape
    """Blocks of a usual size: what is measured is copies."""
    engines_blocks: int
    """Small blocks in the directory while the number of engines grows."""
    large_blocks: int
    directory_engines: int
    """Engines while the directory grows."""


@dataclass(frozen=True, slots=True)
class Results:
    """Points of each sweep, in rising order of what grows."""

    engines: Sequence[Point]
    copies: Sequence[Point]
    directory: Sequence[Point]


class Progress:
    """Says on stderr what is done. `points` are those to come in all."""

    def __init__(self, points: int) -> None:
        self._points = points
        self._done = 0

    def add(self, point: Point) -> Point:
        """A point is measured."""
        self._done += 1
        _say(
            f"{self._done:3}/{self._points} {point.work:6} {point.engines:3} engines "
            f"{point.directory_blocks:9,} blocks: {point.requests_per_second:8,.0f} requests/s, "
            f"server {100 * point.server_core_share:3.0f} % of a core, "
            f"machine {100 * point.machine_share:3.0f} %"
        )
        return point


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(plan: Plan) -> Results:
    """Measure all points. Raises RigError or StackError."""
    progress = Progress(len(plan.engines) * 6 + len(plan.blocks) * len(Work))
    most = max(*plan.engines, plan.directory_engines, FILLERS)
    with Fleet(most) as fleet:
        return Results(
            engines=[progress.add(each) for each in _engines(fleet, plan)],
            copies=[progress.add(each) for each in _copies(fleet, plan)],
            directory=[progress.add(each) for each in _directory(fleet, plan)],
        )


def _engines(fleet: Fleet, plan: Plan) -> Iterator[Point]:
    """Bookkeeping by ever more engines: without any pause, and with that of one that computes."""
    with filled(fleet, plan.small, plan.engines_blocks, FILLERS) as at:
        for work, think in ((Work.LOOKUP, THINK_SECONDS), (Work.LOOKUP, 0.0), (Work.LOAD, 0.0)):
            yield from _by_engines(fleet, at, plan, work, think)
        # Stores come last: they let prompts go that the others ask for.
        yield from _by_engines(fleet, at, plan, Work.STORE)


def _copies(fleet: Fleet, plan: Plan) -> Iterator[Point]:
    """Copies of large blocks by ever more engines."""
    with filled(fleet, plan.large, plan.large_blocks, FILLERS) as at:
        for work in (Work.LOAD, Work.STORE):
            yield from _by_engines(fleet, at, plan, work)


def _by_engines(
    fleet: Fleet, at: Filled, plan: Plan, work: Work, think: float = 0.0
) -> Iterator[Point]:
    for count in plan.engines:
        with at.joined(fleet, count) as engines:
            yield measure(engines, at, work, plan.seconds, think)


def _directory(fleet: Fleet, plan: Plan) -> Iterator[Point]:
    """The same work with ever more blocks in the directory."""
    for blocks in plan.blocks:
        with filled(fleet, plan.small, blocks, FILLERS) as at:
            for work in Work:
                with at.joined(fleet, plan.directory_engines) as engines:
                    yield measure(engines, at, work, plan.seconds)
