"""A fleet of simulated engines, each in a process of its own, as real ones are.

The processes are forked once, before this one has threads or sessions, and wait for orders. They
end with the fleet, or when this process does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from ..rig import RigError
from .engine import Engine, Work
from .prompts import Shape

ANSWER_SECONDS = 180.0
"""Longest wait for an engine that has something to do."""
START_SECONDS = 0.3
"""From an order to the moment at which all engines begin."""


@dataclass(frozen=True, slots=True)
class Join:
    """Connect to a server."""

    socket: Path
    shape: Shape


@dataclass(frozen=True, slots=True)
class Add:
    """Store so many blocks of each prompt."""

    prompts: Sequence[str]
    blocks: int


@dataclass(frozen=True, slots=True)
class Check:
    """Load prompts and compare every byte."""

    prompts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Run:
    """Do one kind of work from `begin` to `end` (monotonic), resting `think` seconds between."""

    work: Work
    begin: float
    end: float
    think: float
    prompts: Sequence[str]
    """Of which each turn takes one at random."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Disconnect."""


Order = Join | Add | Check | Run | Leave


@dataclass(frozen=True, slots=True)
class Done:
    """What one engine did. `seconds` has each call's times, `cpu_seconds` are of its process."""

    turns: int = 0
    blocks: int = 0
    cpu_seconds: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    error: str = ""


class Fleet:
    """Processes for engines. Calls raise RigError when an engine fails or does not answer."""

    def __init__(self, size: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(size):
            near, far = multiprocessing.Pipe()
            self._pipes.append(near)
            arguments = (number, far, list(self._pipes))
            process = fork.Process(target=_serve_orders, args=arguments, daemon=True)
            process.start()
            far.close()
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()

    @contextlib.contextmanager
    def joined(self, socket: Path, shape: Shape, engines: int) -> Iterator[Engines]:
        """Connect the first `engines` to a server, for the time of a `with`."""
        chosen = Engines(self._pipes[:engines])
        chosen.order([Join(socket, shape)] * engines)
        yield chosen
        chosen.order([Leave()] * engines)


class Engines:
    """Engines that are connected."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def __len__(self) -> int:
        return len(self._pipes)

    def add(self, prompts: Sequence[str], blocks: int) -> None:
        """Store so many blocks of each prompt, each engine some of them."""
        self.order([Add(share, blocks) for share in self._shares(prompts)])

    def check(self, prompts: Sequence[str]) -> None:
        """Load all prompts, each engine some of them, and compare every byte."""
        self.order([Check(share) for share in self._shares(prompts)])

    def begin(self, work: Work, seconds: float, think: float, prompts: Sequence[str]) -> Run:
        """Let all begin at once, soon. Returns what they were told; `finish` waits for them."""
        begin = time.monotonic() + START_SECONDS
        run = Run(work, begin, begin + seconds, think, prompts)
        self._send([run] * len(self))
        return run

    def finish(self) -> list[Done]:
        """Return what each engine did since `begin`."""
        until = time.monotonic() + ANSWER_SECONDS
        done: list[Done] = []
        for pipe in self._pipes:
            if not pipe.poll(max(until - time.monotonic(), 0.0)):
                raise RigError(f"an engine did not answer in {ANSWER_SECONDS:.0f} s.")
            try:
                done.append(pipe.recv())
            except EOFError:
                raise RigError("an engine's process has ended.") from None
        if errors := [one.error for one in done if one.error]:
            raise RigError(errors[0])
        return done

    def order(self, orders: Sequence[Order]) -> None:
        """Give each engine its order, and wait until all have done theirs."""
        self._send(orders)
        self.finish()

    def _shares(self, prompts: Sequence[str]) -> list[Sequence[str]]:
        return [prompts[number :: len(self)] for number in range(len(self))]

    def _send(self, orders: Sequence[Order]) -> None:
        for pipe, order in zip(self._pipes, orders, strict=True):
            try:
                pipe.send(order)
            except OSError as error:
                raise RigError(f"an engine's process has ended: {error}.") from None


def _serve_orders(number: int, pipe: Connection, others: Sequence[Connection]) -> None:
    """Do what is ordered, in an engine's process, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent tells when to end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()
    engine: Engine | None = None
    while True:
        try:
            order: Order = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            engine, done = _carry_out(order, engine, number)
        except RigError as error:
            done = Done(error=f"engine {number}: {error}")
        except Exception as error:  # noqa: BLE001  # The top of a process: the parent says it.
            done = Done(error=f"engine {number} failed: {error!r}.")
        pipe.send(done)


def _carry_out(order: Order, engine: Engine | None, number: int) -> tuple[Engine | None, Done]:
    if isinstance(order, Join):
        return Engine(order.socket, f"engine-{number}", order.shape), Done()
    assert engine is not None, "an engine joins first"
    match order:
        case Add():
            for prompt in order.prompts:
                engine.add(prompt, order.blocks)
        case Check():
            for prompt in order.prompts:
                engine.load_whole(prompt)
        case Run():
            return engine, _run(order, engine, number)
        case Leave():
            engine.close()
            return None, Done()
    return engine, Done()


def _run(run: Run, engine: Engine, number: int) -> Done:
    chosen = random.Random(number)
    engine.seconds.clear()
    turns = blocks = 0
    time.sleep(max(run.begin - time.monotonic(), 0.0))
    cpu = time.process_time()
    while time.monotonic() < run.end:
        blocks += engine.turn(run.work, chosen.choice(run.prompts))
        turns += 1
        if run.think:
            time.sleep(run.think)
    done = Done(
        turns,
        blocks,
        time.process_time() - cpu,
        {name: each[:] for name, each in engine.seconds.items()},
    )
    if run.work is Work.LOAD:
        engine.load_whole(chosen.choice(run.prompts))
    return done
