"""What a replay found, as a table, as JSON and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle

from rich.table import Table
from rich.text import Text

from .simulator import BOUND, Outcome
from .trace import Trace

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#444444")
"""Told apart by people with any kind of colour vision, as far as eight can be."""
WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 130, 50, 60
TICKS = 5


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one size, as the JSON report states it. Ratios are from 0 to 1."""

    policy: str
    size: str
    capacity_blocks: int
    token_hit_ratio: float
    hit_tokens: int
    evictions: int
    written_blocks: int
    written_bytes: int | None
    """None where the bytes of a block are not known."""


@dataclass(frozen=True, slots=True)
class Report:
    """All cells of one trace file."""

    file: str
    format: str
    block_tokens: int
    requests: int
    tokens: int
    block_accesses: int
    distinct_blocks: int
    unlimited_hit_ratio: float
    """Token hit ratio of a cache that never evicts."""
    cells: list[Cell]


def cell(trace: Trace, outcome: Outcome, size: str, block_bytes: int | None) -> Cell:
    """Return what there is to say of one outcome."""
    return Cell(
        policy=outcome.policy,
        size=size,
        capacity_blocks=outcome.capacity,
        token_hit_ratio=round(outcome.hit_ratio(trace), 6),
        hit_tokens=outcome.hit_blocks * trace.block_tokens,
        evictions=outcome.evictions,
        written_blocks=outcome.written_blocks,
        written_bytes=None if block_bytes is None else outcome.written_blocks * block_bytes,
    )


def table(report: Report) -> Table:
    """Return the hit ratios with a row for each policy and a column for each size."""
    sizes = list(dict.fromkeys(each.size for each in report.cells))
    policies = list(dict.fromkeys(each.policy for each in report.cells))
    found = {(each.policy, each.size): each for each in report.cells}
    shown = Table(title=f"{report.file}: token hit ratio", title_justify="left", title_style="bold")
    shown.add_column("policy")
    for size in sizes:
        shown.add_column(size, justify="right")
    shown.add_column(f"evictions at {sizes[0]}", justify="right")
    shown.add_column(f"blocks written at {sizes[0]}", justify="right")
    best = {size: _best(report, size) for size in sizes}
    for policy in policies:
        ratios = [found[policy, size].token_hit_ratio for size in sizes]
        cells = [
            Text(f"{ratio:.1%}", style="bold green" if ratio >= best[size] else "")
            for ratio, size in zip(ratios, sizes, strict=True)
        ]
        if policy == BOUND:
            cells = [Text(f"{ratio:.1%}", style="dim") for ratio in ratios]
        first = found[policy, sizes[0]]
        shown.add_row(policy, *cells, f"{first.evictions:,}", f"{first.written_blocks:,}")
    return shown


def summary(report: Report) -> str:
    """Return what was replayed, in a sentence or two."""
    return (
        f"{report.requests:,} requests ({report.format}), {report.tokens:,} prompt tokens, "
        f"{report.block_accesses:,} accesses to {report.distinct_blocks:,} blocks of "
        f"{report.block_tokens} tokens. A cache without limit would have hit "
        f"{report.unlimited_hit_ratio:.1%} of the tokens."
    )


def plot(report: Report) -> str:
    """Return an SVG of hit ratio over capacity, a line for each policy."""
    capacities = sorted({each.capacity_blocks for each in report.cells})
    span = max(capacities[-1], 1)
    top = max((each.token_hit_ratio for each in report.cells), default=0.0)
    top = max(-(-top * 20 // 1) / 20, 0.05)

    def x_of(capacity: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * capacity / span

    def y_of(ratio: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ratio / top

    parts = [*_axes(report, span, top)]
    policies = list(dict.fromkeys(each.policy for each in report.cells))
    for row, (policy, colour) in enumerate(zip(policies, cycle(COLOURS), strict=False)):
        line = sorted(
            (each.capacity_blocks, each.token_hit_ratio)
            for each in report.cells
            if each.policy == policy
        )
        points = " ".join(f"{x_of(size):.1f},{y_of(ratio):.1f}" for size, ratio in line)
        dashes = ' stroke-dasharray="5 4"' if policy == BOUND else ""
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
        )
        parts += [
            f'<circle cx="{x_of(size):.1f}" cy="{y_of(ratio):.1f}" r="3" fill="{colour}"/>'
            for size, ratio in line
        ]
        parts.append(_text(WIDTH - RIGHT + 16, TOP + 18 * row, policy, colour=colour))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _axes(report: Report, span: float, top: float) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [_text(LEFT, 24, f"{report.file}: token hit ratio by capacity", size=15)]
    for tick in range(TICKS + 1):
        share = tick / TICKS
        x, y = LEFT + (right - LEFT) * share, bottom - (bottom - TOP) * share
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{top * share:.0%}", anchor="end"))
        parts.append(_text(x, bottom + 18, f"{span * share:,.0f}", anchor="middle"))
    middle = (LEFT + right) / 2
    label = f"capacity in blocks of {report.block_tokens} tokens"
    return [*parts, _text(middle, HEIGHT - 14, label, anchor="middle")]


def _text(
    x: float, y: float, words: str, *, colour: str = "#222", anchor: str = "start", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" '
        f'font-size="{size}">{escape(words)}</text>'
    )


def _best(report: Report, size: str) -> float:
    ratios: Sequence[float] = [
        each.token_hit_ratio for each in report.cells if each.size == size and each.policy != BOUND
    ]
    return max(ratios, default=0.0)
