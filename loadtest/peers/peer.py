"""A system under test, started, driven and stopped like any other."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from ..rig import Engine, counter
from ..stack import (
    CPU_ENGINE_OPTIONS,
    ONE_PROCESS_ENVIRONMENT,
    ONE_PROCESS_OPTIONS,
    Part,
    Redis,
    start_redis,
    start_vllm,
)
from .base import Host, PeerError, Place, Setup, Tiers, leave_page_cache

MODEL_NAME = "model"
"""By which every engine serves it."""
WARM_TOKENS = 560
"""Of a prompt that every engine is asked twice at first: two of LMCache's chunks, and a rest."""
WARM_ALPHABET = range(100, 250)
"""Token ids that are plain text in both models."""
QUIET_SECONDS = 0.5
SETTLE_SECONDS = 60.0
POLL_SECONDS = 0.05
EXTERNAL_METRIC = "vllm:external_prefix_cache_hits_total"

MakeHost = Callable[[Place], Host]


class Peer:
    """Engines beside one system's hosts. `stop` ends all of it, the latest first."""

    def __init__(self, name: str, make_host: MakeHost, setup: Setup, folder: Path) -> None:
        self.name = name
        self.setup = setup
        self._make_host = make_host
        self._folder = folder
        self._redis: Redis | None = None
        self._hosts: list[Host] = []
        self._engines: list[Part] = []

    @property
    def engine(self) -> Part:
        """The first engine."""
        return self._engines[0]

    @property
    def url(self) -> str:
        """Where the first engine answers, after a restart too."""
        return self.engine.url

    @property
    def redis(self) -> Redis | None:
        """What its hosts share, if they do."""
        return self._redis

    @property
    def host(self) -> Host:
        """What the first engine stores to."""
        return self._hosts[0]

    def settings(self) -> dict[str, object]:
        """Return everything that was set, to be kept beside a result."""
        shared = asdict(self.setup) | {
            "model": self.setup.model.name,
            "tiers": self.setup.tiers.value,
        }
        options = [*engine_options(self.setup), *self.host.engine_options()]
        found = {
            "name": self.name,
            "shared": shared,
            "engine_options": options,
            "engine_environment": {**ONE_PROCESS_ENVIRONMENT, **self.host.environment},
            "host": dict(self.host.settings()),
        }
        text = json.dumps(found, default=str)
        for folder, name in ((self._folder, "DIR"), (self.setup.model.parent, "MODELS")):
            text = text.replace(str(folder), name)
        told: dict[str, object] = json.loads(text)
        return told

    def start(self) -> None:
        """Start the backend and the first engine, past its first requests."""
        if self.setup.tiers is Tiers.REDIS:
            self._redis = start_redis(self._folder)
        self._start_engine(self._start_host(), 0)

    def settle(self) -> None:
        """Wait until what was computed is in every tier it goes to. Raises PeerError."""
        end = time.monotonic() + SETTLE_SECONDS
        quiet_since, seen = time.monotonic(), self._movement()
        while time.monotonic() - quiet_since < QUIET_SECONDS:
            time.sleep(POLL_SECONDS)
            now = self._movement()
            if now != seen or any(host.waiting() for host in self._hosts):
                quiet_since, seen = time.monotonic(), now
            if time.monotonic() > end:
                raise PeerError(f"{self.name} still stores after {SETTLE_SECONDS:.0f} s.")

    def forget_device(self) -> None:
        """Empty all engines' own caches (L0), and nothing else."""
        for engine in self._engines:
            engine.post("/reset_prefix_cache")

    def drop_host(self) -> None:
        """Empty L0 and L1 of all hosts: the next hit comes from the lower tier.

        Each system drops its host tier by what it offers an operator for that. What lies on disk
        leaves the kernel's memory too, so that it is read from the disk.
        """
        self.settle()
        self.forget_device()
        for host in self._hosts:
            host.empty_memory()
            leave_page_cache(host.place.blocks)

    def restart_engine(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the first engine's process by a signal, and start another one at its address."""
        port = urlsplit(self.url).port
        self.engine.stop(number)
        self._start_engine(self.host, 0, port)

    def restart_server(self) -> None:
        """End the first host's server, if it has one, and start another one in its place."""
        self.settle()
        self.host.restart()

    def second_engine(self) -> Part:
        """Start another engine beside the first one, on the same host."""
        return self._start_engine(self.host, len(self._engines))

    def second_host(self) -> Part:
        """Start an engine on another host, which has its own memory and directory."""
        return self._start_engine(self._start_host(), len(self._engines))

    def cached_external(self) -> float:
        """Return the prompt tokens that engines got from outside L0, by vLLM's own count."""
        return sum(counter(each, EXTERNAL_METRIC) for each in self._engines)

    def counts_at(self) -> Sequence[str]:
        """Return URLs whose metrics tell the tiers apart, beside the engines'."""
        return [url for host in self._hosts for url in host.counts_at()]

    def served(self) -> Mapping[Tiers, float]:
        """Return the tokens that each tier served, by the system's own count."""
        return {
            tier: sum(host.served().get(tier, 0.0) for host in self._hosts)
            for tier in (Tiers.HOST, Tiers.DISK, Tiers.REDIS)
        }

    def stop(self) -> None:
        """End all of it, the latest first."""
        with contextlib.ExitStack() as ends:
            if self._redis is not None:
                ends.callback(self._redis.stop)
            for host in self._hosts:
                ends.callback(host.stop)
            for engine in self._engines:
                ends.callback(engine.stop)
        self._redis = None

    def _movement(self) -> tuple[float, ...]:
        return tuple(host.stored() for host in self._hosts)

    def _start_host(self) -> Host:
        folder = self._folder / f"host{len(self._hosts)}"
        folder.mkdir()
        host = self._make_host(Place(self.setup, folder, self._redis))
        if self.setup.tiers not in host.offers:
            has = ", ".join(sorted(each.value for each in host.offers))
            raise PeerError(f"{self.name} has no {self.setup.tiers.value} tier, but: {has}.")
        self._hosts.append(host)
        host.start()
        return host

    def _start_engine(self, host: Host, number: int, port: int | None = None) -> Part:
        model = ["--model", str(self.setup.model)]
        options = [*model, *engine_options(self.setup), *host.engine_options()]
        environment = {**ONE_PROCESS_ENVIRONMENT, **host.environment}
        name = f"engine{number}"
        part = start_vllm(self._folder, options, name, environment, host.python, port)
        self._engines[number : number + 1] = [part]
        part.wait()
        _warm(part)
        return part


@contextlib.contextmanager
def running(name: str, make_host: MakeHost, setup: Setup) -> Iterator[Peer]:
    """Give a peer that is ready, in a temporary folder; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix=f"peer-{name}-") as folder:
        peer = Peer(name, make_host, setup, Path(folder))
        try:
            peer.start()
            yield peer
        finally:
            peer.stop()


def engine_options(setup: Setup) -> list[str]:
    """Return the options that the engines of all systems share, without the model."""
    return [
        "--served-model-name", MODEL_NAME,
        *CPU_ENGINE_OPTIONS,
        *ONE_PROCESS_OPTIONS,
        "--max-model-len", str(setup.model_tokens),
        "--kv-cache-memory-bytes", str(setup.engine_mib << 20),
        "--prefix-caching-hash-algo", "sha256_cbor",
        *setup.engine_options,
    ]  # fmt: skip


def _warm(part: Part) -> None:
    """Ask the same prompt twice, the second time from below L0 where there is such a tier."""
    generator = random.Random(WARM_TOKENS)
    tokens = [generator.choice(WARM_ALPHABET) for _ in range(WARM_TOKENS)]
    with contextlib.closing(Engine(part, part.child.name)) as engine:
        for _ in range(2):
            engine.ask(tokens)
            engine.forget()
