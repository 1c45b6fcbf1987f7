"""Runs the load test and writes its results.

python -m loadtest.campaign                         about twenty minutes on two cores
python -m loadtest.campaign --full TRACE ...        everything, some hours
python -m loadtest.campaign --only kvtier --out DIR
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import model
from ..peers.lmcache import ENVIRONMENT as LMCACHE_ENVIRONMENT
from ..traffic.hardware import ended, hardware
from ..traffic.requests import TrafficError
from ..traffic.summary import Labelled
from . import results
from .conduct import Failed, conduct
from .plan import Plan, full, quick


def main(arguments: Sequence[str]) -> int:
    """Run it; return the exit code: 1 if a system could not be measured to its end."""
    given = _parse(arguments)
    console = Console(stderr=True)
    try:
        folder = model.prepare(model.DEFAULT_FOLDER) if given.model is None else given.model
        plan = full(folder, given.traces) if given.full else quick(folder)
        plan = _only(plan, given.only)
        out = given.out or results.new_folder(plan.name)
        out.mkdir(parents=True, exist_ok=True)
        runs, failed = _run(plan, out, console)
        if not runs:
            raise TrafficError("Nothing could be measured: " + "; ".join(e.message for e in failed))
    except (TrafficError, model.ModelError) as error:
        console.print(f"loadtest: {error}", markup=False)
        return 2
    print(results.table(runs))
    for each in failed:
        console.print(f"not measured: {each.system}, {each.scenario}: {each.message}", markup=False)
    print(f"\n{os.path.relpath(out / 'page.md')}")
    return 1 if failed else 0


def _run(plan: Plan, out: Path, console: Console) -> tuple[list[Labelled], list[Failed]]:
    measured = hardware(out, LMCACHE_ENVIRONMENT)
    runs: list[Labelled] = []
    failed: list[Failed] = []
    began = time.monotonic()
    with _progress(console) as progress:
        task = progress.add_task("load test", total=plan.runs)

        def say(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal:
                console.print(f"{time.monotonic() - began:6.0f} s  {text}", markup=False)

        for group in plan.groups:
            left = sum(leg.runs for leg in group)
            for found in conduct(group, out, say):
                if isinstance(found, Failed):
                    failed.append(found)
                    continue
                runs.append(found)
                left -= 1
                progress.advance(task)
            progress.advance(task, left)
            if runs:  # So that what there is can be looked at, and a later fault loses nothing.
                results.write(out, plan.name, runs, failed, ended(measured))
    return runs, failed


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        disable=not console.is_terminal,
    )


def _only(plan: Plan, names: Sequence[str]) -> Plan:
    if not names:
        return plan
    groups = [[leg for leg in group if leg.peer in names] for group in plan.groups]
    if not any(groups):
        known = ", ".join(sorted({leg.peer for leg in plan.legs}))
        raise TrafficError(f"No system of the plan is named {', '.join(names)}; there are {known}.")
    return replace(plan, groups=[group for group in groups if group])


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.campaign", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all systems, workloads and faults")
    parser.add_argument("--only", nargs="+", default=[], metavar="SYSTEM", help="such as kvtier")
    parser.add_argument("--out", type=Path, help="folder of the results; default: a new one")
    parser.add_argument("--model", type=Path, help="folder of a model; default: SmolLM2, prepared")
    parser.add_argument("traces", nargs="*", type=Path, help="traces to replay, with --full")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
