"""A server with an engine's client, and what prompts its blocks are of."""

import json
import logging
import random
import urllib.error
import urllib.request

from kvtier import protocol as wire
from kvtier.client import Client, ClientOptions
from kvtier.core import PAGE_BYTES, Role
from kvtier.hashing import DEFAULT_SEED, block_keys, seed_digest
from support import manifest, until

BLOCK = 16
SPACE = manifest(hash_seed=seed_digest(DEFAULT_SEED))
CAPACITY = 256 * PAGE_BYTES


def tokens(seed, blocks):
    """Return a prompt of so many whole blocks and a few tokens more."""
    generator = random.Random(seed)
    return [generator.randrange(50_000) for _ in range(blocks * BLOCK + 5)]


def keys_of(prompt, salt=None, seed=DEFAULT_SEED):
    return list(block_keys("sha256_cbor", seed, prompt, BLOCK, salt))


class Site:
    """A server, a client that stores blocks in it, and its HTTP side."""

    def __init__(self, served, space=SPACE):
        self.served = served.ready()
        self.space = space
        hello = wire.Hello(wire.PROTOCOL_VERSION, Role.SCHEDULER, "engine", 0, space)
        self.client = Client(
            ClientOptions(served.socket, deadline=10.0), hello, logging.getLogger("test.client")
        )
        self.client.start()
        until(lambda: self.client.meet() is not None, "the session")

    def store(self, keys, parent=b""):
        slots = self.client.step(wire.Step(0, need=len(keys))).slots[: len(keys)]
        stored = keys[: len(slots)]
        self.client.send(wire.Step(0, commits=[wire.Chain(parent, b"".join(stored), slots)]))
        return len(stored)

    def find(self, keys, start=0):
        """Look keys up as an engine does; returns how many were there, and ends the lease."""
        found = self.client.lookup(b"".join(keys), start)
        lease, late = found.seq, []
        if found.within:
            until(lambda: late or late.extend(self.answers(lease)), "the answer")
        self.client.send(wire.Step(0, releases=[lease]))
        return len((late or [found])[0].slots)

    def answers(self, lease):
        found = self.client.answer(lease, 0.1)
        return [] if found is None else [found]

    def call(self, method, path, body=None):
        """Return status and decoded body of a request."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            self.served.url + path,
            data,
            {"Content-Type": "application/json", "If-Match": "*"},
            method=method,
        )
        try:
            with urllib.request.urlopen(asked, timeout=20) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def good(self, method, path, body=None):
        status, found = self.call(method, path, body)
        assert status < 300, found
        return found

    def lookup(self, prompt, **more):
        return self.good("POST", "/v1/blocks/lookup", {"tokens": prompt, **more})

    def held(self, prompt, tier="host"):
        """Return the ranges of a prompt's blocks that a tier holds."""
        by_tier = {one["tier"]: one["ranges"] for one in self.lookup(prompt)["tiers"]}
        return by_tier[tier]

    def blocks(self, tier="host"):
        return self.served.json(f"/v1/tiers/{tier}")["blocks"]
