"""The curves of a sweep as pictures: one figure a sweep, one panel a quantity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.replay.plots import DOTS_AN_INCH, MARKERS
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .engine import Work
from .points import PERCENTILES, Point

SUFFIXES = ("svg", "png")
COLUMNS = 3
PANEL_INCHES = (4.6, 3.3)

Quantity = Callable[[Point], float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel."""

    label: str
    points: Sequence[Point]
    value: Quantity


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    unit: str
    lines: Sequence[Line]


def write(folder: Path, name: str, title: str, points: Sequence[Point], x: str) -> list[Path]:
    """Draw points over their field `x`. Returns the files, SVG and PNG. Blocks."""
    kinds = by_kind(points)
    panels = [_requests(kinds), _blocks(kinds), _cpu(kinds), _shares(kinds)]
    if any(each.bytes_per_second for each in points):
        panels.insert(2, _bytes(kinds))
    panels += [panel for kind, found in kinds.items() for panel in _latencies(kind, found)]
    rows = -(-len(panels) // COLUMNS)
    size = (PANEL_INCHES[0] * COLUMNS, PANEL_INCHES[1] * rows)
    figure = Figure(figsize=size, dpi=DOTS_AN_INCH, layout="constrained")
    grid = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, panel, x)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(title)
    files = [folder / f"{name}.{suffix}" for suffix in SUFFIXES]
    for file in files:
        figure.savefig(file)
    return files


def by_kind(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the points of each kind of work; engines that pause are a kind of their own."""
    kinds: dict[str, list[Point]] = {}
    for point in points:
        pause = f", {point.think_seconds * 1e3:g} ms apart" if point.think_seconds else ""
        kinds.setdefault(f"{point.work}{pause}", []).append(point)
    return kinds


def _requests(kinds: dict[str, list[Point]]) -> Panel:
    return Panel("requests", "a second", _lines(kinds, lambda each: each.requests_per_second))


def _blocks(kinds: dict[str, list[Point]]) -> Panel:
    return Panel("blocks", "a second", _lines(kinds, lambda each: each.blocks_per_second))


def _bytes(kinds: dict[str, list[Point]]) -> Panel:
    copied = {kind: found for kind, found in kinds.items() if found[0].bytes_per_second}
    return Panel("bytes copied", "GB/s", _lines(copied, lambda each: each.bytes_per_second / 1e9))


def _cpu(kinds: dict[str, list[Point]]) -> Panel:
    lines = [
        *_lines(kinds, lambda each: each.server_cpu_per_block * 1e6, "server, "),
        *_lines(kinds, lambda each: each.engine_cpu_per_block * 1e6, "engines, "),
    ]
    return Panel("CPU time a block", "µs", lines)


def _shares(kinds: dict[str, list[Point]]) -> Panel:
    lines = _lines(kinds, lambda each: 100 * each.server_core_share, "server, ")
    lines += _lines(kinds, lambda each: 100 * each.machine_share, "machine, ")
    return Panel("the server's core, and all cores", "% busy", lines)


def _latencies(kind: str, points: Sequence[Point]) -> list[Panel]:
    calls = list(points[0].latency_seconds)
    if points[0].work is Work.LOAD:
        calls.remove("lookup")  # It has its panel.
    return [Panel(f"{kind}: {call}", "ms", _percentile_lines(points, call)) for call in calls]


def _percentile_lines(points: Sequence[Point], call: str) -> list[Line]:
    def at(name: str) -> Quantity:
        return lambda each: each.latency_seconds[call][name] * 1e3

    return [Line(name, points, at(name)) for name in PERCENTILES]


def _lines(kinds: dict[str, list[Point]], value: Quantity, before: str = "") -> list[Line]:
    return [Line(f"{before}{kind}", points, value) for kind, points in kinds.items()]


def _draw(axes: Axes, panel: Panel, x: str) -> None:
    for number, line in enumerate(panel.lines):
        axes.plot(
            [getattr(each, x) for each in line.points],
            [line.value(each) for each in line.points],
            label=line.label,
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
        )
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xscale("log", base=2 if x == "engines" else 10)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(panel.unit)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="x-small")
