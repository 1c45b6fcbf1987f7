"""What a campaign leaves: a folder a run, one summary, a page with plots, and a table.

Everything is in one folder, named for the day and the machine, so that it can be kept beside the
code and pointed at.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ..report import machine, quartiles
from ..traffic.compare import Spread, ratios, runs_of, scenarios, systems, ttfts
from ..traffic.hardware import Hardware
from ..traffic.page import write_page
from ..traffic.requests import TrafficError
from ..traffic.summary import Labelled, Summary, summarise
from .conduct import Failed
from .plan import BASE, NAMES

RESULTS = Path(__file__).resolve().parents[1] / "results"
SUMMARY, TABLE = "summary.json", "table.md"
MACHINE_CHARACTERS = 40
OURS, PEER = NAMES["kvtier"], NAMES["lmcache"]
NONE = "-"


class Campaign(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a campaign, as its summary keeps them."""

    plan: str
    measured_on: Hardware
    runs: list[Summary]
    failed: list[Failed]


def new_folder(plan: str, results: Path = RESULTS) -> Path:
    """Make the folder of a campaign that begins now. Raises TrafficError."""
    day = datetime.now(tz=UTC).strftime("%Y-%m-%d")
    slug = re.sub(r"[^a-z0-9]+", "-", machine().lower()).strip("-")[:MACHINE_CHARACTERS].strip("-")
    wanted = results / f"{day}-{slug}-{plan}"
    folder, number = wanted, 1
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise TrafficError(f"The folder {folder} can't be made: {error}.") from None
    return folder


def write(
    folder: Path,
    plan: str,
    runs: Sequence[Labelled],
    failed: Sequence[Failed],
    measured_on: Hardware,
) -> Path:
    """Write summary, page, plots and table; return the page. Raises TrafficError."""
    kept = Campaign(
        plan=plan,
        measured_on=measured_on,
        runs=[summarise(each) for each in runs],
        failed=list(failed),
    )
    page = write_page(runs, BASE, folder, measured_on)
    try:
        encoded = msgspec.json.format(msgspec.json.encode(kept), indent=1)
        (folder / SUMMARY).write_bytes(encoded + b"\n")
        (folder / TABLE).write_text(table(runs) + "\n", "utf-8")
        with page.open("a", encoding="utf-8") as file:
            file.writelines(_not_measured(failed))
    except OSError as error:
        raise TrafficError(f"The results in {folder} can't be written: {error}.") from None
    return page


def table(runs: Sequence[Labelled]) -> str:
    """Return TTFT by scenario and system: the median and the quartiles, and what was cached."""
    names = systems(runs)
    compared = {each.scenario: each.ttft for each in ratios(runs, PEER) if each.system == OURS}
    head = ["asked", *names, *([f"{OURS} ÷ {PEER}"] if compared else [])]
    lines = [head, ["---", *("---:" for _ in head[1:])]]
    for scenario in scenarios(runs):
        cells = [_cell(runs_of(runs, name, scenario)) for name in names]
        lines.append([scenario, *cells, *([_ratio(compared.get(scenario))] if compared else [])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(runs: Sequence[Labelled]) -> str:
    found = ttfts(runs)
    if not found:
        return NONE
    low, middle, high = (f"{seconds:.3g}" for seconds in quartiles(found))
    shares = [each.cached_share for each in map(summarise, runs) if each.cached_share is not None]
    cached = f", {statistics.mean(shares):.0%} cached" if shares else ""
    return f"{middle} s ({low} to {high}){cached}"


def _ratio(found: Spread | None) -> str:
    return NONE if found is None else f"{found.middle:.2f} ({found.low:.2f} to {found.high:.2f})"


def _not_measured(failed: Sequence[Failed]) -> Iterator[str]:
    if failed:
        yield "\n## Not measured\n\n"
        for each in failed:
            yield f"- {each.system}, {each.scenario}: {' '.join(each.message.split())}\n"
