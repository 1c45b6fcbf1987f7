"""Takes one system through its stages under its workloads, and keeps each run at once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..peers import Peer, PeerError, Setup, running
from ..peers.peer import MODEL_NAME
from ..rig import RigError
from ..stack import StackError
from ..traffic.records import Record
from ..traffic.requests import Workload
from ..traffic.runner import Loop, RunOptions, run
from ..traffic.summary import RAW, Labelled, save
from .stages import Fault, Stage


@dataclass(frozen=True, slots=True)
class Load:
    """A workload, how it is sent, and the stages before each time that it is."""

    workload: Workload
    loop: Loop
    stages: Sequence[Stage]
    about: str = ""
    """What results add to the workload's name: runs of equal names are compared."""
    fault: Fault | None = None
    """What goes wrong in the last stage."""

    def scenario(self, number: int) -> str:
        """Return how results name the run after stage `number`."""
        name = " ".join(filter(None, (self.workload.name, self.about)))
        return f"{name}: {self.stages[number].name}"


@dataclass(frozen=True, slots=True)
class Leg:
    """One system with its tiers, from start to end, and all that it is asked."""

    system: str
    """How results name it."""
    peer: str
    """A name in PEERS."""
    setup: Setup
    loads: Sequence[Load]
    prepare: Callable[[Peer], None] = lambda _: None
    """What is set when it is ready, such as another policy."""

    @property
    def runs(self) -> int:
        """How often a workload is sent."""
        return sum(len(load.stages) for load in self.loads)


@dataclass(frozen=True, slots=True)
class Failed:
    """A leg that could not go on: the message is what happened, and at which stage."""

    system: str
    scenario: str
    message: str


Say = Callable[[str], None]


def conduct(leg: Leg, folder: Path, say: Say) -> Iterator[Labelled | Failed]:
    """Start a system, ask it, and stop it. Yields each run as it ends, already saved.

    What it was set up with is written beside them. A stage that fails ends the leg.
    """
    scenario = "start"
    try:
        say(f"{leg.system}: starting")
        with running(leg.peer, leg.setup) as peer:
            leg.prepare(peer)
            name = _file_name(f"{leg.system} {leg.setup.tiers.value}")
            _write_settings(peer, folder / f"{name}.settings.json")
            for load in leg.loads:
                for number in range(len(load.stages)):
                    scenario = load.scenario(number)
                    say(f"{leg.system}: {scenario}")
                    yield _one(peer, leg, load, number, folder)
    except (StackError, PeerError, RigError) as error:
        yield Failed(leg.system, scenario, str(error))


def _one(peer: Peer, leg: Leg, load: Load, number: int, folder: Path) -> Labelled:
    engine = load.stages[number].prepare(peer)
    last = number == len(load.stages) - 1
    fault = load.fault if last else None
    scenario = load.scenario(number)
    where = _new_folder(folder / _file_name(scenario) / _file_name(leg.system))
    strike = _half_way(peer, fault, len(load.workload.requests))
    counts = (engine.url, *peer.counts_at())
    options = RunOptions(raw=where / RAW, metrics=counts, done=strike)
    try:
        found = asyncio.run(run(engine.url, MODEL_NAME, load.workload, load.loop, options=options))
    finally:
        if fault is not None:
            fault.mend(peer)
    labelled = Labelled(leg.system, scenario, load.workload.facts(), found)
    save(labelled, where)
    return labelled


def _half_way(peer: Peer, fault: Fault | None, requests: int) -> Callable[[Record], None]:
    ended = 0

    def count(_: Record) -> None:
        nonlocal ended
        ended += 1
        if fault is not None and ended == requests // 2:
            fault.strike(peer)

    return count


def _write_settings(peer: Peer, file: Path) -> None:
    file.write_text(json.dumps(peer.settings(), indent=2) + "\n", "utf-8")


def _new_folder(wanted: Path) -> Path:
    """Make a folder for a run; repetitions get a number."""
    folder, number = wanted, 1
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    folder.mkdir(parents=True)
    return folder


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()
