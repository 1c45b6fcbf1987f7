"""What a system under test is made of: tiers, what all systems share, and one machine's cache.

A `Host` is what keeps blocks beside the engines of one machine: a cache server with its memory and
directory, a directory alone, or nothing. `Peer` (`peer.py`) puts engines beside hosts and drives
every system in the same way.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import ClassVar

from ..rig import MODEL_TOKENS, RigError, counter
from ..stack import Part, Redis

FOUND_SECONDS = 60.0
FOUND_POLL_SECONDS = 0.2


class PeerError(Exception):
    """A system can't do what it was asked for. The message is one sentence."""


class Tiers(Enum):
    """What a system keeps blocks in. vLLM's own cache (L0) is always there."""

    DEVICE = "device"
    """Nothing below it."""
    HOST = "host"
    DISK = "disk"
    """Host memory and a directory."""
    REDIS = "redis"
    """Host memory and a Redis, which all hosts of the peer share."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all systems of a comparison have in common."""

    model: Path
    tiers: Tiers
    host_mib: int = 2048
    """Memory of the host tier of each host."""
    engine_mib: int = 450
    """Memory of each engine's own cache: 10,000 tokens of SmolLM2 in float32."""
    model_tokens: int = MODEL_TOKENS
    engine_options: tuple[str, ...] = ()
    """More options of each vLLM."""
    kvtier_settings: str = ""
    """More of kvtier's settings, as YAML, beyond those that make it comparable."""
    kvtier_connector: Mapping[str, object] = field(default_factory=dict)
    """More options of kvtier's connector."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a host's files go, and what it shares with the other hosts of its peer."""

    setup: Setup
    folder: Path
    """Of this host alone."""
    redis: Redis | None

    @property
    def blocks(self) -> Path:
        """Folder of the blocks on disk."""
        return self.folder / "blocks"


class Host:
    """One machine's cache: here nothing at all, and what each system has of its own in its class.

    `start` comes first; `stop` may be called at any time, and twice.
    """

    offers: ClassVar[frozenset[Tiers]]
    """What the system can be set up with."""
    python: str = sys.executable
    """Interpreter of the environment that its engines run in."""
    environment: Mapping[str, str] = {}
    """Of its engines."""
    away_seconds: ClassVar[float] = 0.0
    """How long its server stays away in a restart, so that engines notice it."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def start(self) -> None:
        """Start it and wait until it is ready. Raises StackError."""

    def stop(self) -> None:
        """End it. Its directory stays."""

    def restart(self) -> None:
        """End it and start it again; engines find it again, and its directory is as it was."""
        self.stop()
        time.sleep(self.away_seconds)
        self.start()

    def settings(self) -> Mapping[str, object]:
        """Return everything that was set for it, to be kept beside a result."""
        return {}

    def engine_options(self) -> list[str]:
        """Return what vLLM needs beyond the options that all systems share."""
        return []

    def counts_at(self) -> Sequence[str]:
        """Return URLs whose metrics tell the tiers apart, beside the engine's."""
        return ()

    def empty_memory(self) -> None:
        """Empty the host tier, and nothing else."""

    def waiting(self) -> float:
        """Return how much is on its way into a tier: a number that is 0 when nothing is."""
        return 0.0

    def stored(self) -> float:
        """Return a number that grows as long as something is stored anywhere."""
        return 0.0

    def served(self) -> Mapping[Tiers, float]:
        """Return the tokens that each tier served since the start."""
        return {}


class ServerHost(Host):
    """A host with a server, which `start` has to put into `_server`."""

    _server: Part | None = None

    def stop(self) -> None:
        """End the server, if there is one."""
        if self._server is not None:
            self._server.stop()

    def restart(self) -> None:
        """End the server and start it again, and wait for its engines. Raises PeerError."""
        engines = self.engines()
        super().restart()
        end = time.monotonic() + FOUND_SECONDS
        while self.engines() < engines:
            if time.monotonic() > end:
                raise PeerError(f"engines did not find a server again in {FOUND_SECONDS:.0f} s.")
            time.sleep(FOUND_POLL_SECONDS)

    def engines(self) -> int:
        """Return how many halves of engines are connected to the server."""
        raise NotImplementedError

    @property
    def server(self) -> Part:
        """The server. `start` was called before."""
        assert self._server is not None
        return self._server


def tokens(part: Part, name: str, **labels: str) -> float:
    """Return a counter; one that does not exist before its first event is 0."""
    try:
        return counter(part, name, **labels)
    except RigError:
        return 0.0


def leave_page_cache(folder: Path) -> None:
    """Write the files of a folder to the disk, and take them out of the kernel's memory.

    What is read next comes from the disk, also for a system that reads through the page cache.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
