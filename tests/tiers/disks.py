"""What the tests of the disk store share: stores, their files, and the room that they take."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from contract import (
    payload_of,
)
from kvtier.tiers.base import Listing, Space
from kvtier.tiers.disk import DiskOptions, DiskStore

OLD = (1_000_000_000, 1_000_000_000)
"""Times for os.utime: long ago."""


def store_at(path: Path, floor: int = 0, leftover_seconds: float = 60.0) -> DiskStore:
    """Return an opened store."""
    store = DiskStore(DiskOptions(path, floor, leftover_seconds))
    store.open()
    return store


def file_of(store: DiskStore, space: Space, key: bytes) -> Path:
    return store.options.path / space.digest / key[:1].hex() / f"{key.hex()}.kv"


def du(path: Path) -> int:
    done = subprocess.run(
        ["du", "-s", "--block-size=1", path], check=True, text=True, stdout=subprocess.PIPE
    )
    return int(done.stdout.split()[0])


class Account:
    """What a server knows of the room that its store takes."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store
        self.records: dict[tuple[str, bytes], int] = {}
        self.overheads: dict[tuple[str, int], int] = {}

    @property
    def total(self) -> int:
        return sum(self.records.values()) + sum(self.overheads.values())

    def scan(self) -> list[Listing]:
        listings = list(self.store.scan())
        for listing in listings:
            place = (listing.namespace, listing.first)
            self.overheads[place] = listing.overhead_bytes
            for name in [each for each in self.records if (each[0], each[1][0]) == place]:
                del self.records[name]
            for held in listing.records:
                self.records[listing.namespace, held.key] = held.record_bytes
        return listings

    def write(self, space: Space, key: bytes) -> None:
        written = self.store.write(space, key, b"", payload_of(space, key))
        self.records[space.digest, key] = written.record_bytes
        place = (space.digest, key[0])
        self.overheads[place] = self.overheads.get(place, 0) + written.overhead_bytes

    def drop(self, space: Space, key: bytes) -> None:
        self.store.drop(space.digest, [key])
        del self.records[space.digest, key]


def mount(*arguments: str | Path) -> None:
    done = subprocess.run(["mount", *arguments], check=False, text=True, stderr=subprocess.PIPE)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
