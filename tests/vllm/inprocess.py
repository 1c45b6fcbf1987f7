"""An engine that a test may look into: `vllm.LLM`, with scheduler and worker in one process.

Importing vLLM takes several times as long as starting an engine of the tiny model. So one process,
the nursery, imports it, and every `LocalEngine` is a fork of that. Forks share what is random by
process, as Python's hash seed; where that matters, use processes that have nothing in common.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket as sockets
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from loadtest.stack import ENGINE_SECONDS, Part, StackError, start_part

ANSWER_SECONDS = 120.0
POLL_SECONDS = 0.1
ENVIRONMENT = {
    # More threads are no faster with so small a model, and far slower on busy cores.
    "OMP_NUM_THREADS": "1",
    # A few helpers of vLLM's are compiled at their first use even where the model is not.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class Completion:
    """One answer. `cached` is how many prompt tokens were not computed."""

    tokens: list[int]
    prompt_tokens: int
    cached: int
    finish: str = "length"
    """Why it ended, in vLLM's words: `error` if the engine failed it."""
    samples: list[list[int]] = field(default_factory=list)
    """The tokens of each of `n` samples; `tokens` are those of the first."""
    prompt_logprobs: list[list[list[float]]] = field(default_factory=list)
    """For each prompt token after the first: pairs of token and log probability."""
    transfer: dict[str, object] | None = None
    """`kv_transfer_params` of the answer."""


@dataclass(frozen=True)
class Ask:
    """A request to a `LocalEngine`, greedy unless `sampling` says otherwise.

    `embeds` (seed, rows, width) is for random prompt embeddings instead of `tokens`, `lora` is
    (name, number, folder); `sampling` goes to vLLM's `SamplingParams`.
    """

    tokens: Sequence[int] = ()
    embeds: tuple[int, int, int] | None = None
    salt: str | None = None
    lora: tuple[str, int, str] | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)


class LocalEngine:
    """`vllm.LLM` in a process of its own that does everything itself."""

    def __init__(self, folder: Path, name: str, options: dict[str, object]) -> None:
        path = folder / f"{name}.ctl"
        self._listener = listening(path)
        log = folder / f"{name}.log"
        log.touch()
        child = Nursery.shared().fork(name, path, options, log)
        self.part = Part(child, "", log, "", ENGINE_SECONDS)

    def connect(self) -> None:
        """Wait until the engine is ready."""
        with self._listener:
            self._file = accept(self._listener, self.part, ANSWER_SECONDS)

    def complete(self, tokens: Sequence[int], max_tokens: int = 16) -> Completion:
        """Return the greedy answer to a prompt of token ids."""
        return self.complete_all([tokens], max_tokens)[0]

    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 16
    ) -> list[Completion]:
        """Return the greedy answers to prompts that run at the same time."""
        return self.generate([Ask(each, sampling={"max_tokens": max_tokens}) for each in prompts])

    def generate(self, asks: Sequence[Ask]) -> list[Completion]:
        """Return the answers to requests that run at the same time."""
        requests = [dataclasses.asdict(each) for each in asks]
        return [_completion(each) for each in self._ask("generate", requests=requests)]

    def start(self, asks: Sequence[Ask]) -> list[str]:
        """Hand requests over and return their ids. They go on with `step` and `drain` only."""
        return self._ask("start", requests=[dataclasses.asdict(each) for each in asks])

    def step(self) -> dict[str, Completion]:
        """Take one step; return the answers that ended with it, by request."""
        return {key: _completion(each) for key, each in self._ask("step").items()}

    def abort(self, ids: Sequence[str]) -> None:
        """End requests before their answers are complete."""
        self._ask("abort", ids=list(ids))

    def drain(self) -> dict[str, Completion]:
        """Take steps until no request is left; return the answers that ended, by request."""
        return {key: _completion(each) for key, each in self._ask("drain").items()}

    def forget(self) -> None:
        """Empty the engine's own cache, and not the host tier."""
        assert self._ask("forget", outer=False), "a request still holds blocks"

    def forget_all(self) -> None:
        """Empty the engine's own cache and the host tier."""
        assert self._ask("forget", outer=True), "a request still holds blocks"

    def used_blocks(self) -> int:
        """Return how many blocks of the engine's own cache requests hold."""
        return self._ask("used_blocks")

    def cached_by_source(self) -> dict[str, int]:
        """Return how many prompt tokens came from which tier since the start."""
        return self._ask("cached_by_source")

    def count(self, name: str) -> int:
        """Return a counter of vLLM's own since the start."""
        return self._ask("count", name=name)

    def counters(self) -> dict[str, float]:
        """Return the connector's counters: `loaded_blocks`, `misses:deadline` and so on."""
        return self._ask("counters")

    def run(self, code: str) -> object:
        """Run Python in the engine, with `llm` (and what earlier code named); return `result`."""
        return self._ask("run", code=code)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it and return its exit code."""
        return self.part.stop(number)

    def _ask(self, operation: str, **arguments: object):
        self._file.write(json.dumps({"op": operation, **arguments}) + "\n")
        self._file.flush()
        line = self._file.readline()
        assert line, f"the local engine ended.\n{self.part.tail()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]


class Nursery:
    """Starts engines. There is one, from its first use until `close`."""

    _shared: Nursery | None = None

    @classmethod
    def shared(cls) -> Nursery:
        """Return the one that there is."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    @classmethod
    def close(cls) -> None:
        """End it. Engines that still run end too."""
        if cls._shared is not None:
            cls._shared._end()
            cls._shared = None

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="nursery-"))
        path = self._folder / "ctl"
        script = str(Path(__file__).with_name("local_engine.py"))
        with listening(path) as listener:
            command = [script, str(path)]
            self._part = start_part(self._folder, "nursery", command, ENVIRONMENT)
            self._file = accept(listener, self._part, ENGINE_SECONDS)

    def fork(self, name: str, path: Path, options: dict[str, object], log: Path) -> Fork:
        """Start an engine, which connects to `path` once it is ready."""
        arguments = {"path": str(path), "options": options, "log": str(log)}
        return Fork(self, name, self._ask("fork", arguments))

    def exit_code(self, pid: int) -> int | None:
        """Return how a fork ended, or None while it runs."""
        return self._ask("exit_code", {"pid": pid})

    def _ask(self, operation: str, arguments: dict[str, object]):
        self._file.write(json.dumps({"op": operation, **arguments}) + "\n")
        self._file.flush()
        line = self._file.readline()
        assert line, f"the nursery ended.\n{self._part.tail()}"
        return json.loads(line)

    def _end(self) -> None:
        self._file.close()
        self._part.stop()
        shutil.rmtree(self._folder)


@dataclass
class Fork:
    """One engine's process, with what `kvtier.children.Child` has."""

    nursery: Nursery
    name: str
    pid: int

    def exit_code(self) -> int | None:
        """Return how it ended (128 and the signal's number if by one), or None while it runs."""
        return self.nursery.exit_code(self.pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        os.kill(self.pid, number)

    def reap(self) -> int:
        """Kill what is left of it and of what it started; return the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        while (code := self.exit_code()) is None:
            time.sleep(POLL_SECONDS)
        return code


def listening(path: Path) -> sockets.socket:
    """Return a socket that one process may connect to."""
    listener = sockets.socket(sockets.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    listener.settimeout(POLL_SECONDS)
    return listener


def accept(listener: sockets.socket, part: Part, patience: float) -> TextIO:
    """Return lines to and from a part that is about to connect, and answers within `patience`."""
    end = time.monotonic() + part.limit
    while True:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            break
        if part.child.exit_code() is not None or time.monotonic() > end:
            raise StackError(f"{part.child.name} did not start.\n{part.tail()}")
    with connection:
        connection.settimeout(patience)
        return connection.makefile("rw")


def _completion(answer: Mapping[str, object]) -> Completion:
    samples = answer["samples"]
    return Completion(tokens=samples[0], **answer)
