"""Several systems side by side: ratios to one of them, request by request and run by run.

Runs of one system in one scenario are repetitions. The first one is paired with the base system's
first one, and so on (and round again, where that one ran less often); inside a pair, requests are
paired by their names.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

from ..report import quartiles
from .summary import Labelled, Summary, answered, summarise


@dataclass(frozen=True, slots=True)
class Spread:
    """A ratio's median with what lies around it: quartiles, or the least and the largest."""

    low: float
    middle: float
    high: float
    samples: int


@dataclass(frozen=True, slots=True)
class Ratios:
    """One system ÷ the base system in one scenario. None where no pair has both."""

    scenario: str
    system: str
    ttft: Spread | None
    """Of paired requests: median and quartiles. Below 1 is sooner."""
    throughput: Spread | None
    """Answered requests a second, of paired runs: median, least and largest. Above 1 is more."""
    same_outputs: int
    """Paired requests whose whole answers were equal."""
    compared_outputs: int


def systems(runs: Sequence[Labelled]) -> list[str]:
    """Return the systems in the order in which they first appear."""
    return list(dict.fromkeys(each.system for each in runs))


def scenarios(runs: Sequence[Labelled]) -> list[str]:
    """Return the scenarios in the order in which they first appear."""
    return list(dict.fromkeys(each.scenario for each in runs))


def runs_of(runs: Sequence[Labelled], system: str, scenario: str) -> list[Labelled]:
    """Return the repetitions of one system in one scenario."""
    return [each for each in runs if (each.system, each.scenario) == (system, scenario)]


def ratios(runs: Sequence[Labelled], base: str) -> list[Ratios]:
    """Return each system ÷ `base`, scenario by scenario; nothing where `base` did not run."""
    found = []
    for scenario in scenarios(runs):
        bases = runs_of(runs, base, scenario)
        for system in systems(runs):
            pairs = list(zip(runs_of(runs, system, scenario), cycle(bases), strict=False))
            if pairs and system != base:
                found.append(_ratios(scenario, system, pairs))
    return found


Pair = tuple[Labelled, Labelled]


def _ratios(scenario: str, system: str, pairs: Sequence[Pair]) -> Ratios:
    ttfts: list[float] = []
    same = compared = 0
    for one, base in pairs:
        bases = {each.name: each for each in answered(base.run.records)}
        for record in answered(one.run.records):
            other = bases.get(record.name)
            if other is None:
                continue
            compared += 1
            same += record.digest == other.digest
            if record.ttft is not None and other.ttft:
                ttfts.append(record.ttft / other.ttft)
    return Ratios(scenario, system, _quartiles(ttfts), _throughput(pairs), same, compared)


def _quartiles(samples: Sequence[float]) -> Spread | None:
    return Spread(*quartiles(samples), len(samples)) if samples else None


def _throughput(pairs: Sequence[Pair]) -> Spread | None:
    rates = [(summarise(one).rates, summarise(base).rates) for one, base in pairs]
    samples = [one.requests / base.requests for one, base in rates if base.requests]
    return spread(samples) if samples else None


def spread(samples: Sequence[float]) -> Spread:
    """Return the median, the least and the largest."""
    return Spread(min(samples), statistics.median(samples), max(samples), len(samples))


def ttfts(runs: Sequence[Labelled]) -> list[float]:
    """Return the TTFT of every answer of some runs, from the least on."""
    good = [record for each in runs for record in answered(each.run.records)]
    return sorted(record.ttft for record in good if record.ttft is not None)


def over_runs(runs: Sequence[Labelled], value: Callable[[Summary], float]) -> Spread:
    """Return a figure of several repetitions: median, least and largest."""
    return spread([value(summarise(each)) for each in runs])
