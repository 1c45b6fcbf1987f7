"""The results as a page: what was measured on, where it stops to scale and why, and the curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..report import machine
from .curves import by_kind, write
from .points import Point
from .sweeps import THINK_SECONDS, Plan, Results
from .verdict import stops

PAGE = "README.md"

COLUMNS = (
    "work", "engines", "blocks there", "requests/s", "blocks/s", "GB/s", "p50, p95, p99 in ms",
    "server's, engines' CPU µs a block", "server's core", "machine",
)  # fmt: skip

INTRODUCTION = """# The data plane under load

{machine}. Engines are processes of their own with a scheduler's and a worker's session on a real
`kvtier serve`, without vLLM: they look prompts up, copy blocks between slots and their own memory,
and store new ones. Each request follows the last one at once, but where it says
"{think:g} ms apart": that is how an engine asks that also computes.

Each block's bytes tell its key. All bytes were compared before the measurement and in each engine's
last load, and the ends of each block in every load. "load" is the copy of all blocks of a request;
a store waits for its slots (reserve), copies, and waits until its blocks are visible (commit).
Stores soon fill the tier: from then on one block goes for each that comes.

CPU time is of the server's process, and of the engines' processes with their checks of bytes. On a
machine with few cores the engines take the cores from each other and from the server: the share of
all cores that were busy stands beside each point.
"""


def write_page(folder: Path, plan: Plan, results: Results) -> None:
    """Write the page and its pictures into a folder. Blocks."""
    parts = [INTRODUCTION.format(machine=machine(), think=THINK_SECONDS * 1e3)]
    small, large = plan.small, plan.large
    parts += _section(
        folder,
        "engines",
        f"Engines: prompts of {small.prompt_blocks} blocks of {small.block_bytes:,} bytes, "
        f"{plan.engines_blocks:,} blocks in the directory",
        results.engines,
    )
    parts += _section(
        folder,
        "copies",
        f"Copies: prompts of {large.prompt_blocks} blocks of {large.block_bytes:,} bytes, "
        f"{plan.large_blocks:,} blocks in the directory",
        results.copies,
    )
    title = f"Directory: {plan.directory_engines} engines, as in the first part"
    write(folder, "directory", title, results.directory, "directory_blocks")
    parts += [_heading(title, "directory"), *_growth(results.directory), _table(results.directory)]
    (folder / PAGE).write_text("\n".join(parts), encoding="utf-8")


def _section(folder: Path, name: str, title: str, points: Sequence[Point]) -> list[str]:
    write(folder, name, title, points, "engines")
    limits = [f"- {kind}: {stops(found)}" for kind, found in by_kind(points).items()]
    return [_heading(title, name), *limits, "", _table(points)]


def _heading(title: str, name: str) -> str:
    return f"## {title}\n\n![curves]({name}.svg)\n"


def _growth(points: Sequence[Point]) -> list[str]:
    """Return what the largest directory costs beside the smallest, by kind of work."""
    lines = []
    for kind, found in by_kind(points).items():
        first, last = found[0], found[-1]
        cpu = last.server_cpu_per_block / first.server_cpu_per_block
        rate = last.requests_per_second / first.requests_per_second
        lines.append(
            f"- {kind}: {last.directory_blocks:,} blocks beside {first.directory_blocks:,} take "
            f"{cpu:.2f} times the server's CPU time a block, and leave {rate:.2f} of the requests."
        )
    return [*lines, ""]


def _table(points: Sequence[Point]) -> str:
    rows = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for kind, found in by_kind(points).items():
        rows += [_row(kind, point) for point in found]
    return "\n".join([*rows, ""])


def _row(kind: str, point: Point) -> str:
    latencies = "; ".join(
        f"{call} " + ", ".join(f"{value * 1e3:.2f}" for value in times.values())
        for call, times in point.latency_seconds.items()
    )
    cells = (
        kind,
        f"{point.engines}",
        f"{point.directory_blocks:,}",
        f"{point.requests_per_second:,.0f}",
        f"{point.blocks_per_second:,.0f}",
        f"{point.bytes_per_second / 1e9:.2f}",
        latencies,
        f"{point.server_cpu_per_block * 1e6:.2f}, {point.engine_cpu_per_block * 1e6:.2f}",
        f"{100 * point.server_core_share:.0f} %",
        f"{100 * point.machine_share:.0f} %",
    )
    return f"| {' | '.join(cells)} |"
