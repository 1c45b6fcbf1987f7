"""Runs with known numbers, for tests of what is made of them."""

from __future__ import annotations

from loadtest.traffic.records import Failure, Record
from loadtest.traffic.requests import Facts
from loadtest.traffic.runner import Closed, Run
from loadtest.traffic.sources import Sources
from loadtest.traffic.summary import Labelled

FACTS = Facts(
    name="chat",
    about="Conversations.",
    seed=7,
    parameters={"turns": 3},
    requests=5,
    prompt_tokens=500,
    output_tokens=15,
    reusable_tokens=320,
    block_tokens=32,
)
SOURCES = Sources(
    prompt=400,
    device=64,
    connector=96,
    by_source={"device": 64, "host": 64, "disk": 32},
    by_tier={},
    engine={"kvtier_engine_loaded_blocks_total": 3.0},
)
FAILED = Record(
    name="r4",
    sent=2.0,
    ended=2.5,
    late=0.2,
    failure=Failure.STATUS,
    error="The server answered 500: <b>a|b</b>",
)


def record(number: int, ttft: float, **fields: object) -> Record:
    """Return a good answer: sent at its number, 3 tokens with gaps of 0.1 and 0.3 s."""
    values = {
        "name": f"r{number}",
        "sent": float(number),
        "ended": number + ttft + 0.4,
        "ttft": ttft,
        "gaps": [0.1, 0.3],
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "output_tokens": 3,
        "digest": f"d{number}",
    }
    return Record(**(values | fields))


def labelled(
    system: str = "kvtier",
    scenario: str = "warm",
    scale: float = 1.0,
    sources: Sources | None = SOURCES,
) -> Labelled:
    """Return a run of 4 answers and a failure in 10 s, TTFTs of 1 to 4 s, all times `scale`."""
    records = [*(record(n, (n + 1) * scale) for n in range(4)), FAILED]
    run = Run(loop=Closed(2), began=0.0, seconds=10.0 * scale, records=records, sources=sources)
    return Labelled(system, scenario, FACTS, run)
