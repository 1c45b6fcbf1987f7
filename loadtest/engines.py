"""What simulated engines have in common: a session with the server, and chats that they serve.

They speak through `kvtier.client` like real ones, but compute nothing.
"""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import NamedTuple

from kvtier import protocol as wire
from kvtier.client import Client, ClientOptions
from kvtier.core import PAGE_BYTES, Manifest, Role

from .rig import RigError

CONNECT_SECONDS = 30.0
DEADLINE_SECONDS = 5.0

MANIFEST = Manifest(
    model="loadtest",
    weights="none",
    quantization="None",
    dtype="float32",
    kv_dtype="auto",
    block_tokens=16,
    layers=1,
    layout="flat",
    shard_bytes=PAGE_BYTES,
    shards=1,
    hash_algorithm="sha256_cbor",
    hash_seed="0",
)


def connect(
    socket: Path | None, engine: str, manifest: Manifest = MANIFEST, role: Role = Role.SCHEDULER
) -> Client:
    """Return a client with a session, as soon as the server gives one. Raises RigError."""
    assert socket is not None, "a server has a socket"
    hello = wire.Hello(wire.PROTOCOL_VERSION, role, engine, 0, manifest)
    options = ClientOptions(socket, deadline=DEADLINE_SECONDS)
    client = Client(options, hello, logging.getLogger("loadtest"))
    client.start()
    end = time.monotonic() + CONNECT_SECONDS
    while client.meet() is None:
        if time.monotonic() > end:
            client.close()
            raise RigError(f"the engine {engine} was not connected.")
        time.sleep(0.01)
    return client


def unanswered(client: Client, what: str) -> RigError:
    """Return the error that something was not answered."""
    return RigError(f"{what} was not answered: {dict(client.failures)}.")


class Served(NamedTuple):
    """Blocks of one prompt that were there, and those that were stored."""

    hits: int
    stored: int


def serve_prompt(client: Client, keys: list[bytes]) -> Served:
    """Ask for a prompt's blocks, and store those that are missing. Raises RigError."""
    found = client.lookup(b"".join(keys), 0)
    if found is None:
        raise unanswered(client, "a lookup")
    hits = len(found.slots)
    above = [b"".join(keys[:hits])] if hits else []
    granted = client.step(wire.Step(0, need=len(keys) - hits, above=above))
    if granted is None:
        raise unanswered(client, "a step")
    new = keys[hits : hits + len(granted.slots)]
    chain = wire.Chain(keys[hits - 1] if hits else b"", b"".join(new), granted.slots)
    client.send_step(wire.Step(0, commits=[chain], releases=[found.seq]))
    return Served(hits, len(new))


class Chats:
    """Chats that grow by `turn_blocks` a turn, and begin anew after `turns`; hot ones more often.

    The larger `skew` is, the more of the prompts are of few chats.
    """

    def __init__(self, seed: int, chats: int, turns: int, turn_blocks: int, skew: float) -> None:
        self._random = random.Random(seed)
        self._chats: list[list[bytes]] = [[] for _ in range(chats)]
        self._most = turns * turn_blocks
        self._turn_blocks = turn_blocks
        self._rate = skew / chats

    def prompt(self) -> list[bytes]:
        """Return the keys of the next prompt."""
        number = min(int(self._random.expovariate(self._rate)), len(self._chats) - 1)
        keys = self._chats[number]
        if len(keys) >= self._most:
            keys.clear()
        keys += [self._random.randbytes(32) for _ in range(self._turn_blocks)]
        return list(keys)
