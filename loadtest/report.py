"""What a measurement prints beside its figure: the machine, how busy it was, and a table."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

WIDTH = 100
"""Where there is no terminal, rich would take 80."""


@dataclass(frozen=True, slots=True)
class Row:
    """Samples of one quantity. `scale` makes them the table's unit, which `unit` names."""

    what: str
    samples: Sequence[float]
    unit: str = ""
    scale: float = 1.0


def show(title: str, rows: Sequence[Row]) -> None:
    """Print medians and spreads to stderr, under what they were measured on."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    table = Table(title=title, caption=f"{machine()}; load average {load}", title_justify="left")
    table.add_column("what")
    for column in ("median", "quarter below", "quarter above", "samples"):
        table.add_column(column, justify="right")
    for row in rows:
        low, middle, high = quartiles(row.samples)
        cells = [_cell(each * row.scale, row.unit) for each in (middle, low, high)]
        table.add_row(row.what, *cells, str(len(row.samples)))
    Console(stderr=True, highlight=False, width=WIDTH).print(table)


def _cell(value: float, unit: str) -> str:
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".strip()


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def machine() -> str:
    """Return this machine in words."""
    return f"{os.cpu_count()} cores, {platform.machine()}, {_cpu()}"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
