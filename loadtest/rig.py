"""Engines with and without kvtier for measurements, asked with raw token ids over HTTP.

All engines of a rig run the same model with the same options; only the connector makes the
difference. They share the machine's cores, so that one is asked while the others have nothing to
do, and `Engine.ask` leaves them a moment to finish what an answer leaves behind.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from . import model
from .stack import (
    CPU_ENGINE_OPTIONS,
    ONE_PROCESS_ENVIRONMENT,
    ONE_PROCESS_OPTIONS,
    Part,
    StackError,
    start_server,
    start_vllm,
)

BLOCK_TOKENS = 32
CAPACITY = "2GiB"
ENGINE_MEMORY = str(450 * 2**20)
"""Bytes of an engine's own cache: 10,000 tokens, all of which warming up has touched once."""
MODEL_TOKENS = 4096
FIRST_TOKEN, LAST_TOKEN = 1000, 40_000
"""Of the vocabulary: no special tokens."""
SETTLE_SECONDS = 0.2
"""For stores that go on after an answer, and for whatever else a request sets off."""
ANSWER_SECONDS = 300.0
STORE_SECONDS = 60.0
WITH, WITHOUT = "with kvtier", "without"


class RigError(Exception):
    """The engines did not do what is being measured. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer: seconds to the first token, and prompt tokens that were not computed."""

    ttft: float
    cached: int


class Engine:
    """One vLLM server."""

    def __init__(self, part: Part, name: str) -> None:
        self.name = name
        self.part = part
        self._http = httpx.Client(base_url=part.url, timeout=ANSWER_SECONDS)
        self._prompts = 0

    def ask(self, prompt: Sequence[int]) -> Asked:
        """Return how long the first token of an answer took, over HTTP and streamed."""
        time.sleep(SETTLE_SECONDS)
        usage = None
        first = 0.0
        body = _body(prompt, 1) | {"stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter()
                    usage = json.loads(line[6:]).get("usage") or usage
        if answer.status_code != 200 or usage is None:
            raise RigError(f"the engine {self.name} gave no answer.")
        details = usage.get("prompt_tokens_details") or {}
        return Asked(first - began, details.get("cached_tokens") or 0)

    def wake(self) -> None:
        """Ask for something short that nobody caches: an engine that rested is slower once."""
        self.ask(WAKING)

    def answer(self, prompt: Sequence[int], tokens: int) -> None:
        """Wait for an answer of so many tokens. May be called by several threads at once."""
        got = self._http.post("/v1/completions", json=_body(prompt, tokens))
        if got.status_code != 200 or got.json()["usage"]["completion_tokens"] != tokens:
            raise RigError(f"the engine {self.name} gave no answer of {tokens} tokens.")

    def forget(self) -> None:
        """Empty the engine's own cache (L0), and nothing else."""
        self.part.post("/reset_prefix_cache")

    def counter(self, name: str, **labels: str) -> float:
        """Return a counter of the engine's /metrics, summed over the labels not given."""
        return counter(self.part, name, **labels)

    def close(self) -> None:
        """Close the connections to it."""
        self._http.close()


@dataclass(frozen=True, slots=True)
class Rig:
    """A server and engines by name."""

    server: Part
    engines: dict[str, Engine]

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    def stored(self) -> float:
        """Return how many blocks the server has taken."""
        return counter(self.server, "kvtier_stores_total", outcome="committed")

    def wait_stored(self, blocks: float) -> None:
        """Wait until the server has taken so many blocks in all. Raises RigError."""
        _wait(self.stored, blocks, "stored")

    def written(self, tier: str) -> float:
        """Return how many blocks a lower tier has taken."""
        return counter(self.server, "kvtier_writes_total", tier=tier, outcome="written")

    def wait_written(self, tier: str, blocks: float) -> None:
        """Wait until a lower tier has taken so many blocks in all. Raises RigError."""
        _wait(lambda: self.written(tier), blocks, f"written to {tier}")


@contextlib.contextmanager
def rig(*names: str, capacity: str = CAPACITY, lower: Sequence[str] = ()) -> Iterator[Rig]:
    """Start a server and the engines WITH or WITHOUT, ready and past their first requests.

    `lower` are options of the server that give it tiers below the host tier.
    """
    folder = str(model.prepare(model.DEFAULT_FOLDER))
    with contextlib.ExitStack() as ends:
        work = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-rig-")))
        server = start_server(work, "--capacity", capacity, *lower)
        ends.callback(server.stop)
        server.wait()
        parts = {}
        for number, name in enumerate(names):
            options = ["--model", folder, "--served-model-name", "model", *_options()]
            if name == WITH:
                options += ["--kv-transfer-config", transfer_config(server)]
            parts[name] = start_vllm(work, options, f"engine{number}", ONE_PROCESS_ENVIRONMENT)
            ends.callback(parts[name].stop)
        engines = {}
        for name, part in parts.items():
            part.wait()
            engines[name] = Engine(part, name)
            ends.callback(engines[name].close)
        yield Rig(server, engines)


def prompt(name: str, tokens: int) -> list[int]:
    """Return random token ids; equal names give equal prompts."""
    generator = random.Random(name)
    return [generator.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]


WAKING = prompt("waking", BLOCK_TOKENS - 2)
"""No whole block."""


def counter(part: Part, name: str, **labels: str) -> float:
    """Return a counter from /metrics, summed over the labels not given. Raises RigError."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = [line for line in part.get("/metrics").splitlines() if line.startswith(name)]
    found = [line for line in lines if line[len(name)] in "{ " and all(w in line for w in wanted)]
    if not found:
        raise RigError(f"{part.child.name} has no metric {name}.")
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def _wait(have: Callable[[], float], blocks: float, what: str) -> None:
    end = time.monotonic() + STORE_SECONDS
    while have() < blocks:
        if time.monotonic() > end:
            raise RigError(f"only {have():.0f} of {blocks:.0f} blocks were {what}.")
        time.sleep(0.05)


def _body(prompt_ids: Sequence[int], tokens: int) -> dict[str, object]:
    return {
        "model": "model",
        "prompt": list(prompt_ids),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _options() -> list[str]:
    return [
        *CPU_ENGINE_OPTIONS,
        *ONE_PROCESS_OPTIONS,
        "--max-model-len", str(MODEL_TOKENS),
        "--kv-cache-memory-bytes", ENGINE_MEMORY,
        "--prefix-caching-hash-algo", "sha256_cbor",
    ]  # fmt: skip


def transfer_config(server: Part, **extra: object) -> str:
    """Return vLLM's --kv-transfer-config for a kvtier server; `extra` are the connector's own."""
    return json.dumps(
        {
            "kv_connector": "KVTierConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": str(server.socket), **extra},
        }
    )


__all__ = ["WITH", "WITHOUT", "Engine", "Rig", "RigError", "StackError", "prompt", "rig"]
