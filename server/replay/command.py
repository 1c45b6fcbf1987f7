"""`kvtier replay`: what each way to run and each size would have hit on recorded requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..output import plain_console, print_json
from .bound import BOUND, bound
from .grid import Grid, ReplayOptions, Way
from .plots import check_plot, write_plot
from .readers import read_together, together
from .report import Cell, Report, cell, summary, table
from .simulator import replay
from .trace import Trace


def run_replay(options: ReplayOptions, *, as_json: bool) -> None:
    """Replay each file and print what was found. Blocks. Raises TraceError, SettingsError."""
    grid = Grid(options)
    if options.plot is not None:
        check_plot(options.plot)
    console = plain_console()
    groups = together(options.files)
    reports = [_replay_files(files, grid) for files in groups]
    if as_json:
        print_json(reports)
    else:
        for report in reports:
            console.print(table(report), summary(report), "")
    if options.plot is not None:
        for report, file in zip(reports, _plot_files(options.plot, reports), strict=True):
            write_plot(report, file)


def _replay_files(files: Sequence[Path], grid: Grid) -> Report:
    name = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with progress:
        reading = progress.add_task(f"reading {name}", total=sum(map(_bytes_of, files)))
        trace = read_together(files, lambda more: progress.advance(reading, more))
        progress.remove_task(reading)
        setups = list(grid.setups(trace))
        runs = len(setups) + len(grid.sizes) + 1
        task = progress.add_task("", total=len(trace) * runs)
        block_bytes = grid.block_bytes(trace)

        def advance(more: int) -> None:
            progress.advance(task, more)

        cells: list[Cell] = []
        for way, sizes, setup in setups:
            progress.update(task, description=f"{name}: {way.label} at {sizes.label}")
            outcome = replay(trace, setup, advance)
            cells.append(cell(trace, way, sizes, outcome, block_bytes))
        progress.update(task, description=f"{name}: {BOUND}")
        unlimited = bound(trace, trace.distinct, advance).hit_ratio(trace)
        for sizes in grid.sizes:
            outcome = bound(trace, grid.total(trace, sizes), advance)
            cells.append(cell(trace, Way(BOUND), sizes, outcome, block_bytes))
    return _report(trace, name, unlimited, cells)


def _report(trace: Trace, name: str, unlimited: float, cells: list[Cell]) -> Report:
    return Report(
        file=name,
        format=trace.format,
        block_tokens=trace.block_tokens,
        requests=len(trace),
        tokens=trace.tokens,
        block_accesses=trace.accesses,
        distinct_blocks=trace.distinct,
        unlimited_hit_ratio=round(unlimited, 6),
        cells=cells,
    )


def _bytes_of(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _plot_files(plot_file: Path, reports: Sequence[Report]) -> list[Path]:
    """Return where each trace's plot goes: the name given, or one a trace beside it."""
    if len(reports) == 1:
        return [plot_file]
    return [
        plot_file.with_stem(f"{plot_file.stem}-{number}-{report.file.split('.')[0]}")
        for number, report in enumerate(reports, 1)
    ]
