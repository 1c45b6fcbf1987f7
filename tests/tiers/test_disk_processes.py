"""Several servers on one directory, and servers that are killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import writer
from contract import (
    read,
)
from disks import Account, du, store_at
from kvtier.core import PAGE_BYTES, ReadOutcome


def _writer(path: Path, seed: object, rounds: int, payload_bytes: int, keys: int):
    numbers = map(str, (seed, rounds, payload_bytes, keys))
    return subprocess.Popen(
        [sys.executable, writer.__file__, path, *numbers], stdout=subprocess.PIPE
    )


def test_a_reader_beside_two_writers_sees_nothing_or_whole_blocks(path):
    store, space, keys = store_at(path), writer.space_of(2 * PAGE_BYTES), writer.keys_of(32)
    expected = {key: writer.content_of(key, space.payload_bytes) for key in keys}
    writers = [_writer(path, seed, 20, space.payload_bytes, len(keys)) for seed in range(2)]
    try:
        while any(each.poll() is None for each in writers):
            for key in keys:
                assert read(store, space, key) in {expected[key], ReadOutcome.MISSING}
        assert [each.wait() for each in writers] == [0, 0]
    finally:
        for each in writers:
            each.kill()
            each.communicate()
    assert all(read(store, space, key) == expected[key] for key in keys)
    assert not list(path.rglob("*.tmp"))


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_only_whole_records_and_leftovers(path):
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    moments = random.Random(seed)
    store, space, keys = store_at(path), writer.space_of(64 * PAGE_BYTES), writer.keys_of(8)
    expected = {key: writer.content_of(key, space.payload_bytes) for key in keys}
    torn = 0
    for round_ in range(200):
        child = _writer(path, round_, 1_000_000, space.payload_bytes, len(keys))
        try:
            assert child.stdout.read(1) == b"!"
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(moments.uniform(0.0, 0.02))
        finally:
            child.kill()
            child.communicate()
        left = list(path.rglob("*.tmp"))
        torn += bool(left)
        listed = {held.key for listing in store.scan() for held in listing.records}
        assert all(read(store, space, key) == expected[key] for key in listed)
        assert set(left) <= set(path.rglob("*.tmp")), "young leftovers may be another's"
        cleaner = Account(store_at(path, leftover_seconds=0.0))
        cleaner.scan()
        assert not list(path.rglob("*.tmp"))
        assert cleaner.total == du(path)
    assert torn > 20, "the writers were killed while they wrote"
