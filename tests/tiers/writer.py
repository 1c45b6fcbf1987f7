"""A server that only writes: PATH SEED ROUNDS PAYLOAD_BYTES KEYS.

It writes each of the keys in each round, and a character to stdout once it begins. Whoever writes
a block, its payload is the same. Imports little, so that many can be started.
"""

from __future__ import annotations

import hashlib
import mmap
import sys
from pathlib import Path
from random import Random

from kvtier.tiers.base import Space
from kvtier.tiers.disk import DiskOptions, DiskStore


def space_of(payload_bytes: int) -> Space:
    return Space(hashlib.sha256(b"the writers' namespace").hexdigest(), payload_bytes, "{}")


def keys_of(count: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in range(count)]


def content_of(key: bytes, payload_bytes: int) -> bytes:
    return hashlib.shake_128(key).digest(payload_bytes)


def main(path: str, seed: str, *numbers: str) -> None:
    rounds, payload_bytes, count = map(int, numbers)
    store = DiskStore(DiskOptions(Path(path), 0))
    store.open()
    space = space_of(payload_bytes)
    payloads = {key: memoryview(mmap.mmap(-1, payload_bytes)) for key in keys_of(count)}
    for key, payload in payloads.items():
        payload[:] = content_of(key, payload_bytes)
    print("!", flush=True)
    random = Random(seed)
    for _ in range(rounds):
        for key in random.sample(list(payloads), count):
            store.write(space, key, b"", payloads[key])


if __name__ == "__main__":
    main(*sys.argv[1:])
