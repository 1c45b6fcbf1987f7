"""Which systems are asked what: the quick plan (twenty minutes on two cores), and the full one.

Sizes are for SmolLM2-135M in float32 on two cores, which computes some 250 prompt tokens a second:
prompts are long enough for a cache to matter, and short enough for the time.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..peers import Peer, PeerError, Setup, Tiers
from ..peers.base import ServerHost
from ..rig import MODEL_TOKENS
from ..traffic.requests import NO_PARAMETERS, Parameter, Workload
from ..traffic.runner import Closed, Open
from ..traffic.texts import TextWriter
from ..traffic.traces import Window, replay
from ..traffic.workloads import build
from .conduct import Leg, Load
from .stages import (
    AGAIN,
    COLD,
    ENGINE_RESTARTED,
    FORGOTTEN,
    HOST_EMPTIED,
    OTHER_FAULTS,
    REDIS_FAULTS,
    SECOND_ENGINE,
    SECOND_HOST,
    SERVER_RESTARTED,
    Stage,
)

SEED = 1
BASE = "vLLM alone"
"""The system that ratios are to, wherever it was asked."""
NAMES: Mapping[str, str] = {
    "kvtier": "kvtier",
    "vllm": BASE,
    "example": "ExampleConnector",
    "offloading": "OffloadingConnector",
    "lmcache": "LMCache, chunks of 256",
    "lmcache-32": "LMCache, chunks of 32",
}
POLICIES = ("auto", "mq", "lru", "arc", "fifo")
REPLAYED = Window(requests=200, conversations=0.03)
"""Of each trace: some conversations as a whole, so that few requests repeat what they do."""
REPLAY_PACE = Open(rate=2.0)
SMALL_HOST_MIB = 128
"""Of the legs in which not everything fits: 2,900 tokens of SmolLM2 in float32."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups of legs: the groups run one after the other, the legs of one side by side.

    The legs of a group have the same loads, and begin them with the same stages.
    """

    name: str
    groups: Sequence[Sequence[Leg]]

    @property
    def legs(self) -> list[Leg]:
        """All of them."""
        return [leg for group in self.groups for leg in group]

    @property
    def runs(self) -> int:
        """How often a workload is sent in all."""
        return sum(leg.runs for leg in self.legs)


def quick(model: Path) -> Plan:
    """Documents and chats through every tier of kvtier and LMCache, and vLLM alone.

    Each document is asked about once, so that all of a first run is cold.
    """
    make = _Maker(model)
    documents = make.workload(
        "documents", {"documents": 5, "readers": 1, "document": 1200, "question": 60, "output": 8}
    )
    chat = make.workload(
        "chat", {"sessions": 2, "turns": 3, "system": 300, "message": 200, "output": 16}
    )
    hits = (COLD, *[AGAIN] * 3, *[FORGOTTEN] * 3, ENGINE_RESTARTED)
    disk = (*hits, SERVER_RESTARTED, *[HOST_EMPTIED] * 2)
    redis = (COLD, SECOND_HOST, *[HOST_EMPTIED] * 2)
    talks = Load(chat, Closed(2), (COLD, FORGOTTEN))
    alone = [Load(documents, Closed(1), (COLD, *[AGAIN] * 3, FORGOTTEN)), talks]
    below = [Load(documents, Closed(1), disk), talks]
    shared = [Load(documents, Closed(1), redis, "with Redis")]
    peers = ("kvtier", "lmcache")
    groups = [
        [
            make.leg("vllm", Tiers.DEVICE, alone),
            *(make.leg(peer, Tiers.DISK, below) for peer in peers),
        ],
        [make.leg(peer, Tiers.REDIS, shared) for peer in peers],
    ]
    return Plan("quick", groups)


def full(model: Path, traces: Sequence[Path]) -> Plan:
    """All workloads, systems, policies and faults. Takes some hours. Raises TrafficError."""
    make = _Maker(model)
    return Plan("full", [*_systems(make, traces), *_policies(make), *_faults(make)])


def _systems(make: _Maker, traces: Sequence[Path]) -> list[list[Leg]]:
    """Return every system under every workload, with every tier that it has."""
    hits = (COLD, *[AGAIN] * 3, *[FORGOTTEN] * 3, ENGINE_RESTARTED, SECOND_ENGINE)
    names = ("documents", "shared_prompt", "chat", "agents", "unique")
    loads = [Load(make.workload(name), Closed(4), hits) for name in names[:1]]
    loads += [Load(make.workload(name), Closed(4), (COLD, FORGOTTEN)) for name in names[1:]]
    loads += [
        Load(replay(make.writer, trace, MODEL_TOKENS, REPLAYED), REPLAY_PACE, (COLD, FORGOTTEN))
        for trace in traces
    ]
    alone = [_up_to(load, FORGOTTEN) for load in loads]
    documents = make.workload("documents")
    lower = (COLD, SERVER_RESTARTED, *[HOST_EMPTIED] * 3)
    disk = Load(documents, Closed(1), lower, "with a disk")
    redis = Load(documents, Closed(1), (*lower, SECOND_HOST), "with Redis")
    files = Load(documents, Closed(1), (COLD, FORGOTTEN), "with files")
    peers = ("kvtier", "lmcache", "lmcache-32")
    return [
        [
            make.leg("vllm", Tiers.DEVICE, alone),
            *(make.leg(peer, Tiers.HOST, loads) for peer in peers),
        ],
        [make.leg(peer, Tiers.DISK, [disk]) for peer in peers],
        [make.leg(peer, Tiers.REDIS, [redis]) for peer in peers],
        [make.leg(peer, Tiers.DISK, [files]) for peer in ("kvtier", "example")],
    ]


def _policies(make: _Maker) -> list[list[Leg]]:
    """Return kvtier under churn, policy by policy: larger than L1, and than L1 and disk."""
    churn = make.workload("churn", {"cache_bytes": SMALL_HOST_MIB * MIB})
    larger = make.workload("churn", {"cache_bytes": 3 * SMALL_HOST_MIB * MIB, "rounds": 2})
    found = []
    for policy in POLICIES:
        settings = {"host.policy": policy}
        name = f"kvtier, {policy}"
        chosen = partial(_set, settings)
        loads = [Load(churn, Closed(1), (COLD,), "of L1")]
        found.append([make.small_leg(name, Tiers.HOST, loads, chosen)])
    chosen = partial(_set, {"disk.capacity": f"{2 * SMALL_HOST_MIB}MiB"})
    loads = [
        Load(churn, Closed(1), (COLD,), "of L1"),
        Load(larger, Closed(1), (COLD,), "of L1 and disk"),
    ]
    found.append([make.small_leg("kvtier, with a disk", Tiers.DISK, loads, chosen)])
    return found


def _faults(make: _Maker) -> list[list[Leg]]:
    """Return kvtier and LMCache with something that goes wrong half-way."""
    documents = make.workload("documents", {"documents": 2})
    found = []
    for fault in (*REDIS_FAULTS, *OTHER_FAULTS):
        tiers = Tiers.REDIS if fault in REDIS_FAULTS else Tiers.DISK
        stages = (COLD, HOST_EMPTIED)
        about = f"by two users, {fault.name}"
        loads = [Load(documents, Closed(2), stages, about, fault)]
        found.append([make.leg(peer, tiers, loads) for peer in ("kvtier", "lmcache")])
    return found


class _Maker:
    """Makes workloads and legs for one model."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.writer = TextWriter(SEED, model)

    def workload(self, name: str, sizes: Mapping[str, Parameter] = NO_PARAMETERS) -> Workload:
        """Return a workload for the model."""
        return build(name, self.writer, MODEL_TOKENS, sizes)

    def leg(self, peer: str, tiers: Tiers, loads: Sequence[Load]) -> Leg:
        """Return a leg of a system with as much memory as it needs."""
        return Leg(NAMES[peer], peer, Setup(self.model, tiers), loads)

    def small_leg(
        self, system: str, tiers: Tiers, loads: Sequence[Load], prepare: Callable[[Peer], None]
    ) -> Leg:
        """Return a leg of kvtier with little memory, and something that is set in it."""
        small = Setup(self.model, tiers, host_mib=SMALL_HOST_MIB, engine_mib=SMALL_HOST_MIB)
        return Leg(system, "kvtier", small, loads, prepare)


def _set(settings: Mapping[str, str], peer: Peer) -> None:
    """Change settings of a running kvtier server, as an operator does. Raises PeerError."""
    assert isinstance(peer.host, ServerHost)
    pairs = [f"{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "kvtier", "tiers", "set", *pairs]
    command += ["--url", peer.host.server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"The settings {', '.join(pairs)} were refused: {done.stderr.strip()}")


def _up_to(load: Load, last: Stage) -> Load:
    """Return a load without the stages that come after the first `last`."""
    return replace(load, stages=load.stages[: load.stages.index(last) + 1])
