"""A page in Markdown about runs side by side: tables, pictures, and what they were measured on."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from .compare import Ratios, Spread, ratios, runs_of, scenarios, systems
from .hardware import Hardware
from .plots import write_plots
from .requests import TrafficError
from .summary import Labelled, Percentiles, Summary, summarise

PAGE, HARDWARE = "page.md", "hardware.json"
NONE = "-"


def write_page(runs: Sequence[Labelled], base: str, folder: Path, measured: Hardware) -> Path:
    """Write the page with its pictures, and the hardware as JSON; return the page's file.

    Ratios are to the system `base`. Blocks. Raises TrafficError.
    """
    pictures = write_plots(runs, folder)
    try:
        encoded = msgspec.json.format(msgspec.json.encode(measured), indent=2)
        (folder / HARDWARE).write_bytes(encoded + b"\n")
        (folder / PAGE).write_text(page(runs, base, pictures, measured), "utf-8")
    except OSError as error:
        raise TrafficError(f"The page in {folder} can't be written: {error}.") from None
    return folder / PAGE


def page(runs: Sequence[Labelled], base: str, pictures: Sequence[Path], measured: Hardware) -> str:
    """Return the page's text."""
    parts = ["# Load test", _measured(measured)]
    parts += [f"![{each.stem}]({each.name})" for each in pictures]
    found = ratios(runs, base)
    for scenario in scenarios(runs):
        here = [each for each in runs if each.scenario == scenario]
        compared = [each for each in found if each.scenario == scenario]
        parts += _scenario(scenario, here, compared, base)
    return "\n\n".join(parts) + "\n"


def _scenario(
    scenario: str, runs: Sequence[Labelled], found: Sequence[Ratios], base: str
) -> Iterator[str]:
    facts = runs[0].workload
    summaries = [
        summarise(run) for system in systems(runs) for run in runs_of(runs, system, scenario)
    ]
    yield f"## {scenario}"
    yield (
        f"{facts.about} Workload `{facts.name}`, seed {facts.seed}: {facts.requests:,} requests, "
        f"{facts.prompt_tokens:,} prompt tokens, {facts.output_tokens:,} output tokens, "
        f"{runs[0].run.loop}. A cache without limit would serve {facts.reusable_share:.1%} of the "
        f"prompt tokens, in blocks of {facts.block_tokens}."
    )
    if facts.parameters:
        sizes = ", ".join(f"{name} {value}" for name, value in facts.parameters.items())
        yield f"Sizes: {sizes}."
    yield table(LATENCY, summaries)
    yield table(THROUGHPUT, summaries)
    if any(each.sources for each in summaries):
        yield _sources(summaries)
    if found:
        yield _ratios(found, base)
    errors = sorted({record.error for run in runs for record in run.run.records if record.error})
    if errors:
        yield "What failed:\n\n" + "\n".join(f"- {_cell(error)}" for error in errors[:10])


Column = tuple[str, Callable[[Summary], str]]


def _times(name: str, of: Callable[[Summary], Percentiles | None]) -> list[Column]:
    def column(which: str) -> Column:
        def cell(summary: Summary) -> str:
            found = of(summary)
            return NONE if found is None else _seconds(getattr(found, which))

        return f"{name} {which}", cell

    return [column(which) for which in ("p50", "p90", "p95", "p99")]


LATENCY: Sequence[Column] = (
    ("system", lambda each: each.system),
    *_times("TTFT", lambda each: each.ttft),
    *_times("ITL", lambda each: each.itl),
    ("end to end p50", lambda each: _seconds(each.e2e.p50) if each.e2e else NONE),
)
THROUGHPUT: Sequence[Column] = (
    ("system", lambda each: each.system),
    ("answered", lambda each: f"{each.answered:,}"),
    ("failed", lambda each: _counts(each.failures)),
    ("late", lambda each: f"{each.late:,}"),
    ("seconds", lambda each: f"{each.seconds:.1f}"),
    ("requests/s", lambda each: f"{each.rates.requests:.2f}"),
    ("prompt tokens/s", lambda each: f"{each.rates.prompt_tokens:,.0f}"),
    ("output tokens/s", lambda each: f"{each.rates.output_tokens:,.1f}"),
    ("cached", lambda each: NONE if each.cached_share is None else f"{each.cached_share:.1%}"),
)


def table(columns: Sequence[Column], summaries: Sequence[Summary]) -> str:
    """Return a row for each run."""
    return _table([name for name, _ in columns], ([of(e) for _, of in columns] for e in summaries))


def _sources(summaries: Sequence[Summary]) -> str:
    known = [(each, each.sources) for each in summaries if each.sources is not None]
    names = list(dict.fromkeys(name for _, sources in known for name in sources.tiers))
    rows = [
        [
            each.system,
            f"{sources.prompt:,}",
            *(f"{sources.tiers.get(name, 0):,}" for name in names),
            f"{sources.computed:,}",
        ]
        for each, sources in known
    ]
    about = "Prompt tokens by source, by the engine's own counters:"
    return f"{about}\n\n" + _table(["system", "prompt tokens", *names, "computed"], rows)


def _ratios(found: Sequence[Ratios], base: str) -> str:
    rows = [
        [
            each.system,
            _spread(each.ttft),
            _spread(each.throughput),
            f"{each.same_outputs:,} of {each.compared_outputs:,}",
        ]
        for each in found
    ]
    head = ["system", "TTFT (less is better)", "requests/s (more is better)", "same outputs"]
    about = (
        f"Ratios to {base}: of TTFT request by request, the median and the quartiles; of "
        f"throughput run by run, the median, the least and the largest."
    )
    return f"{about}\n\n" + _table(head, rows)


def _measured(found: Hardware) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    loads = " to ".join(
        f"{each[0]:.1f}" for each in (found.load_at_start, found.load_at_end) if each
    )
    rows = [
        ["machine", f"{found.machine}; {found.cores} usable"],
        ["memory", f"{found.memory_bytes / 2**30:.1f} GiB"],
        ["disk", found.disk],
        *([["GPU", "; ".join(found.gpus)]] if found.gpus else []),
        ["kernel", found.kernel],
        ["versions", versions],
        ["commit", found.commit],
        ["command", f"`{shlex.join(found.command)}`"],
        ["load average over a minute", loads],
    ]
    return _table(["measured on", ""], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *([_cell(c) for c in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _spread(found: Spread | None) -> str:
    if found is None:
        return NONE
    if found.samples == 1:
        return f"{found.middle:.3g}"
    return f"{found.middle:.3g} ({found.low:.3g} to {found.high:.3g})"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "0"


def _seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:.2f} s"
