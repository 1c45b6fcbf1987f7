"""Pictures of runs side by side, as SVG and PNG. Needs matplotlib, the extra `plots`.

A panel for each scenario. Systems are told apart by colour and by dash or hatch, in colours that
colour-blind people tell apart too.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .compare import over_runs, runs_of, scenarios, systems, ttfts
from .requests import TrafficError
from .summary import Labelled, Summary, summarise

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#555555")
DASHES = ("-", "--", "-.", ":")
BAR = 0.7
COMPUTED = "computed"
DARK = {"device", "host"}
"""Sources in whose colours white is read better than black."""
LABELLED_SHARE = 0.12
"""Parts of a bar that are smaller have no room for a number."""
SOURCE_COLOURS = {
    "device": "#0072B2",
    "host": "#009E73",
    "disk": "#E69F00",
    "redis": "#CC79A7",
    "external_unspecified": "#56B4E9",
    "connector": "#56B4E9",
    COMPUTED: "#DDDDDD",
}
OTHER_COLOURS = ("#D55E00", "#F0E442", "#999999")
SOURCE_NAMES = {
    "device": "engine's own cache (L0)",
    "host": "host memory (L1)",
    "external_unspecified": "connector",
}
COLUMNS = 3
LEGEND_COLUMNS = 4
TITLE_CHARACTERS = 44
BARS_AT_LEAST = 3
"""That a panel has room for: fewer are no thicker."""
REUSABLE = "reusable at most"
LABELLED_TICKS, MINOR_TICKS = (1, 1.5, 2, 3, 5), (4, 6, 7, 8, 9)
"""Of a decade, for a narrow range may lie between two powers of ten."""
PANEL_INCHES = (4.2, 3.1)
DOTS_AN_INCH = 120


def write_plots(runs: Sequence[Labelled], folder: Path) -> list[Path]:
    """Write all pictures into a folder; return the SVG files. Blocks. Raises TrafficError."""
    if not runs:
        raise TrafficError("There is no run to show.")
    try:
        import matplotlib as mpl
    except ImportError:
        raise TrafficError("Plots need matplotlib: install kvtier[plots].") from None
    drawn: dict[str, Callable[[Sequence[Labelled]], Figure]] = {
        "ttft": ttft,
        "cached": cached,
        "throughput": throughput,
    }
    # Equal runs give equal files, whose text can be searched.
    with mpl.rc_context({"svg.hashsalt": "kvtier", "svg.fonttype": "none", "font.size": 9.0}):
        return [_save(draw(runs), folder / name) for name, draw in drawn.items()]


def ttft(runs: Sequence[Labelled]) -> Figure:
    """Return how TTFT is distributed: which share of the requests had a first token by then."""
    figure, panels = _panels(runs, "Time to first token: share of requests that have it by then")
    for axes, scenario in zip(panels, scenarios(runs), strict=True):
        for number, system in enumerate(systems(runs)):
            samples = ttfts(runs_of(runs, system, scenario))
            if samples:
                shares = [(n + 1) / len(samples) for n in range(len(samples))]
                axes.step(
                    [samples[0], *samples],
                    [0.0, *shares],
                    where="post",
                    label=system,
                    color=COLOURS[number % len(COLOURS)],
                    linestyle=DASHES[(number + number // len(COLOURS)) % len(DASHES)],
                    linewidth=1.8,
                )
        _seconds_axis(axes)
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.set_ylabel("requests")
    _legend(figure, panels)
    return figure


def cached(runs: Sequence[Labelled]) -> Figure:
    """Return where prompt tokens came from, in stacked bars, and what could have been cached."""
    figure, panels = _panels(runs, "Where prompt tokens came from")
    for axes, scenario in zip(panels, scenarios(runs), strict=True):
        here = _systems_in(runs, scenario)
        for number, system in enumerate(here):
            begin = 0.0
            for source, share in _shares(runs_of(runs, system, scenario)).items():
                colour = _source_colour(source)
                name = SOURCE_NAMES.get(source, source)
                axes.barh(number, share, BAR, begin, label=name, color=colour, edgecolor="white")
                if share >= LABELLED_SHARE and source != COMPUTED:
                    shade = "white" if source in DARK else "black"
                    place = (begin + share / 2, number)
                    axes.text(*place, f"{share:.0%}", ha="center", va="center", color=shade)
                begin += share
        reusable = runs_of(runs, here[0], scenario)[0].workload.reusable_share
        axes.axvline(reusable, color="black", linestyle="--", label=REUSABLE)
        _name_bars(axes, here)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.set_xlabel("prompt tokens")
    _legend(figure, panels)
    return figure


def throughput(runs: Sequence[Labelled]) -> Figure:
    """Return prompt tokens a second, with the least and the largest of several runs."""
    figure, panels = _panels(runs, "Throughput: prompt tokens answered in a second")
    for axes, scenario in zip(panels, scenarios(runs), strict=True):
        here = _systems_in(runs, scenario)
        for number, system in enumerate(here):
            found = over_runs(runs_of(runs, system, scenario), _prompt_rate)
            around = [[found.middle - found.low], [found.high - found.middle]]
            axes.barh(
                number,
                found.middle,
                BAR,
                xerr=around if found.samples > 1 else None,
                capsize=4,
                color=COLOURS[systems(runs).index(system) % len(COLOURS)],
                edgecolor="black",
                linewidth=0.5,
            )
            place, text = (found.high, number), f"{found.middle:,.0f}"
            axes.annotate(text, place, (5, 0), textcoords="offset points", va="center")
        _name_bars(axes, here)
        axes.margins(x=0.25)
        axes.set_xlim(left=0)
        axes.set_xlabel("tokens/s")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure


def _panels(runs: Sequence[Labelled], title: str) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    names = scenarios(runs)
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    width, height = PANEL_INCHES
    size = (width * columns, height * rows + 0.9)
    figure = Figure(figsize=size, dpi=DOTS_AN_INCH, layout="constrained")
    figure.suptitle(title, fontweight="bold")
    panels = [figure.add_subplot(rows, columns, number + 1) for number in range(len(names))]
    for axes, name in zip(panels, names, strict=True):
        axes.set_title(
            textwrap.fill(name, TITLE_CHARACTERS, break_on_hyphens=False), fontsize="medium"
        )
        axes.grid(visible=True, alpha=0.3)
        axes.set_axisbelow(True)
    return figure, panels


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Name each line or part once, below all panels."""
    found: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(str(label), handle)
    labels = sorted(found, key=lambda label: label == REUSABLE)
    columns = min(len(found), LEGEND_COLUMNS)
    handles = [found[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _systems_in(runs: Sequence[Labelled], scenario: str) -> list[str]:
    return [each for each in systems(runs) if runs_of(runs, each, scenario)]


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Name horizontal bars, the first one on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), BARS_AT_LEAST) - 0.5, -0.5)


def _seconds_axis(axes: Axes) -> None:
    axes.set_xscale("log", subs=MINOR_TICKS)
    axes.set_xlabel("seconds")
    axes.xaxis.get_major_locator().set_params(subs=LABELLED_TICKS)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda *_: "")


def _shares(runs: Sequence[Labelled]) -> dict[str, float]:
    """Return the share of prompt tokens by source, in the order of tiers; computed ones last."""
    counts: dict[str, int] = {}
    for each in runs:
        for source, tokens in _tokens(each).items():
            counts[source] = counts.get(source, 0) + tokens
    total = sum(counts.values()) or 1
    order = [*SOURCE_COLOURS, *counts]
    names = sorted(counts, key=lambda name: (name == COMPUTED, order.index(name)))
    return {name: counts[name] / total for name in names if counts[name]}


def _tokens(labelled: Labelled) -> dict[str, int]:
    sources = labelled.run.sources
    if sources is not None:
        return {**sources.tiers, COMPUTED: sources.computed}
    told = summarise(labelled)
    found = told.cached_tokens or 0
    return {"cached": found, COMPUTED: told.prompt_tokens - found}


def _source_colour(source: str) -> str:
    known = SOURCE_COLOURS.get(source)
    return known or OTHER_COLOURS[sum(source.encode()) % len(OTHER_COLOURS)]


def _prompt_rate(summary: Summary) -> float:
    return summary.rates.prompt_tokens


def _save(figure: Figure, stem: Path) -> Path:
    try:
        for suffix in SUFFIXES:
            metadata = {"Date": None} if suffix == ".svg" else {}
            figure.savefig(stem.with_suffix(suffix), metadata=metadata)
    except OSError as error:
        raise TrafficError(f"The plot {stem} can't be written: {error}.") from None
    return stem.with_suffix(SUFFIXES[0])
