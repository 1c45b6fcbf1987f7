"""What a replay found, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from ..sizes import format_size
from .bound import BOUND
from .grid import Sizes, Way
from .simulator import Outcome, TierOutcome
from .trace import Trace


@dataclass(frozen=True, slots=True)
class TierCell:
    """What one tier did, as the JSON report states it."""

    tier: str
    size: str
    capacity_blocks: int
    hit_tokens: int
    evictions: int
    written_blocks: int
    written_bytes: int | None
    """None where the bytes of a block are not known."""
    refused_blocks: int
    """Offers that admission turned down."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One way at one size, as the JSON report states it. Ratios are from 0 to 1.

    For MIN the tiers are one, as large as all together.
    """

    policy: str
    lower_policy: str | None
    write_mode: str | None
    admission: str | None
    size: str
    token_hit_ratio: float
    hit_tokens: int
    tiers: list[TierCell]
    label: str


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


def cell(trace: Trace, way: Way, sizes: Sizes, outcome: Outcome, block_bytes: int | None) -> Cell:
    """Return what there is to say of one outcome."""
    names = [sizes.host, *(size for _, size in sizes.lowers)]
    if way.policy == BOUND:
        names = [sizes.label]
    return Cell(
        policy=way.policy,
        lower_policy=way.below and way.below.policy,
        write_mode=way.below and way.below.write_mode,
        admission=way.below and way.below.admission,
        size=sizes.label,
        token_hit_ratio=round(outcome.hit_ratio(trace), 6),
        hit_tokens=outcome.hit_blocks * trace.block_tokens,
        tiers=[
            _tier(trace, size, tier, block_bytes)
            for size, tier in zip(names, outcome.tiers, strict=True)
        ],
        label=way.label,
    )


def _tier(trace: Trace, size: str, tier: TierOutcome, block_bytes: int | None) -> TierCell:
    return TierCell(
        tier=tier.tier,
        size=size,
        capacity_blocks=tier.capacity,
        hit_tokens=tier.hit_blocks * trace.block_tokens,
        evictions=tier.evictions,
        written_blocks=tier.written_blocks,
        written_bytes=None if block_bytes is None else tier.written_blocks * block_bytes,
        refused_blocks=tier.refused_blocks,
    )


def table(report: Report) -> Table:
    """Return the hit ratios with a row for each way and a column for each size.

    Behind them stands what the first size did to each tier.
    """
    sizes = list(dict.fromkeys(each.size for each in report.cells))
    labels = list(dict.fromkeys(each.label for each in report.cells))
    found = {(each.label, each.size): each for each in report.cells}
    shown = Table(title=f"{report.file}: token hit ratio", title_justify="left", title_style="bold")
    shown.add_column("policy")
    for size in sizes:
        shown.add_column(size, justify="right")
    for tier in report.cells[0].tiers:
        shown.add_column(f"{tier.tier}: evicted at {tier.size}", justify="right")
        shown.add_column(f"{tier.tier}: written", justify="right")
    best = {size: _best(report, size) for size in sizes}
    for label in labels:
        ratios = [found[label, size].token_hit_ratio for size in sizes]
        cells = [
            Text(f"{ratio:.1%}", style="bold green" if ratio >= best[size] else "")
            for ratio, size in zip(ratios, sizes, strict=True)
        ]
        if label == BOUND:
            cells = [Text(f"{ratio:.1%}", style="dim") for ratio in ratios]
        first = found[label, sizes[0]]
        done = [text for tier in first.tiers for text in (f"{tier.evictions:,}", _written(tier))]
        shown.add_row(label, *cells, *done)
    return shown


def summary(report: Report) -> str:
    """Return what was replayed, in a sentence or two."""
    return (
        f"{report.requests:,} requests ({report.format}), {report.tokens:,} prompt tokens, "
        f"{report.block_accesses:,} accesses to {report.distinct_blocks:,} blocks of "
        f"{report.block_tokens} tokens. A cache without limit would have hit "
        f"{report.unlimited_hit_ratio:.1%} of the tokens."
    )


def _written(tier: TierCell) -> str:
    if tier.written_bytes is None:
        return f"{tier.written_blocks:,}"
    return f"{tier.written_blocks:,} ({format_size(tier.written_bytes)})"


def _best(report: Report, size: str) -> float:
    ratios: Sequence[float] = [
        each.token_hit_ratio for each in report.cells if each.size == size and each.policy != BOUND
    ]
    return max(ratios, default=0.0)
