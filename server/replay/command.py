"""`kvtier replay`: what each policy and size would have hit on recorded requests."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import SettingsError
from ..policies import POLICIES
from ..sizes import parse_size
from .readers import read_trace
from .report import Cell, Report, cell, plot, summary, table
from .simulator import BOUND, replay
from .trace import Trace

SIZES = ("1%", "5%", "10%", "25%")
"""Shares of a trace's distinct blocks that are tried unless others are named."""
PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay. Sizes are texts such as "10%" (of the distinct blocks) or "20GiB"."""

    files: Sequence[Path]
    policies: Sequence[str] = ()
    """Names; empty for all of them."""
    sizes: Sequence[str] = SIZES
    block_bytes: str | None = None
    """Bytes of one block, such as "2MiB"; needed for sizes in bytes."""
    plot: Path | None = None
    """SVG file to write."""


def run_replay(options: ReplayOptions, *, as_json: bool) -> None:
    """Replay each file and print what was found. Blocks. Raises TraceError, SettingsError."""
    policies = [*_known(options.policies), BOUND]
    block_bytes = None if options.block_bytes is None else _size(options.block_bytes, "block bytes")
    for size in options.sizes:
        _blocks(size, 100, block_bytes)  # Before the first file is read, which takes a while.
    if options.plot is not None and options.plot.suffix != ".svg":
        raise SettingsError(f"{options.plot} is no name for a plot: kvtier writes SVG, plot.svg.")
    console = Console(highlight=False, markup=False, emoji=False)
    reports = [_replay_file(file, policies, options.sizes, block_bytes) for file in options.files]
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(reports), indent=2).decode()
        console.print(text, soft_wrap=True)
    else:
        for report in reports:
            console.print(table(report), summary(report), "")
    if options.plot is not None:
        for report, file in zip(reports, _plot_files(options.plot, options.files), strict=True):
            _write(file, plot(report))


def _replay_file(
    file: Path, policies: Sequence[str], sizes: Sequence[str], block_bytes: int | None
) -> Report:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with progress:
        reading = progress.add_task(f"reading {file.name}", total=_bytes_of(file))
        trace = read_trace(file, lambda more: progress.advance(reading, more))
        progress.remove_task(reading)
        task = progress.add_task("", total=len(trace) * (len(policies) * len(sizes) + 1))

        def run(policy: str, size: str) -> Cell:
            progress.update(task, description=f"{file.name}: {policy} at {size}")
            capacity = _blocks(size, trace.distinct, block_bytes)
            outcome = replay(trace, policy, capacity, lambda more: progress.advance(task, more))
            return cell(trace, outcome, size, block_bytes)

        unlimited = replay(trace, BOUND, trace.distinct).hit_ratio(trace)
        cells = [run(policy, size) for policy in policies for size in sizes]
    return _report(trace, unlimited, cells)


def _report(trace: Trace, unlimited: float, cells: list[Cell]) -> Report:
    return Report(
        file=trace.file.name,
        format=trace.format,
        block_tokens=trace.block_tokens,
        requests=len(trace),
        tokens=trace.tokens,
        block_accesses=trace.accesses,
        distinct_blocks=trace.distinct,
        unlimited_hit_ratio=round(unlimited, 6),
        cells=cells,
    )


def _known(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in POLICIES:
            nearest = difflib.get_close_matches(name, POLICIES, 1, 0)[0]
            raise SettingsError(
                f'"{name}" is not one of the policies {", ".join(POLICIES)}; the nearest is '
                f"{nearest}."
            )
    return list(dict.fromkeys(names)) or list(POLICIES)


def _blocks(size: str, distinct: int, block_bytes: int | None) -> int:
    """Return a size in blocks, at least one."""
    if match := PERCENT.fullmatch(size):
        return max(int(distinct * float(match[1]) / 100), 1)
    in_bytes = _size(size, "size")
    if block_bytes is None:
        raise SettingsError(
            f"The size {size} needs the bytes of one block: add for example --block-bytes 2MiB, or "
            f'write a share of the distinct blocks, such as "10%".'
        )
    return max(in_bytes // block_bytes, 1)


def _size(text: str, what: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise SettingsError(f"The {what}: {error}.") from None


def _bytes_of(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _plot_files(plot_file: Path, files: Sequence[Path]) -> list[Path]:
    """Return where each trace's plot goes: the name given, or one a trace beside it."""
    if len(files) == 1:
        return [plot_file]
    return [
        plot_file.with_name(f"{plot_file.stem}-{number}-{file.name.split('.')[0]}.svg")
        for number, file in enumerate(files, 1)
    ]


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise SettingsError(f"The plot {file} can't be written: {error}.") from None
