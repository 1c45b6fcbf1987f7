"""What kvtier earns, shown on a real model through the OpenAI client.

Two chapters of Python's own documentation, and a question of each of three users about them:
answered cold; again, from the device (L0); from host memory (L1) after the device forgot all, after
a restart of the engine, and in a second engine beside it; from disk (L2) after a restart of the
server; and from Redis (L2) on a second host, which is a second server with a memory and a directory
of its own. Greedy answers must be the cold ones.

    python -m loadtest.demo [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.table import Table

from . import model
from .stack import (
    CPU_ENGINE_OPTIONS,
    POLL_SECONDS,
    Part,
    StackError,
    start_redis,
    start_server,
    start_up,
)

CHAPTERS = ("execmodel", "with")
"""Topics of Python's documentation, which comes with every Python: about 3,000 tokens."""
QUESTIONS = {
    "Ada": "What is a scope?",
    "Ben": "What is a free variable?",
    "Cyd": "What does the with statement do?",
}
"""By user. A user is a `cache_salt`, and finds no other's blocks: each first question is cold."""
ANSWER_TOKENS = 20
CAPACITY = "1GiB"
MODEL_TOKENS = 4096
ENGINE_MEMORY = str(10**9)
"""Bytes of vLLM's own cache: more than this demo fills."""
MIN_GAINS = {"host": 5.0, "disk": 3.0, "redis": 3.0}
"""What a tier must be worth: cold TTFT over that of its slowest step."""
RECONNECTED_SECONDS = 10.0
"""Engines look for a server that has gone ten times a second."""
TIERS = {"device": "L0", "host": "L1", "disk": "disk", "redis": "Redis"}
MIN_CACHED = 0.9
"""Share of the prompt that must come from the tier that a step is about."""


class DemoError(Exception):
    """A check failed. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. Times in seconds; `tokens` are cached prompt tokens by tier."""

    question: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    tokens: dict[str, int]
    ttft: float


@dataclass(frozen=True, slots=True)
class Step:
    """One row of the table: all questions under one condition, served by the tier `source`."""

    name: str
    source: str
    answers: list[Answer]

    @property
    def ttft(self) -> float:
        """Median time to the first token, in seconds."""
        return statistics.median(answer.ttft for answer in self.answers)


class Screen:
    """Says what is going on: a spinner on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._began = time.monotonic()

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show that `what` goes on, and how long it took."""
        began = time.monotonic()
        if self.console.is_terminal:
            with self.console.status(f"{what} …"):
                yield
        else:
            self.console.print(f"{what} …")
            yield
        took = time.monotonic() - began
        self.console.print(f"[green]✓[/] {what} [dim]{took:.1f} s[/]")

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began


class Engine:
    """One engine, asked through the OpenAI client."""

    def __init__(self, part: Part, name: str, server: Part) -> None:
        self.part = part
        self.name = name
        self.server = server
        self._client = OpenAI(base_url=f"{part.url}/v1", api_key="none", max_retries=0)

    def ask(self, user: str, question: str) -> Answer:
        """Return the greedy answer, streamed. Raises DemoError if there is none."""
        before = self._cached()
        pieces, first, usage = [], 0.0, None
        began = time.perf_counter()
        with self._asking():
            stream = self._client.chat.completions.create(
                model=self.name,
                messages=[{"role": "user", "content": f"{_document()}\n\nQuestion: {question}"}],
                temperature=0,
                seed=0,
                max_tokens=ANSWER_TOKENS,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"cache_salt": user},
            )
            for chunk in stream:
                if chunk.choices and (piece := chunk.choices[0].delta.content):
                    first = first or time.perf_counter()
                    pieces.append(piece)
                usage = chunk.usage or usage
        if usage is None or not pieces:
            raise DemoError(f"The engine gave no answer to {question!r}.")
        details, after = usage.prompt_tokens_details, self._cached()
        return Answer(
            question,
            "".join(pieces),
            usage.prompt_tokens,
            (details.cached_tokens or 0) if details else 0,
            {tier: tokens - before.get(tier, 0) for tier, tokens in after.items()},
            first - began,
        )

    def warm_up(self) -> None:
        """Pay once what only the first request of a process costs, with an unrelated prompt."""
        with self._asking():
            self._client.completions.create(model=self.name, prompt="Hello", max_tokens=2)

    def forget(self) -> None:
        """Empty the engine's own cache (L0), and nothing else."""
        self.part.post("/reset_prefix_cache")

    def reconnected(self) -> None:
        """Wait until the server has the sessions of this engine. Raises DemoError if none come."""
        end = time.monotonic() + RECONNECTED_SECONDS
        while not {"scheduler", "worker"} <= {each["role"] for each in self._sessions()}:
            if time.monotonic() > end:
                raise DemoError(
                    f"{self.part.child.name} did not connect again in {RECONNECTED_SECONDS:g} s."
                )
            time.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Turn what the client raises into a DemoError that shows what the engine said last."""
        try:
            yield
        except OpenAIError as error:
            why = f"{error} {error.__cause__ or ''}".strip()
            code = self.part.child.exit_code()
            state = "runs" if code is None else f"ended with exit code {code}"
            raise DemoError(
                f"A request to {self.part.child.name}, which {state}, failed: {why}\n"
                f"{self.part.tail()}"
            ) from error

    def _sessions(self) -> list[dict[str, str]]:
        sessions: list[dict[str, str]] = json.loads(self.server.get("/v1/sessions"))
        return sessions

    def _cached(self) -> dict[str, int]:
        """Return how many prompt tokens each tier has served since the server's start."""
        stats = json.loads(self.server.get("/v1/stats"))
        return {tier["tier"]: tier["tokens_hit"] for tier in stats["traffic"]}


def main() -> int:
    """Run the demo and return a process exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.demo", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write raw results there")
    parser.add_argument("--model", type=Path, default=model.DEFAULT_FOLDER, help="model folder")
    options = parser.parse_args()
    screen = Screen()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        steps = _prepare_and_run(screen, options.model)
        _show(screen, steps)
        if options.json:
            _write(options.json, steps)
        _check(steps)
    except (DemoError, StackError, model.ModelError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped; nothing runs on", file=sys.stderr)
        return 130
    screen.console.print(f"All answers are the cold ones. It took {screen.elapsed:.0f} s.")
    return 0


def _prepare_and_run(screen: Screen, folder: Path) -> list[Step]:
    model.prepare(folder)
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as name, contextlib.ExitStack() as ends:
        return _run(_Stack(Path(name), folder, screen, ends), screen)


class _Stack:
    """Redis, the servers of two hosts, and engines; all end with `ends`, the latest first."""

    def __init__(
        self, folder: Path, model_folder: Path, screen: Screen, ends: contextlib.ExitStack
    ) -> None:
        self._folder = folder
        self._model = str(model_folder)
        self._screen = screen
        self._ends = ends
        self._redis = start_redis(folder)
        ends.callback(self._redis.stop)

    def server(self, host: str) -> Part:
        """Start a host's server, with the directory that the host has, and wait for it."""
        options = ["--capacity", CAPACITY, "--disk", str(self._folder / f"{host}-blocks")]
        server = start_server(self._folder, *options, "--redis", self._redis.url, name=host)
        self._ends.callback(server.stop)
        with self._screen.doing(f"starting the kvtier server of {host} ({CAPACITY} of memory)"):
            server.wait()
        return server

    def engines(self, server: Part, *names: str) -> list[Engine]:
        """Start engines at the same time through `kvtier up`, and wait for them."""
        options = [self._model, *CPU_ENGINE_OPTIONS, "--max-model-len", str(MODEL_TOKENS)]
        options += ["--kv-cache-memory-bytes", ENGINE_MEMORY]
        parts = []
        for name in names:
            up = ["--socket", str(server.socket)]
            parts.append(start_up(self._folder, up, options, name))
            self._ends.callback(parts[-1].stop)
        with self._screen.doing(f"starting vLLM: {' and '.join(names)} (up to a minute)"):
            for part in parts:
                part.wait()
        engines = [Engine(part, self._model, server) for part in parts]
        for engine in engines:
            engine.warm_up()
        return engines


def _run(stack: _Stack, screen: Screen) -> list[Step]:
    """Return all steps of the demo, measured."""

    def step(name: str, source: str, engine: Engine) -> Step:
        answers = []
        with screen.doing(f"{name}: {len(QUESTIONS)} questions"):
            for user, question in QUESTIONS.items():
                if source not in ("none", "device"):
                    engine.forget()
                answers.append(engine.ask(user, question))
        return Step(name, source, answers)

    server = stack.server("host-1")
    (engine,) = stack.engines(server, "engine A")
    steps = [step("cold", "none", engine)]
    for answer in steps[0].answers:
        screen.console.print(f"  [dim]{answer.question}[/] {answer.text!r}", soft_wrap=True)
    steps.append(step("again", "device", engine))
    steps.append(step("L0 emptied", "host", engine))
    with screen.doing("stopping engine A; the server keeps running"):
        engine.part.stop()
    restarted, second = stack.engines(server, "engine A", "engine B")
    steps.append(step("engine restarted", "host", restarted))
    steps.append(step("second engine", "host", second))
    with screen.doing("stopping the server and engine B; engine A keeps running"):
        second.part.stop()
        server.stop()
    restarted.server = stack.server("host-1")
    with screen.doing("waiting until engine A has found it"):
        restarted.reconnected()
    restarted.warm_up()
    steps.append(step("server restarted", "disk", restarted))
    with screen.doing("stopping engine A"):
        restarted.part.stop()
    (elsewhere,) = stack.engines(stack.server("host-2"), "engine C")
    steps.append(step("second host", "redis", elsewhere))
    return steps


def _document() -> str:
    return "\n\n".join(topics[name] for name in CHAPTERS)


def _show(screen: Screen, steps: Sequence[Step]) -> None:
    title = f"medians of {len(QUESTIONS)} questions: prompt tokens, and how many came from where"
    table = Table(title=title, title_justify="left")
    table.add_column("step")
    for column in ("tokens", *TIERS.values(), "TTFT", "gain"):
        table.add_column(column, justify="right")
    for step in steps:
        tiers = [
            _median(step, lambda answer, tier=tier: answer.tokens.get(tier, 0)) for tier in TIERS
        ]
        table.add_row(
            step.name,
            _median(step, lambda answer: answer.prompt_tokens),
            *tiers,
            f"{step.ttft:.3f} s",
            f"{steps[0].ttft / step.ttft:.1f}x",
        )
    screen.console.print(table)


def _median(step: Step, of: Callable[[Answer], int]) -> str:
    return f"{statistics.median(of(answer) for answer in step.answers):,.0f}"


def _check(steps: Sequence[Step]) -> None:
    """Raise DemoError unless each step was served by its tier, with the cold answers."""
    for step in steps:
        for answer, cold in zip(step.answers, steps[0].answers, strict=True):
            if answer.text != cold.text:
                raise DemoError(
                    f"{step.name}: the answer to {answer.question!r} is {answer.text!r}, and was "
                    f"{cold.text!r} cold."
                )
            wanted = answer.tokens.get(step.source, 0)
            if step.source == "none" and answer.cached_tokens:
                raise DemoError(f"{step.name}: {answer.cached_tokens} tokens came from a cache.")
            if step.source != "none" and wanted < MIN_CACHED * answer.prompt_tokens:
                raise DemoError(
                    f"{step.name}: only {wanted} of {answer.prompt_tokens} prompt tokens came from "
                    f"the {step.source} tier."
                )
    for tier, least in MIN_GAINS.items():
        if (gain := gain_from(steps, tier)) < least:
            raise DemoError(f"The gain from {tier} is {gain:.1f}, and should be {least:g} or more.")


def gain_from(steps: Sequence[Step], tier: str) -> float:
    """Return the cold median TTFT over that of the slowest step served from a tier."""
    return steps[0].ttft / max(step.ttft for step in steps if step.source == tier)


def _write(file: Path, steps: Sequence[Step]) -> None:
    results = {
        "figure": "demo_l1_gain",
        "value": gain_from(steps, "host"),
        "bound": MIN_GAINS["host"],
        "gains": {tier: gain_from(steps, tier) for tier in MIN_GAINS},
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine()},
        "python": platform.python_version(),
        "steps": [asdict(step) | {"ttft": step.ttft} for step in steps],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
