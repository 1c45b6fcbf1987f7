"""A replay's hit ratios over capacity, as a picture. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

from pathlib import Path

from ..errors import SettingsError
from .bound import BOUND
from .report import Cell, Report

SUFFIXES = (".png", ".svg")
WIDTH_INCHES, HEIGHT_INCHES, DOTS_AN_INCH = 9.0, 5.5, 120
MARKERS = "osv^D<>Px*h"
"""So that lines are told apart without colours."""


def check_plot(file: Path) -> None:
    """Raise SettingsError if no plot of that name can be made here."""
    if file.suffix not in SUFFIXES:
        raise SettingsError(
            f"{file} is no name for a plot: kvtier writes PNG and SVG, such as plot.png."
        )
    try:
        import matplotlib as mpl  # noqa: F401, PLC0415
    except ImportError:
        raise SettingsError("Plots need matplotlib: install kvtier[plots].") from None


def write_plot(report: Report, file: Path) -> None:
    """Write a line for each way to run. Blocks. Raises SettingsError."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DOTS_AN_INCH, layout="constrained")
    axes = figure.add_subplot()
    labels = list(dict.fromkeys(each.label for each in report.cells))
    for number, label in enumerate(labels):
        cells = sorted((each for each in report.cells if each.label == label), key=_capacity)
        axes.plot(
            [_capacity(each) for each in cells],
            [100 * each.token_hit_ratio for each in cells],
            label=label,
            marker=MARKERS[number % len(MARKERS)],
            linestyle="--" if label == BOUND else "-",
            color="#444444" if label == BOUND else None,
        )
    axes.set_title(f"{report.file}: token hit ratio by capacity")
    axes.set_xlabel(f"capacity of all tiers, in blocks of {report.block_tokens} tokens")
    axes.set_ylabel("prompt tokens that hit, in %")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    try:
        figure.savefig(file)
    except OSError as error:
        raise SettingsError(f"The plot {file} can't be written: {error}.") from None


def _capacity(cell: Cell) -> int:
    return sum(tier.capacity_blocks for tier in cell.tiers)
