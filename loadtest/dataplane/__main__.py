"""Curves of the data plane: throughput, latency and CPU time as engines and blocks grow.

    python -m loadtest.dataplane --out DIR [--engines 1,2,4] [--blocks 1k,1M] [--quick]

writes results.json, the curves as SVG and PNG, and a page around them. A million blocks take about
5 GB of memory. `--quick` runs small sizes for a moment, to see that it works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ..report import machine
from ..rig import RigError
from ..stack import StackError
from .page import PAGE, write_page
from .prompts import Shape
from .sweeps import Plan, run

UNITS = {"k": 1_000, "M": 1_000_000}
ENGINES = (1, 2, 4, 8, 16, 32, 64)
BLOCKS = (1_000, 10_000, 100_000, 1_000_000)
FULL = Plan(
    engines=ENGINES,
    blocks=BLOCKS,
    seconds=2.5,
    small=Shape(block_bytes=4096, prompt_blocks=640, store_blocks=64),
    large=Shape(block_bytes=256 << 10, prompt_blocks=64, store_blocks=16),
    engines_blocks=10_000,
    large_blocks=4_096,
    directory_engines=4,
)
QUICK = Plan(
    engines=(1, 2),
    blocks=(100, 400),
    seconds=0.1,
    small=Shape(block_bytes=4096, prompt_blocks=40, store_blocks=8),
    large=Shape(block_bytes=64 << 10, prompt_blocks=8, store_blocks=4),
    engines_blocks=200,
    large_blocks=64,
    directory_engines=2,
)


def main(arguments: Sequence[str]) -> int:
    """Measure, and write the results. Returns 1 if that was not possible."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="loadtest.dataplane", description=__doc__)
    parser.add_argument("--engines", type=_counts, help="numbers of engines, rising")
    parser.add_argument("--blocks", type=_counts, help="blocks in the directory, rising")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a moment")
    given = parser.parse_args(arguments)
    plan = QUICK if given.quick else FULL
    plan = dataclasses.replace(
        plan, engines=given.engines or plan.engines, blocks=given.blocks or plan.blocks
    )
    given.out.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()
    try:
        results = run(plan)
    except (RigError, StackError) as error:
        print(f"dataplane: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dataplane: stopped; nothing runs on", file=sys.stderr)
        return 130
    found = {"machine": machine(), "load_before": load, "plan": dataclasses.asdict(plan)}
    found |= dataclasses.asdict(results)
    (given.out / "results.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    write_page(given.out, plan, results)
    print(f"wrote {given.out / PAGE}", file=sys.stderr)
    return 0


def _counts(text: str) -> tuple[int, ...]:
    """Return numbers such as `1,16` or `10k,1M`, in rising order. Raises ValueError."""
    counts = sorted(int(each.rstrip("kM")) * UNITS.get(each[-1:], 1) for each in text.split(","))
    if counts[0] < 1:
        raise ValueError(text)
    return tuple(counts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
