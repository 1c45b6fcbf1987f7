"""Real servers and engines for end-to-end tests.

An `OnlineEngine` is vLLM's OpenAI server. A `LocalEngine` is `vllm.LLM` with scheduler and worker
in one process: it starts several times as fast, and a test may run code inside it. Both take
prompts as token ids and answer greedily, so that answers can be compared token for token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from inprocess import ANSWER_SECONDS, Completion, LocalEngine
from kvtier.endpoints import free_port

from loadtest import tiny
from loadtest.stack import (
    CPU_ENGINE_OPTIONS,
    LOOPBACK,
    ONE_PROCESS_ENVIRONMENT,
    ONE_PROCESS_OPTIONS,
    Part,
    start_part,
    start_server,
    start_up,
)

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 32
"""Tokens of a block."""
MODEL_TOKENS = 2048
KV_BYTES = 256 * 2**20
"""Bytes of an engine's own cache: about 130,000 tokens of the tiny model."""
BLOCK_BYTES = 2 * tiny.LAYERS * tiny.KV_HEADS * tiny.HEAD_SIZE * 4 * BLOCK
"""Bytes of one block of the tiny model: keys and values in float32."""
STOCK = 32
"""Slots that an engine may keep ready, and that no idle engine exceeds."""
DEADLINE_MS = 10_000
"""Of an engine's calls. No server is so slow; a machine that runs other tests too may be."""
SERVER_OPTIONS = ("--capacity", "256MiB")
IDLE_SECONDS = 20.0
POLL_SECONDS = 0.02
SOURCE_METRIC = "vllm:prompt_tokens_cached_by_source_total"
OPEN: list[Part] = []
"""What runs now. A failing test shows the end of their logs."""


def make_tiny_model() -> Path:
    """Return the folder of the tiny model."""
    return make_model(Path(tiny.__file__), "tiny-llama")


def make_model(script: Path, name: str) -> Path:
    """Return the folder of a model that `script` makes, once for each version of itself.

    Of the workers that want it at the same time, one makes it and the others wait.
    """
    version = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
    folder = ROOT / ".cache" / "models" / f"{name}-{version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "config.json").is_file():
            return folder
        # In a process of its own, because importing torch warns, and warnings fail tests here.
        command = [sys.executable, str(script), str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def prompt(seed: int, tokens: int) -> list[int]:
    """Return a random prompt; equal seeds give equal prompts, one a prefix of a longer one."""
    generator = random.Random(seed)
    special = len(tiny.SPECIAL_TOKENS)
    return [generator.randrange(special, special + 256) for _ in range(tokens)]


def transfer_config(server_socket: Path, **extra: object) -> dict[str, object]:
    """Return vLLM's --kv-transfer-config; `extra` goes into the connector's own options."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "socket": str(server_socket),
            "deadline_ms": DEADLINE_MS,
            **extra,
        },
    }


def late_config(server_socket: Path) -> dict[str, object]:
    """Return the same with copies that go on beside the model, and come late."""
    where = {"kv_connector": "LateConnector", "kv_connector_module_path": "late_connector"}
    return transfer_config(server_socket) | where


class Lab:
    """Starts parts with their files in one folder, and ends all of them with `close`."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self._ends = contextlib.ExitStack()
        self._names = (f"part{number}" for number in range(1000))

    def server(self, *options: str, name: str | None = None) -> Part:
        """Return a ready `kvtier serve`; its socket is `name`.sock in the lab's folder."""
        chosen = name or next(self._names)
        part = start_server(self.folder, *(options or SERVER_OPTIONS), name=chosen)
        return self._ready(part)

    def up(self, socket: Path, *options: str, engine: Sequence[str] = ()) -> OnlineEngine:
        """Return the engine of a ready `kvtier up` on `socket`."""
        up = ["--socket", str(socket), *options]
        arguments = [str(self.model), *self._engine_options(), *engine]
        part = start_up(self.folder, up, arguments, next(self._names))
        return OnlineEngine(self._ready(part), str(self.model))

    def engine(
        self, server_socket: Path | None = None, *options: str, **extra: object
    ) -> OnlineEngine:
        """Return a ready OpenAI server, with the connector where there is a socket."""
        port = free_port(LOOPBACK)
        command = [str(Path(__file__).with_name("serve_vllm.py")), str(self.model)]
        command += ["--host", LOOPBACK, "--port", str(port), "--enable-prompt-tokens-details"]
        command += [*self._engine_options(), *ONE_PROCESS_OPTIONS, *options]
        command += ["--prefix-caching-hash-algo", "sha256_cbor"]
        if server_socket is not None:
            config = transfer_config(server_socket, **extra)
            command += ["--kv-transfer-config", json.dumps(config)]
        part = start_part(self.folder, next(self._names), command, ONE_PROCESS_ENVIRONMENT)
        part = dataclasses.replace(part, url=f"http://{LOOPBACK}:{port}", health="/health")
        return OnlineEngine(self._ready(part), str(self.model))

    def local_engine(
        self,
        server_socket: Path | None = None,
        connector: dict[str, object] | None = None,
        policy: str = "recompute",
        **options: object,
    ) -> LocalEngine:
        """Return a ready in-process engine; `options` are those of `vllm.LLM`.

        `connector` are the connector's own options, `policy` is what becomes of failed loads.
        """
        chosen: dict[str, object] = {
            "model": str(self.model),
            "dtype": "float32",
            "block_size": BLOCK,
            "enforce_eager": True,
            "max_model_len": MODEL_TOKENS,
            "kv_cache_memory_bytes": KV_BYTES,
            "prefix_caching_hash_algo": "sha256_cbor",
            "disable_log_stats": False,
        }
        if server_socket is not None:
            config = transfer_config(server_socket, **(connector or {}))
            chosen["kv_transfer_config"] = config | {"kv_load_failure_policy": policy}
        engine = LocalEngine(self.folder, next(self._names), chosen | options)
        self._keep(engine.part)
        engine.connect()
        return engine

    def close(self) -> None:
        """End everything, the latest first."""
        self._ends.close()

    def _engine_options(self) -> list[str]:
        limits = ["--max-model-len", str(MODEL_TOKENS), "--kv-cache-memory-bytes", str(KV_BYTES)]
        return [*CPU_ENGINE_OPTIONS, *limits]

    def _ready(self, part: Part) -> Part:
        self._keep(part)
        part.wait()
        return part

    def _keep(self, part: Part) -> None:
        OPEN.append(part)

        def end() -> None:
            part.stop()
            OPEN.remove(part)

        self._ends.callback(end)


class OnlineEngine:
    """vLLM's OpenAI server."""

    def __init__(self, part: Part, model: str) -> None:
        self.part = part
        self.model = model

    def complete(
        self, tokens: Sequence[int], max_tokens: int = 16, **request: object
    ) -> Completion:
        """Return the greedy answer to a prompt of token ids."""
        body = {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        } | request
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self.part.url + "/v1/completions", data, headers)
        try:
            with urllib.request.urlopen(asked, timeout=ANSWER_SECONDS) as answer:
                got = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(error.read().decode()) from error
        usage = got["usage"]
        details = usage["prompt_tokens_details"] or {}
        return Completion(
            got["choices"][0]["token_ids"],
            usage["prompt_tokens"],
            details.get("cached_tokens") or 0,
        )

    def forget(self) -> None:
        """Empty the engine's own cache, and not the host tier."""
        self.part.post("/reset_prefix_cache")

    def cached_by_source(self) -> dict[str, int]:
        """Return how many prompt tokens came from which tier since the start."""
        found: dict[str, int] = {}
        for series, value in self.series():
            if series.startswith(SOURCE_METRIC) and 'source="' in series:
                source = series.split('source="')[1].split('"')[0]
                found[source] = found.get(source, 0) + int(value)
        return found

    def series(self) -> list[tuple[str, float]]:
        """Return all series of `/metrics` as they stand there: name with labels, and value."""
        lines = self.part.get("/metrics").splitlines()
        pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
        return [(series, float(value)) for series, _, value in pairs]

    def sum(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        return sum(value for series, value in self.series() if series.split("{")[0] == name)

    def used_blocks(self) -> float:
        """Return what part of its own cache requests hold."""
        return self.sum("vllm:kv_cache_usage_perc")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it and return its exit code."""
        return self.part.stop(number)


def holds(server: Part, blocks: int, seconds: float = IDLE_SECONDS) -> None:
    """Fail unless the host tier soon has so many blocks: commits go one way."""
    end = time.monotonic() + seconds
    while (found := host_blocks(server)) != blocks:
        assert time.monotonic() < end, f"{found} blocks in the host tier, and not {blocks}"
        time.sleep(POLL_SECONDS)


def host_blocks(server: Part) -> int:
    """Return how many blocks the host tier has."""
    blocks: int = json.loads(server.get("/v1/tiers/host"))["blocks"]
    return blocks


def no_leaks(server: Part, *engines: LocalEngine | OnlineEngine) -> None:
    """Fail unless server and engines soon hold nothing for requests that have ended."""
    end = time.monotonic() + IDLE_SECONDS
    while found := list(_leaks(server, engines)):
        assert time.monotonic() < end, found
        time.sleep(POLL_SECONDS)


def _leaks(server: Part, engines: Sequence[LocalEngine | OnlineEngine]) -> Iterator[str]:
    used = [engine.used_blocks() for engine in engines]
    if any(used):
        yield f"blocks that vLLM has in use: {used}"
    for each in json.loads(server.get("/v1/sessions")):
        if each["leased_blocks"] or each["reserved_slots"] > STOCK:
            yield f"a session with leases or too many slots: {each}"
    slots = json.loads(server.get("/v1/tiers/host"))["host"]["slots"]
    if slots["limbo"] or slots["promoting"]:
        yield f"slots in limbo: {slots}"


@contextlib.contextmanager
def lab(folder: Path, model: Path) -> Iterator[Lab]:
    """Give a `Lab` whose parts end with the block."""
    opened = Lab(folder, model)
    try:
        yield opened
    finally:
        opened.close()
