"""What happens to a system before prompts are asked again, and what goes wrong meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from ..peers import Peer, PeerError
from ..peers.base import ServerHost
from ..stack import Part


@dataclass(frozen=True, slots=True)
class Stage:
    """Something that is done to a system, after which the same prompts are asked."""

    name: str
    """docs/benchmarks.md says of each what was done."""
    prepare: Callable[[Peer], Part]
    """Does it, and returns the engine that is asked then. Raises StackError or PeerError."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong when half of the requests have been answered."""

    name: str
    strike: Callable[[Peer], None]
    """Blocks the load generator for as long as it takes, and no longer."""
    mend: Callable[[Peer], None]
    """Called when all requests have ended, so that the system can be stopped."""


def _as_it_is(peer: Peer) -> Part:
    return peer.engine


def _without_device(peer: Peer) -> Part:
    peer.settle()
    peer.forget_device()
    return peer.engine


def _restarted_engine(peer: Peer) -> Part:
    peer.settle()
    peer.restart_engine()
    return peer.engine


def _restarted_server(peer: Peer) -> Part:
    peer.restart_server()
    peer.forget_device()
    return peer.engine


def _without_host(peer: Peer) -> Part:
    peer.drop_host()
    return peer.engine


def _second_engine(peer: Peer) -> Part:
    peer.settle()
    return peer.second_engine()


def _second_host(peer: Peer) -> Part:
    peer.settle()
    return peer.second_host()


COLD = Stage("cold", _as_it_is)
AGAIN = Stage("L0", _as_it_is)
FORGOTTEN = Stage("L0 emptied", _without_device)
ENGINE_RESTARTED = Stage("engine restarted", _restarted_engine)
SERVER_RESTARTED = Stage("server restarted", _restarted_server)
HOST_EMPTIED = Stage("L1 emptied", _without_host)
SECOND_ENGINE = Stage("second engine", _second_engine)
SECOND_HOST = Stage("second host", _second_host)
STAGES = (
    COLD, AGAIN, FORGOTTEN, ENGINE_RESTARTED, SERVER_RESTARTED, HOST_EMPTIED, SECOND_ENGINE,
    SECOND_HOST,
)  # fmt: skip


def _redis(peer: Peer, number: signal.Signals) -> None:
    if peer.redis is None:
        raise PeerError(f"{peer.name} has no Redis here.")
    peer.redis.child.send(number)


def _server(peer: Peer) -> Part:
    if not isinstance(peer.host, ServerHost):
        raise PeerError(f"{peer.name} has no server of its own.")
    return peer.host.server


def _nothing(_: Peer) -> None:
    pass


REDIS_FAULTS = (
    Fault("Redis killed", lambda peer: _redis(peer, signal.SIGKILL), _nothing),
    Fault(
        "Redis frozen",
        lambda peer: _redis(peer, signal.SIGSTOP),
        lambda peer: _redis(peer, signal.SIGCONT),
    ),
)
OTHER_FAULTS = (
    Fault("server killed", lambda peer: _server(peer).child.send(signal.SIGKILL), _nothing),
    Fault("engine killed", lambda peer: peer.restart_engine(signal.SIGKILL), _nothing),
)
