"""Figures of one run: percentiles, throughput, what was cached, what failed.

A request that failed counts among the failures, and in nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .records import Record, RecordFile, read_records
from .requests import Facts, TrafficError
from .runner import LATE_SECONDS, Loop, Run
from .sources import Sources

RAW, SUMMARY = "raw.jsonl", "summary.json"
"""Files of a run's folder."""


class Labelled(msgspec.Struct, frozen=True):
    """A run, and what it was a run of."""

    system: str
    """Who was asked, such as "kvtier" or "vLLM alone"."""
    scenario: str
    """In which situation; runs of one scenario are compared with each other."""
    workload: Facts
    run: Run


class Percentiles(msgspec.Struct, frozen=True):
    """Of some samples, with linear interpolation between two of them."""

    p50: float
    p90: float
    p95: float
    p99: float
    samples: int


class Rates(msgspec.Struct, frozen=True):
    """What was answered in a second, from the first sending to the last end."""

    requests: float
    prompt_tokens: float
    output_tokens: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a run. Times are in seconds; None where there is no sample."""

    system: str
    scenario: str
    workload: Facts
    loop: Loop
    began: float
    seconds: float
    answered: int
    failures: dict[str, int]
    """How many requests failed, by kind."""
    late: int
    """Requests of the open loop that were sent too late."""
    ttft: Percentiles | None
    itl: Percentiles | None
    """Inter-token latency: between one token and the next."""
    e2e: Percentiles | None
    """From sending to the end of the answer."""
    rates: Rates
    prompt_tokens: int
    cached_tokens: int | None
    """By the answers' usage; None if any of them does not say."""
    output_tokens: int
    sources: Sources | None
    cached_share: float | None
    """Of the prompt tokens: by the answers' usage, or by the engine's counters."""


def summarise(labelled: Labelled) -> Summary:
    """Return the figures of a run."""
    run = labelled.run
    good = answered(run.records)
    prompt = sum(each.prompt_tokens for each in good)
    output = sum(each.output_tokens for each in good)
    cached = cached_tokens(good)
    return Summary(
        system=labelled.system,
        scenario=labelled.scenario,
        workload=labelled.workload,
        loop=run.loop,
        began=run.began,
        seconds=run.seconds,
        answered=len(good),
        failures=dict(Counter(each.failure.value for each in run.records if each.failure)),
        late=sum(each.late > LATE_SECONDS for each in run.records),
        ttft=percentiles([each.ttft for each in good if each.ttft is not None]),
        itl=percentiles([gap for each in good for gap in each.gaps]),
        e2e=percentiles([each.seconds for each in good]),
        rates=Rates(*(count / run.seconds for count in (len(good), prompt, output))),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        sources=run.sources,
        cached_share=_cached_share(prompt, cached, run.sources),
    )


def answered(records: Sequence[Record]) -> list[Record]:
    """Return the requests that did not fail."""
    return [each for each in records if each.failure is None]


def cached_tokens(records: Sequence[Record]) -> int | None:
    """Return how many prompt tokens were cached, by the answers; None if one does not say."""
    told = [each.cached_tokens for each in records]
    known = [each for each in told if each is not None]
    return sum(known) if len(known) == len(told) else None


def percentiles(samples: Sequence[float]) -> Percentiles | None:
    """Return p50, p90, p95 and p99; None of no sample."""
    if not samples:
        return None
    ordered = sorted(samples)
    p50, p90, p95, p99 = (_at(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
    return Percentiles(p50, p90, p95, p99, len(ordered))


def _at(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _cached_share(prompt: int, cached: int | None, sources: Sources | None) -> float | None:
    if cached is not None and prompt:
        return cached / prompt
    if sources is not None and sources.prompt:
        return (sources.device + sources.connector) / sources.prompt
    return None


def save(labelled: Labelled, folder: Path) -> Summary:
    """Write a run's summary into a folder, and its records, unless the run did so itself.

    Raises TrafficError if that can't be.
    """
    made = summarise(labelled)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        encoded = msgspec.json.format(msgspec.json.encode(made), indent=2)
        (folder / SUMMARY).write_bytes(encoded + b"\n")
    except OSError as error:
        raise TrafficError(f"The summary in {folder} can't be written: {error}.") from None
    if not (folder / RAW).is_file():
        with RecordFile(folder / RAW) as file:
            for record in labelled.run.records:
                file.append(record)
    return made


def load(folder: Path) -> Labelled:
    """Return the run that was saved in a folder. Raises TrafficError."""
    try:
        told = msgspec.json.decode((folder / SUMMARY).read_bytes(), type=Summary)
    except (OSError, msgspec.DecodeError) as error:
        raise TrafficError(f"{folder} holds no run: {error}.") from None
    run = Run(
        loop=told.loop,
        began=told.began,
        seconds=told.seconds,
        records=read_records(folder / RAW),
        sources=told.sources,
    )
    return Labelled(told.system, told.scenario, told.workload, run)
