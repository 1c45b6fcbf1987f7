"""A kvtier server and vLLM engines on this machine, for the demo and the end-to-end tests.

Each is a real process on a free loopback port, with its output in a file of its own. What is
started here ends with `stop`, at the latest with this process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.children import Child
from kvtier.endpoints import free_port

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.1
SERVER_SECONDS = 60.0
ENGINE_SECONDS = 300.0
STOP_SECONDS = 40.0
TAIL_LINES = 40
CPU_ENGINE_OPTIONS = ("--dtype", "float32", "--block-size", "32", "--enforce-eager")
"""float32, because bf16 is emulated on CPUs without AVX-512; CPU attention takes blocks of 32."""
ONE_PROCESS_OPTIONS = ("--distributed-executor-backend", "uni")
ONE_PROCESS_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""With both, vLLM's worker runs inside its engine core, as it does on one GPU by default.

On CPUs it is a process of its own by default. Then each of the two spins for a second after the
last message of the other, and on two cores they take them from the model, from a server, and from
whoever measures. Without the variable vLLM goes back to two processes, whatever the option says.
"""


NO_ENVIRONMENT: Mapping[str, str] = {}
REDIS_MEMORY = "2gb"


class StackError(Exception):
    """A process did not start or answer. The message is a sentence and the end of its log."""


@dataclass(slots=True)
class Part:
    """One running process that answers HTTP at `url`."""

    child: Child
    url: str
    log: Path
    health: str
    """Path that answers 200 as soon as it is ready."""
    limit: float
    """Longest wait for that, in seconds."""
    socket: Path | None = None
    """Where engines connect, if it is a kvtier server."""
    stopped: bool = field(default=False, init=False)

    def wait(self, tick: Callable[[], None] = lambda: None) -> None:
        """Block until it is ready; call `tick` now and then. Raises StackError."""
        end = time.monotonic() + self.limit
        while not self.answers():
            code = self.child.exit_code()
            if code is not None:
                raise StackError(f"{self.child.name} ended with exit code {code}.\n{self.tail()}")
            if time.monotonic() > end:
                raise StackError(
                    f"{self.child.name} was not ready in {self.limit:.0f} s.\n{self.tail()}"
                )
            tick()
            time.sleep(POLL_SECONDS)

    def answers(self) -> bool:
        """Return whether it is ready."""
        try:
            with urllib.request.urlopen(self.url + self.health, timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def get(self, path: str) -> str:
        """Return the body of a GET. Raises StackError."""
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: object = None) -> str:
        """Return the body of a POST of a JSON document, or of nothing. Raises StackError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self.url + path, data, headers, method="POST"))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait, kill what is left after STOP_SECONDS; return the exit code."""
        if self.stopped:
            return 0
        if self.child.exit_code() is None:
            self.child.send(number)
        end = time.monotonic() + STOP_SECONDS
        while self.child.exit_code() is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        self.stopped = True
        return self.child.reap()

    def tail(self) -> str:
        """Return the last lines that it wrote."""
        lines = self.log.read_text("utf-8", "replace").splitlines()
        return "\n".join([f"--- end of {self.log.name}", *lines[-TAIL_LINES:]])

    def _ask(self, request: urllib.request.Request) -> str:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return str(answer.read().decode())
        except OSError as error:
            raise StackError(f"{self.child.name}, {request.full_url}: {error}.") from error


@dataclass(frozen=True, slots=True)
class Redis:
    """A running redis-server."""

    child: Child
    url: str

    def stop(self) -> None:
        """End it: it keeps nothing."""
        if self.child.exit_code() is None:
            self.child.send(signal.SIGTERM)
        self.child.reap()


def start_server(folder: Path, *options: str, name: str = "server") -> Part:
    """Start `kvtier serve` with its socket, state and log in `folder`. Returns at once."""
    port = free_port(LOOPBACK)
    socket = folder / f"{name}.sock"
    command = ["-m", "kvtier", "serve", "--socket", str(socket)]
    command += ["--port", str(port), *options]
    own = {"KVTIER_STATE": str(folder / f"{name}-state")}
    child, log = _start("the kvtier server", command, folder / f"{name}.log", own)
    return Part(child, f"http://{LOOPBACK}:{port}", log, "/readyz", SERVER_SECONDS, socket)


def start_up(
    folder: Path,
    up: Sequence[str],
    engine: Sequence[str],
    name: str,
    environment: Mapping[str, str] = NO_ENVIRONMENT,
) -> Part:
    """Start `kvtier up [up] -- [engine]` with its log in `folder`; the part is its vLLM.

    Where it starts a server, that one's blocks on disk are in `folder` too.
    """
    port = free_port(LOOPBACK)
    command = ["-m", "kvtier", "up", "--disk", str(folder / f"{name}-blocks"), *up, "--", *engine]
    command += ["--host", LOOPBACK, "--port", str(port)]
    own = {"KVTIER_STATE": str(folder / f"{name}-state"), **environment}
    child, log = _start(f"kvtier up ({name})", command, folder / f"{name}.log", own)
    return Part(child, f"http://{LOOPBACK}:{port}", log, "/health", ENGINE_SECONDS)


def start_vllm(
    folder: Path,
    engine: Sequence[str],
    name: str,
    environment: Mapping[str, str],
    python: str = sys.executable,
    port: int | None = None,
) -> Part:
    """Start vLLM's OpenAI server by itself, with its log in `folder`. Returns at once.

    `python` is the interpreter of the environment that it is to run in; without a port a free one
    is taken.
    """
    port = port or free_port(LOOPBACK)
    command = ["-m", "vllm.entrypoints.openai.api_server", "--host", LOOPBACK]
    command += ["--port", str(port), "--enable-prompt-tokens-details", *engine]
    log = folder / f"{name}.log"
    child, log = _start(f"vLLM ({name})", command, log, environment, python)
    return Part(child, f"http://{LOOPBACK}:{port}", log, "/health", ENGINE_SECONDS)


def start_redis(folder: Path) -> Redis:
    """Start a redis-server that keeps nothing on disk, and wait for it. Raises StackError."""
    port = free_port(LOOPBACK)
    log = folder / "redis.log"
    command = ["redis-server", "--bind", LOOPBACK, "--port", str(port), "--dir", str(folder)]
    command += ["--save", "", "--appendonly", "no", "--maxmemory", REDIS_MEMORY]
    command += ["--maxmemory-policy", "allkeys-lru"]
    if shutil.which(command[0]) is None:
        raise StackError("redis-server is not installed: run `make system`, or install it")
    with log.open("ab") as output:
        child = Child("redis-server", command, dict(os.environ), output.fileno())
    redis = Redis(child, f"redis://{LOOPBACK}:{port}")
    end = time.monotonic() + SERVER_SECONDS
    while not _listens(port):
        if child.exit_code() is not None or time.monotonic() > end:
            raise StackError(f"redis-server did not start: {log.read_text()[-500:]}")
        time.sleep(POLL_SECONDS)
    return redis


def _listens(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True


def start_part(
    folder: Path,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    python: str = sys.executable,
) -> Part:
    """Start `python` with the arguments `command`: a part that answers no HTTP. Returns at once."""
    child, log = _start(name, command, folder / f"{name}.log", environment, python)
    return Part(child, "", log, "", ENGINE_SECONDS)


def _start(
    name: str,
    command: Sequence[str],
    log: Path,
    extra: Mapping[str, str],
    python: str = sys.executable,
) -> tuple[Child, Path]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVTIER")}
    # Models are folders here, so nothing has to be asked of a hub, and nobody be told of a run.
    environment |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_SERVER_DEV_MODE": "1"}
    environment |= extra
    with log.open("ab") as output:
        return Child(name, [python, *command], environment, output.fileno()), log
