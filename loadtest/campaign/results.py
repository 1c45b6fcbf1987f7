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
from ..traffic.compare import scenarios, systems
from ..traffic.hardware import Hardware
from ..traffic.page import write_page
from ..traffic.requests import TrafficError
from ..traffic.summary import Labelled, Summary, answered, summarise
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
    ratio = OURS in names and PEER in names
    head = ["asked", *names, *([f"{OURS} ÷ {PEER}"] if ratio else [])]
    lines = [head, ["---", *("---:" for _ in head[1:])]]
    for scenario in scenarios(runs):
        cells = [_cell(_of(runs, name, scenario)) for name in names]
        lines.append([scenario, *cells, *([_ratio(runs, scenario)] if ratio else [])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _of(runs: Sequence[Labelled], system: str, scenario: str) -> list[Labelled]:
    return [each for each in runs if (each.system, each.scenario) == (system, scenario)]


def _cell(runs: Sequence[Labelled]) -> str:
    found = _ttfts(runs)
    if not found:
        return NONE
    low, middle, high = (f"{seconds:.3g}" for seconds in quartiles(found))
    shares = [each.cached_share for each in map(summarise, runs) if each.cached_share is not None]
    cached = f", {statistics.mean(shares):.0%} cached" if shares else ""
    return f"{middle} s ({low} to {high}){cached}"


def _ratio(runs: Sequence[Labelled], scenario: str) -> str:
    """Return the median of ours ÷ the peer's, of equal requests in the order of the runs."""
    ours, peers = (_by_request(_of(runs, name, scenario)) for name in (OURS, PEER))
    found = [one / peers[key] for key, one in ours.items() if peers.get(key)]
    if not found:
        return NONE
    low, middle, high = (f"{ratio:.2f}" for ratio in quartiles(found))
    return f"{middle} ({low} to {high})"


def _by_request(runs: Sequence[Labelled]) -> dict[tuple[int, str], float]:
    return {
        (number, record.name): record.ttft
        for number, each in enumerate(runs)
        for record in answered(each.run.records)
        if record.ttft is not None
    }


def _ttfts(runs: Sequence[Labelled]) -> list[float]:
    return [
        record.ttft
        for each in runs
        for record in answered(each.run.records)
        if record.ttft is not None
    ]


def _not_measured(failed: Sequence[Failed]) -> Iterator[str]:
    if failed:
        yield "\n## Not measured\n\n"
        for each in failed:
            yield f"- {each.system}, {each.scenario}: {' '.join(each.message.split())}\n"
