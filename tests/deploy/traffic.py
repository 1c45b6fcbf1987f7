"""An engine of no model: it stores chains of blocks and asks for old ones, round by round."""

from __future__ import annotations

import contextlib
import logging
import time

from kvtier import protocol as wire
from kvtier.client import Client, ClientOptions
from kvtier.core import Role
from support import MANIFEST, chain

CHAIN_BLOCKS = 32
CAPACITY = "1MiB"
"""Of the host tier: eight chains."""
LIMITED, QUOTA = "limited", "32KiB"
"""A tenant that may have eight blocks, and stores more each round."""
LIMITED_BLOCKS = 16
AGE = 12
"""Rounds after which a chain has left the host tier."""
ANSWER_SECONDS = 10.0


class Traffic:
    """Rounds of stores and lookups by one session; how many blocks it asked for, and got."""

    def __init__(self, client):
        self.asked = self.hit = 0
        self._client = client
        self._round = 0

    def go_on(self):
        """Store a chain; ask for it, and for one that only lower tiers have by now."""
        self._store(self._keys(self._round))
        self._store(b"".join(chain(f"limited {self._round}", LIMITED_BLOCKS)), LIMITED)
        host = self._found(self._keys(self._round))
        lower = self._found(self._keys(self._round - AGE)) if self._round >= AGE else None
        self._round += 1
        asked = [wire.Asked("", CHAIN_BLOCKS, 0, len(host.slots))]
        if lower is not None:
            below = lower.disk + lower.redis
            came = (len(lower.slots) - below, lower.disk, lower.redis)
            asked.append(wire.Asked("", CHAIN_BLOCKS, 0, *came))
        self.asked += sum(each.asked for each in asked)
        self.hit += sum(each.host + each.disk + each.redis for each in asked)
        self._client.send(wire.Step(0, asked=asked))

    def _keys(self, number):
        return b"".join(chain(f"chain {number}", CHAIN_BLOCKS))

    def _store(self, keys, tenant=""):
        granted = self._client.step(wire.Step(0, need=len(keys) // 32))
        assert granted is not None
        fits = keys[: len(granted.slots) * 32]
        self._client.send(wire.Step(0, commits=[wire.Chain(b"", fits, granted.slots, tenant)]))

    def _found(self, keys):
        """Return the last answer to a lookup; its lease has ended."""
        found = self._client.lookup(keys, 0)
        assert found is not None
        if found.within:
            end = time.monotonic() + ANSWER_SECONDS
            while (answer := self._client.answer(found.seq, 0.1)) is None:
                assert time.monotonic() < end, "no second answer"
            found = answer
        self._client.send(wire.Step(0, releases=[found.seq]))
        return found


@contextlib.contextmanager
def connected(socket):
    """Give the traffic of one engine."""
    hello = wire.Hello(wire.PROTOCOL_VERSION, Role.SCHEDULER, "traffic", 0, MANIFEST)
    options = ClientOptions(socket, deadline=ANSWER_SECONDS)
    client = Client(options, hello, logging.getLogger("traffic"))
    client.start()
    assert client.meet() is not None
    try:
        yield Traffic(client)
    finally:
        client.close()
