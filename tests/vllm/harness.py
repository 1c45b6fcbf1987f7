"""Real servers and engines for end-to-end tests.

An `OnlineEngine` is vLLM's OpenAI server. A `LocalEngine` is `vllm.LLM` with scheduler and worker
in one process: it starts about twice as fast, and a test may run code inside it. Both take prompts
as token ids and answer greedily, so that answers can be compared token for token.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import signal
import socket as sockets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest import tiny
from loadtest.stack import (
    CPU_ENGINE_OPTIONS,
    Part,
    StackError,
    start_part,
    start_server,
    start_up,
    start_vllm,
)

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 32
"""Tokens of a block."""
MODEL_TOKENS = 2048
KV_BYTES = 256 * 2**20
"""Bytes of an engine's own cache: about 130,000 tokens of the tiny model."""
SERVER_OPTIONS = ("--capacity", "256MiB")
ANSWER_SECONDS = 120.0
SOURCE_METRIC = "vllm:prompt_tokens_cached_by_source_total"
LOCAL_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
OPEN: list[Part] = []
"""What runs now. A failing test shows the end of their logs."""


@dataclass(frozen=True)
class Completion:
    """One greedy answer. `cached` is how many prompt tokens were not computed."""

    tokens: list[int]
    prompt_tokens: int
    cached: int


def make_tiny_model() -> Path:
    """Return the folder of the tiny model, made once for each version of its source."""
    version = hashlib.sha256(Path(tiny.__file__).read_bytes()).hexdigest()[:8]
    folder = ROOT / ".cache" / "models" / f"tiny-llama-{version}"
    # In a process of its own, because importing torch warns, and warnings fail tests here.
    command = [sys.executable, "-m", "loadtest.tiny", str(folder)]
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
        "kv_connector_extra_config": {"socket": str(server_socket), **extra},
    }


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
        arguments = ["--model", str(self.model), *self._engine_options(), *options]
        arguments += ["--prefix-caching-hash-algo", "sha256_cbor"]
        if server_socket is not None:
            arguments += [
                "--kv-transfer-config",
                json.dumps(transfer_config(server_socket, **extra)),
            ]
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        part = start_vllm(self.folder, arguments, next(self._names), environment)
        return OnlineEngine(self._ready(part), str(self.model))

    def local_engine(
        self,
        server_socket: Path | None = None,
        connector: dict[str, object] | None = None,
        **options: object,
    ) -> LocalEngine:
        """Return a ready in-process engine; `options` are those of `vllm.LLM`.

        `connector` are the connector's own options.
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
            chosen["kv_transfer_config"] = transfer_config(server_socket, **(connector or {}))
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
        self._model = model

    def complete(
        self, tokens: Sequence[int], max_tokens: int = 16, **request: object
    ) -> Completion:
        """Return the greedy answer to a prompt of token ids."""
        body = {
            "model": self._model,
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
        for line in self.part.get("/metrics").splitlines():
            if line.startswith(SOURCE_METRIC) and 'source="' in line:
                source = line.split('source="')[1].split('"')[0]
                found[source] = found.get(source, 0) + int(float(line.rsplit(" ", 1)[1]))
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it and return its exit code."""
        return self.part.stop(number)


class LocalEngine:
    """`vllm.LLM` in a process of its own that does everything itself."""

    def __init__(self, folder: Path, name: str, options: dict[str, object]) -> None:
        path = folder / f"{name}.ctl"
        self._listener = sockets.socket(sockets.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.settimeout(0.2)
        script = Path(__file__).with_name("local_engine.py")
        command = [str(script), str(path), json.dumps(options)]
        self.part = start_part(folder, name, command, LOCAL_ENVIRONMENT)

    def connect(self) -> None:
        """Wait until the engine is ready."""
        end = time.monotonic() + self.part.limit
        with contextlib.closing(self._listener):
            while True:
                with contextlib.suppress(TimeoutError):
                    connection, _ = self._listener.accept()
                    break
                code = self.part.child.exit_code()
                if code is not None or time.monotonic() > end:
                    raise StackError(f"the local engine did not start.\n{self.part.tail()}")
        with connection:
            connection.settimeout(ANSWER_SECONDS)
            self._file = connection.makefile("rw")

    def complete(self, tokens: Sequence[int], max_tokens: int = 16) -> Completion:
        """Return the greedy answer to a prompt of token ids."""
        return self.complete_all([tokens], max_tokens)[0]

    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 16
    ) -> list[Completion]:
        """Return the greedy answers to prompts that run at the same time."""
        found = self._ask({"op": "complete", "prompts": prompts, "max_tokens": max_tokens})
        return [Completion(*each) for each in found]

    def forget(self) -> None:
        """Empty the engine's own cache, and not the host tier."""
        assert self._ask({"op": "forget"}), "a request still holds blocks"

    def cached_by_source(self) -> dict[str, int]:
        """Return how many prompt tokens came from which tier since the start."""
        return self._ask({"op": "cached_by_source"})

    def run(self, code: str) -> object:
        """Run Python in the engine, with `llm` (and what earlier code named); return `result`."""
        return self._ask({"op": "run", "code": code})

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it and return its exit code."""
        return self.part.stop(number)

    def _ask(self, request: dict[str, object]):
        self._file.write(json.dumps(request) + "\n")
        self._file.flush()
        line = self._file.readline()
        assert line, f"the local engine ended.\n{self.part.tail()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]


@contextlib.contextmanager
def lab(folder: Path, model: Path) -> Iterator[Lab]:
    """Give a `Lab` whose parts end with the block."""
    opened = Lab(folder, model)
    try:
        yield opened
    finally:
        opened.close()
