"""What every store of records promises, whatever its medium.

A medium's tests subclass `StoreContract` and override the fixtures `store` and `peer` and the
method `damage`:

    class TestDiskStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path): ...
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
from kvtier.codec import Codec
from kvtier.core import PAGE_BYTES, ReadOutcome
from kvtier.tiers.base import RecordStore, Space
from kvtier.tiers.compression import Coded
from support import chain, manifest

Damage = Literal["flip", "truncate", "swap"]

BLOCKS = chain("contract", 8)
KEY, PARENT = BLOCKS[1], BLOCKS[0]
OTHER = chain("other", 1)[0]
"""A block of the same space. `damage` by "swap" puts its record in another's place."""
LARGE_BYTES = (1 << 20) + 3 * PAGE_BYTES
FEW = bytes(48 | value & 15 for value in range(256))
"""Makes any byte one of sixteen: the upper bytes of a KV cache's numbers have few values."""


class Compressing:
    """In front of a store's class: it compresses whatever it is told to write."""

    def write(self, space, key, parent, payload, codec=Codec.RAW):
        return super().write(space, key, parent, payload, Codec.SHUFFLE_ZSTD)


def space_of(payload_bytes: int = 2 * PAGE_BYTES, name: str = "contract") -> Space:
    """Return a space whose slots have so many bytes; another name is another namespace."""
    identity = manifest(weights=name, shard_bytes=payload_bytes)
    readable = f'{{"weights": "{name}"}}'
    return Space(identity.digest(), payload_bytes, readable, identity.element_bytes)


def memory(size: int) -> memoryview:
    """Return zeroed memory that begins at a page, like a slot."""
    return memoryview(mmap.mmap(-1, size))


def payload_of(space: Space, seed: object) -> memoryview:
    """Return the bytes of a slot, the same for equal seeds: shuffled, they shrink by a quarter."""
    content = bytearray(random.Random(repr(seed)).randbytes(space.payload_bytes))
    content[1::2] = content[1::2].translate(FEW)
    slot = memory(space.payload_bytes)
    slot[:] = content
    return slot


def stored(store: RecordStore, space: Space, *keys: bytes) -> None:
    """Write blocks whose payload is what `payload_of` makes of their key."""
    for key in keys:
        store.write(space, key, b"", payload_of(space, key))


def read(store: RecordStore, space: Space, key: bytes) -> bytes | ReadOutcome:
    """Return what was read, or the outcome if nothing was."""
    slot = memory(space.payload_bytes)
    outcome = store.read(space, key, slot)
    return bytes(slot) if outcome is ReadOutcome.READ else outcome


def whole(space: Space, key: bytes) -> bytes:
    """Return what `read` returns of a block that `stored` wrote."""
    return bytes(payload_of(space, key))


class StoreContract:
    """The suite. `store` and `peer` are opened; the fixture closes them after the test."""

    @pytest.fixture
    def store(self) -> RecordStore:
        raise NotImplementedError

    @pytest.fixture
    def peer(self, store: RecordStore) -> RecordStore:
        """Another store on the same medium, as another server has it."""
        raise NotImplementedError

    @pytest.fixture
    def space(self) -> Space:
        return space_of()

    def damage(self, store: RecordStore, space: Space, key: bytes, how: Damage) -> None:
        """Change the record of `key` behind the store's back.

        `flip` changes one bit in the middle of the payload; `truncate` cuts the record off there;
        `swap` replaces it by the whole record of `OTHER`, which the test has written.
        """
        raise NotImplementedError

    def test_a_block_comes_back_as_it_was_written(self, store, space):
        written = store.write(space, KEY, PARENT, payload_of(space, "once"))
        assert written.record_bytes >= 0.75 * space.payload_bytes
        assert written.overhead_bytes >= 0
        assert read(store, space, KEY) == bytes(payload_of(space, "once"))

    def test_a_block_without_a_parent_comes_back(self, store, space):
        store.write(space, KEY, b"", payload_of(space, "head"))
        assert read(store, space, KEY) == bytes(payload_of(space, "head"))

    def test_what_was_never_written_is_missing(self, store, space):
        assert read(store, space, KEY) is ReadOutcome.MISSING
        assert store.find(space, BLOCKS) == 0

    def test_a_payload_of_more_than_a_mebibyte_comes_back(self, store):
        space = space_of(LARGE_BYTES, "large")
        stored(store, space, KEY)
        assert read(store, space, KEY) == whole(space, KEY)

    def test_a_payload_of_one_page_of_zeros_comes_back(self, store):
        space = space_of(PAGE_BYTES, "zeros")
        store.write(space, KEY, PARENT, memory(PAGE_BYTES))
        slot = payload_of(space, "what lay there before")
        assert store.read(space, KEY, slot) is ReadOutcome.READ
        assert bytes(slot) == bytes(PAGE_BYTES)

    def test_the_callers_memory_is_only_read_by_a_write(self, store, space):
        payload = payload_of(space, "mine")
        store.write(space, KEY, PARENT, payload.toreadonly())
        assert bytes(payload) == bytes(payload_of(space, "mine"))

    def test_a_second_write_replaces_the_first(self, store, space):
        store.write(space, KEY, PARENT, payload_of(space, "first"))
        store.write(space, KEY, PARENT, payload_of(space, "second"))
        assert read(store, space, KEY) == bytes(payload_of(space, "second"))

    def test_the_same_write_a_hundred_times_takes_the_room_of_one(self, store, space):
        first, *later = (
            store.write(space, KEY, PARENT, payload_of(space, KEY)) for _ in range(100)
        )
        assert {each.record_bytes for each in later} == {first.record_bytes}
        assert {each.overhead_bytes for each in later} == {0}

    def test_find_counts_up_to_the_first_gap(self, store, space):
        stored(store, space, *BLOCKS[:3], *BLOCKS[4:])
        assert store.find(space, BLOCKS) == 3
        assert store.find(space, BLOCKS[3:]) == 0
        assert store.find(space, BLOCKS[4:]) == len(BLOCKS) - 4

    def test_find_of_no_keys_is_none(self, store, space):
        assert store.find(space, []) == 0

    def test_find_counts_a_long_prefix(self, store):
        space = space_of(PAGE_BYTES, "long")
        keys = chain("long", 120)
        stored(store, space, *keys)
        assert store.find(space, keys) == len(keys)
        assert store.find(space, [*keys, OTHER]) == len(keys)

    def test_keys_may_have_any_bytes(self, store):
        space = space_of(PAGE_BYTES, "bytes")
        keys = [bytes((at + step) % 256 for step in range(32)) for at in range(0, 256, 5)]
        keys += [bytes([value]) * 32 for value in (0, 10, 13, 37, 42, 46, 47, 92, 123, 125, 255)]
        keys += [bytes(31) + bytes([last]) for last in range(1, 12)]
        stored(store, space, *keys)
        assert store.find(space, keys) == len(keys)
        assert all(read(store, space, key) == whole(space, key) for key in keys)

    def test_dropped_blocks_are_missing_and_the_others_stay(self, store, space):
        stored(store, space, *BLOCKS)
        store.drop(space.digest, BLOCKS[3:5])
        assert store.find(space, BLOCKS) == 3
        assert read(store, space, BLOCKS[3]) is ReadOutcome.MISSING
        assert read(store, space, BLOCKS[5]) == whole(space, BLOCKS[5])

    def test_dropping_what_is_not_there_is_no_error(self, store, space):
        store.drop(space.digest, [])
        store.drop(space.digest, BLOCKS)
        stored(store, space, KEY)
        store.drop(space.digest, [KEY, KEY, OTHER])
        store.drop(space.digest, [KEY])
        assert read(store, space, KEY) is ReadOutcome.MISSING

    def test_a_dropped_block_may_be_written_again(self, store, space):
        stored(store, space, KEY)
        store.drop(space.digest, [KEY])
        stored(store, space, KEY)
        assert read(store, space, KEY) == whole(space, KEY)

    def test_a_wipe_removes_all_blocks_of_the_namespace_whoever_wrote_them(
        self, store, peer, space
    ):
        stored(store, space, *BLOCKS[:4])
        stored(peer, space, *BLOCKS[4:])
        store.wipe(space.digest)
        assert all(read(store, space, key) is ReadOutcome.MISSING for key in BLOCKS)
        assert peer.find(space, BLOCKS[4:]) == 0

    def test_a_wipe_of_an_empty_namespace_is_no_error(self, store, space):
        store.wipe(space.digest)
        stored(store, space, KEY)
        store.wipe(space.digest)
        store.wipe(space.digest)

    def test_a_wiped_namespace_may_be_written_again(self, store, space):
        stored(store, space, KEY)
        store.wipe(space.digest)
        stored(store, space, KEY, OTHER)
        assert store.find(space, [KEY, OTHER]) == 2

    def test_namespaces_share_nothing(self, store, space):
        second = space_of(space.payload_bytes, "second")
        third = space_of(3 * space.payload_bytes, "third")
        for each in (space, third):
            store.write(each, KEY, PARENT, payload_of(each, each.digest))
        assert read(store, second, KEY) is ReadOutcome.MISSING
        store.wipe(second.digest)
        store.drop(second.digest, [KEY])
        assert read(store, space, KEY) == bytes(payload_of(space, space.digest))
        store.wipe(space.digest)
        assert read(store, third, KEY) == bytes(payload_of(third, third.digest))

    @pytest.mark.parametrize("how", ["flip", "truncate", "swap"])
    def test_a_damaged_record_is_corrupt_once_and_missing_afterwards(self, store, space, how):
        stored(store, space, PARENT, KEY, OTHER)
        self.damage(store, space, KEY, how)
        assert read(store, space, KEY) is ReadOutcome.CORRUPT
        assert read(store, space, KEY) is ReadOutcome.MISSING
        assert store.find(space, [PARENT, KEY]) == 1
        assert read(store, space, PARENT) == whole(space, PARENT)
        stored(store, space, KEY)
        assert read(store, space, KEY) == whole(space, KEY)

    def test_a_record_of_another_size_than_the_slots_is_corrupt(self, store, space):
        stored(store, space, KEY)
        larger = Space(space.digest, space.payload_bytes + PAGE_BYTES, space.manifest)
        assert read(store, larger, KEY) is ReadOutcome.CORRUPT

    def test_compressed_records_lie_beside_raw_ones_and_take_less(self, store, peer):
        space = space_of(LARGE_BYTES, "codecs")
        raw = peer.write(space, KEY, PARENT, payload_of(space, KEY))
        small = store.write(space, OTHER, PARENT, payload_of(space, OTHER), Codec.SHUFFLE_ZSTD)
        assert raw.coded == Coded()
        assert small.coded.raw_bytes == LARGE_BYTES
        assert small.coded.stored_bytes < 0.8 * LARGE_BYTES
        assert small.coded.seconds > 0
        assert small.record_bytes < 0.9 * raw.record_bytes
        for reader in (store, peer):
            for key, codec in ((KEY, Codec.RAW), (OTHER, Codec.SHUFFLE_ZSTD)):
                slot, heard = memory(LARGE_BYTES), []
                assert reader.read(space, key, slot, heard.append) is ReadOutcome.READ
                assert bytes(slot) == whole(space, key)
                assert len(heard) == (codec is not Codec.RAW)
                assert all(one[:2] == small.coded[:2] and one.seconds > 0 for one in heard)

    def test_what_does_not_get_smaller_is_stored_raw(self, store):
        space = space_of(LARGE_BYTES, "noise")
        noise = memory(LARGE_BYTES)
        noise[:] = os.urandom(LARGE_BYTES)
        written = store.write(space, KEY, PARENT, noise)
        if isinstance(store, Compressing):
            assert written.coded[:2] == (LARGE_BYTES, LARGE_BYTES)
        assert written.record_bytes >= LARGE_BYTES
        assert read(store, space, KEY) == bytes(noise)

    def test_a_record_says_itself_what_its_elements_are(self, store):
        space = space_of(LARGE_BYTES, "elements")
        store.write(space, KEY, PARENT, payload_of(space, KEY), Codec.SHUFFLE_ZSTD)
        other = dataclasses.replace(space, element_bytes=1)
        assert read(store, other, KEY) == whole(space, KEY)

    def test_what_one_server_writes_another_reads(self, store, peer, space):
        stored(store, space, *BLOCKS)
        assert peer.find(space, BLOCKS) == len(BLOCKS)
        assert read(peer, space, KEY) == whole(space, KEY)
        peer.drop(space.digest, [KEY])
        assert read(store, space, KEY) is ReadOutcome.MISSING

    def test_opening_again_keeps_the_blocks(self, store, space):
        stored(store, space, KEY)
        store.open()
        assert read(store, space, KEY) == whole(space, KEY)
        store.close()
        store.open()
        assert read(store, space, KEY) == whole(space, KEY)

    def test_closing_twice_is_no_error(self, store, space):
        stored(store, space, KEY)
        store.close()
        store.close()

    def test_readers_beside_a_writer_see_nothing_or_a_whole_block(self, store, peer):
        space = space_of(16 * PAGE_BYTES, "race")
        versions = [payload_of(space, seed) for seed in ("odd", "even")]
        seen: list[bytes | ReadOutcome] = []
        done = threading.Event()

        def write() -> None:
            try:
                for round_ in range(40):
                    store.write(space, KEY, PARENT, versions[round_ % 2])
                    if round_ % 5 == 4:
                        store.drop(space.digest, [KEY])
            finally:
                done.set()

        def look(reader: RecordStore) -> None:
            while not done.is_set():
                seen.append(read(reader, space, KEY))

        with ThreadPoolExecutor(4) as pool:
            readers = [pool.submit(look, each) for each in (store, peer, peer)]
            pool.submit(write).result()
            for each in readers:
                each.result()
        assert {each for each in seen if not isinstance(each, bytes)} <= {ReadOutcome.MISSING}
        assert {each for each in seen if isinstance(each, bytes)} <= set(map(bytes, versions))

    def test_many_threads_write_and_read_at_once(self, store, space):
        keys = chain("threads", 64)

        def there_and_back(key: bytes) -> bool:
            stored(store, space, key)
            return read(store, space, key) == whole(space, key)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(there_and_back, keys))
        assert store.find(space, keys) == len(keys)
