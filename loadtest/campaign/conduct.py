"""Takes systems through their stages under their workloads, side by side, and keeps each run.

A machine's speed changes within minutes. So the systems of a group are up at the same time, and in
each stage they are asked in turn: request by request where one user asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..peers import Peer, PeerError, Setup, running
from ..peers.peer import MODEL_NAME
from ..rig import RigError
from ..stack import Part, StackError
from ..traffic.records import Record
from ..traffic.requests import Workload
from ..traffic.runner import Closed, Loop, RunOptions, run
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
Turn = contextlib.AbstractAsyncContextManager[object]
_GOES_WRONG = (StackError, PeerError, RigError)
_NO_TURN = contextlib.nullcontext()


def conduct(group: Sequence[Leg], folder: Path, say: Say) -> Iterator[Labelled | Failed]:
    """Start the systems of a group, ask them side by side, and stop them.

    Yields the runs of each stage when all of them have ended; each is saved as it ends. What each
    system was set up with is written beside them. A stage that fails ends its leg, and no other's.
    """
    with contextlib.ExitStack() as ends:
        going: list[_Going] = []
        for leg in group:
            say(f"{leg.system}: starting")
            own = ends.enter_context(contextlib.ExitStack())
            try:
                peer = own.enter_context(running(leg.peer, leg.setup))
                leg.prepare(peer)
            except _GOES_WRONG as error:
                yield Failed(leg.system, "start", str(error))
            else:
                going.append(_Going(leg, peer, own))
                name = _file_name(f"{leg.system} {leg.setup.tiers.value}")
                _write_settings(peer, folder / f"{name}.settings.json")
        for at, number in _steps(group):
            asked = [one for one in going if number < len(one.leg.loads[at].stages)]
            for found in _ask(asked, at, number, folder, say):
                if isinstance(found, Failed):
                    (failed,) = (one for one in going if one.leg.system == found.system)
                    going.remove(failed)
                    failed.end.close()
                yield found


@dataclass(frozen=True, slots=True)
class _Going:
    """A leg under way."""

    leg: Leg
    peer: Peer
    end: contextlib.ExitStack
    """Stops it."""


def _steps(group: Sequence[Leg]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of each load and stage: of the leg that has most stages."""
    for at, loads in enumerate(zip(*(leg.loads for leg in group), strict=True)):
        yield from ((at, number) for number in range(max(len(load.stages) for load in loads)))


def _ask(
    asked: Sequence[_Going], at: int, number: int, folder: Path, say: Say
) -> list[Labelled | Failed]:
    """Take the systems to a stage, one after the other, then ask all of them."""
    ready: list[tuple[_Going, Part]] = []
    found: list[Labelled | Failed] = []
    for one in asked:
        scenario = one.leg.loads[at].scenario(number)
        say(f"{one.leg.system}: {scenario}")
        try:
            ready.append((one, one.leg.loads[at].stages[number].prepare(one.peer)))
        except _GOES_WRONG as error:
            found.append(Failed(one.leg.system, scenario, str(error)))
    if number % 2:  # Nobody is always the first.
        ready.reverse()
    return found + asyncio.run(_in_turn(ready, at, number, folder))


async def _in_turn(
    ready: Sequence[tuple[_Going, Part]], at: int, number: int, folder: Path
) -> list[Labelled | Failed]:
    """Send the workload to all, request by request; where users overlap, one whole run a time."""
    turn = asyncio.Lock()  # Fair: who asked for it first has it next.

    async def one(going: _Going, engine: Part) -> Labelled | Failed:
        load = going.leg.loads[at]
        whole, each = (turn, _NO_TURN) if load.loop != Closed(1) else (_NO_TURN, turn)
        async with whole:
            try:
                return await _one(going, engine, load, number, folder, each)
            except _GOES_WRONG as error:
                return Failed(going.leg.system, load.scenario(number), str(error))

    return list(await asyncio.gather(*(one(*each) for each in ready)))


async def _one(
    going: _Going, engine: Part, load: Load, number: int, folder: Path, turn: Turn
) -> Labelled:
    peer, system = going.peer, going.leg.system
    fault = load.fault if number == len(load.stages) - 1 else None
    scenario = load.scenario(number)
    where = _new_folder(folder / _file_name(scenario) / _file_name(system))
    strike = _half_way(peer, fault, len(load.workload.requests))
    counts = (engine.url, *peer.counts_at())
    options = RunOptions(raw=where / RAW, metrics=counts, done=strike, turn=turn)
    try:
        found = await run(
            engine.url, MODEL_NAME, load.workload, load.loop, progress=False, options=options
        )
    finally:
        if fault is not None:
            fault.mend(peer)
    labelled = Labelled(system, scenario, load.workload.facts(), found)
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
