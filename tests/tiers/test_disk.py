"""The disk store on real files: the contract, bytes on their way, and files and media that fail."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from contract import (
    KEY,
    LARGE_BYTES,
    OTHER,
    PARENT,
    Compressing,
    StoreContract,
    memory,
    payload_of,
    read,
    space_of,
    stored,
    whole,
)
from disks import file_of, mount, store_at
from kvtier.codec import HEADER_BYTES, HEADER_PAGE_BYTES
from kvtier.core import PAGE_BYTES, Fault, ReadOutcome
from kvtier.tiers import files
from kvtier.tiers.base import TierFault
from kvtier.tiers.disk import DiskOptions, DiskStore
from kvtier.tiers.tree import MANIFEST, MARKER
from support import chain


class TestDiskStore(StoreContract):
    @pytest.fixture
    def store(self, path):
        return store_at(path)

    @pytest.fixture
    def peer(self, store, path):
        return store_at(path)

    def damage(self, store, space, key, how):
        file = file_of(store, space, key)
        match how:
            case "flip":
                raw = bytearray(file.read_bytes())
                raw[HEADER_PAGE_BYTES + space.payload_bytes // 2] ^= 1
                file.write_bytes(raw)
            case "truncate":
                os.truncate(file, HEADER_PAGE_BYTES + space.payload_bytes // 2 + 1)
            case "swap":
                shutil.copy(file_of(store, space, OTHER), file)


class CompressingStore(Compressing, DiskStore):
    """Writes compressed files."""


class TestCompressedFiles(TestDiskStore):
    @pytest.fixture
    def store(self, path):
        store = CompressingStore(DiskOptions(path, 0))
        store.open()
        return store


class TestDiskStoreThroughThePageCache(TestDiskStore):
    @pytest.fixture(autouse=True)
    def no_direct(self, monkeypatch):
        monkeypatch.setattr(files, "probe", lambda folder: False)


# Files that are not what they should be.


def _rewritten(file: Path, at: int, new: bytes) -> None:
    """Change bytes of the header so that its own checksum is right."""
    raw = bytearray(file.read_bytes())
    raw[at : at + len(new)] = new
    raw[HEADER_BYTES - 8 : HEADER_BYTES] = xxhash.xxh3_64_digest(bytes(raw[: HEADER_BYTES - 8]))
    file.write_bytes(raw)


@pytest.mark.parametrize(
    ("at", "new"), [(8, b"\x02"), (10, b"\x01"), (10, b"\x63"), (24, bytes([0, 16]))]
)
def test_a_version_codec_or_size_that_is_not_ours_is_corrupt(store, space, at, new):
    stored(store, space, KEY)
    _rewritten(file_of(store, space, KEY), at, new)
    assert read(store, space, KEY) is ReadOutcome.CORRUPT
    assert not file_of(store, space, KEY).exists()


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, PAGE_BYTES, 3 * PAGE_BYTES - 1])
def test_a_torn_file_is_corrupt(store, space, size):
    stored(store, space, PARENT, KEY)
    assert read(store, space, PARENT) == whole(space, PARENT)
    os.truncate(file_of(store, space, KEY), size)
    assert read(store, space, KEY) is ReadOutcome.CORRUPT


def test_a_deleted_file_is_missing(store, space):
    stored(store, space, KEY)
    file_of(store, space, KEY).unlink()
    assert read(store, space, KEY) is ReadOutcome.MISSING


def _between(monkeypatch, action) -> None:
    """Let `action` happen once, after a file was opened and before it is read."""
    actual = os.preadv

    def preadv(*arguments):
        monkeypatch.setattr(os, "preadv", actual)
        action()
        return actual(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)


def test_a_block_that_is_dropped_while_it_is_read_is_read(store, space, monkeypatch):
    stored(store, space, KEY)
    _between(monkeypatch, lambda: store.drop(space.digest, [KEY]))
    assert read(store, space, KEY) == whole(space, KEY)
    assert read(store, space, KEY) is ReadOutcome.MISSING


def test_a_good_record_that_replaced_a_bad_one_stays(store, space, monkeypatch):
    stored(store, space, KEY)
    os.truncate(file_of(store, space, KEY), PAGE_BYTES)
    _between(monkeypatch, lambda: stored(store, space, KEY))
    assert read(store, space, KEY) is ReadOutcome.CORRUPT
    assert read(store, space, KEY) == whole(space, KEY)


# Faults of the medium.


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.ENOSPC, Fault.FULL),
        (errno.EDQUOT, Fault.FULL),
        (errno.EROFS, Fault.READ_ONLY),
        (errno.EACCES, Fault.READ_ONLY),
        (errno.ESTALE, Fault.UNREACHABLE),
        (errno.ENOTCONN, Fault.UNREACHABLE),
        (errno.EIO, Fault.IO),
        (errno.EMFILE, Fault.IO),
    ],
)
def test_a_write_that_fails_leaves_nothing_and_says_why(
    store, space, path, monkeypatch, number, fault
):
    stored(store, space, PARENT)

    def pwritev(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(TierFault, match=f"disk: {path}") as failed:
        stored(store, space, KEY)
    assert failed.value.fault is fault
    monkeypatch.undo()
    assert not list(path.rglob("*.tmp"))
    assert store.find(space, [PARENT, KEY]) == 1
    stored(store, space, KEY)
    assert read(store, space, KEY) == whole(space, KEY)


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.EIO, Fault.IO),
        (errno.EACCES, Fault.UNREACHABLE),
        (errno.ESTALE, Fault.UNREACHABLE),
        (errno.ETIMEDOUT, Fault.TIMEOUT),
    ],
)
def test_a_read_that_fails_is_no_miss_and_removes_nothing(store, space, monkeypatch, number, fault):
    stored(store, space, KEY)

    def preadv(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(TierFault) as failed:
        read(store, space, KEY)
    assert failed.value.fault is fault
    monkeypatch.undo()
    assert read(store, space, KEY) == whole(space, KEY)


def test_a_full_file_system_takes_no_more_until_there_is_room(small):
    store, space = store_at(small / "store"), space_of(LARGE_BYTES)
    keys = chain("full", 16)
    with pytest.raises(TierFault, match="free some room") as full:
        stored(store, space, *keys)
    assert full.value.fault is Fault.FULL
    count = store.find(space, keys)
    assert 10 <= count < 16
    assert not list(small.rglob("*.tmp"))
    assert read(store, space, keys[0]) == whole(space, keys[0])
    store.drop(space.digest, keys[:1])
    stored(store, space, keys[count])
    assert read(store, space, keys[count]) == whole(space, keys[count])


def test_the_floor_of_free_space_holds(small):
    floor = 8 << 20
    store, space = store_at(small / "store", floor), space_of(LARGE_BYTES)
    keys = chain("floor", 16)
    with pytest.raises(TierFault, match="are to stay so") as full:
        stored(store, space, *keys)
    assert full.value.fault is Fault.FULL
    medium = os.statvfs(small)
    assert floor <= medium.f_bavail * medium.f_frsize < floor + 2 * LARGE_BYTES
    store.drop(space.digest, keys)
    stored(store, space, KEY)


def test_a_read_only_file_system_still_serves_reads(small):
    store, space = store_at(small / "store"), space_of()
    stored(store, space, PARENT, KEY, OTHER)
    os.truncate(file_of(store, space, OTHER), PAGE_BYTES)
    mount("-o", "remount,ro", small)
    for reader in (store, DiskStore(store.options)):
        with pytest.raises(TierFault, match="mount it for writing") as refused:
            reader.open()
        assert refused.value.fault is Fault.READ_ONLY
        assert read(reader, space, KEY) == whole(space, KEY)
        assert read(reader, space, OTHER) is ReadOutcome.CORRUPT
        assert sum(len(listing.records) for listing in reader.scan()) == 3
    for call in (
        lambda: stored(store, space, KEY),
        lambda: store.drop(space.digest, [KEY]),
        lambda: store.wipe(space.digest),
    ):
        with pytest.raises(TierFault) as refused:
            call()
        assert refused.value.fault is Fault.READ_ONLY
    mount("-o", "remount,rw", small)
    store.open()
    stored(store, space, OTHER)
    assert store.find(space, [PARENT, KEY, OTHER]) == 3


def test_nothing_is_written_where_the_file_system_is_no_longer_mounted(small):
    store, space = store_at(small), space_of()
    stored(store, space, KEY)
    subprocess.run(["umount", small], check=True)
    assert read(store, space, KEY) is ReadOutcome.MISSING
    for call in (lambda: stored(store, space, KEY), store.open):
        with pytest.raises(TierFault) as gone:
            call()
        assert gone.value.fault is Fault.UNREACHABLE
    assert list(small.iterdir()) == []


def test_a_directory_that_was_emptied_is_used_again_after_the_next_probe(store, space, path):
    stored(store, space, KEY)
    shutil.rmtree(path)
    with pytest.raises(TierFault) as gone:
        stored(store, space, KEY)
    assert gone.value.fault is Fault.UNREACHABLE
    store.open()
    stored(store, space, KEY)
    assert read(store, space, KEY) == whole(space, KEY)


# How bytes go.


@pytest.mark.parametrize("size", [PAGE_BYTES, 5000, LARGE_BYTES])
def test_memory_and_sizes_may_be_odd(store, size):
    space = space_of(size, "odd")
    content = bytes(payload_of(space, "odd"))
    payload, slot = (memory(size + 1)[1:] for _ in range(2))
    payload[:] = content
    store.write(space, KEY, b"", payload)
    assert store.read(space, KEY, slot) is ReadOutcome.READ
    assert bytes(slot) == content


@pytest.mark.parametrize("step", [1000, PAGE_BYTES, 5 * PAGE_BYTES])
def test_short_reads_and_writes_are_gone_on_with(store, monkeypatch, step):
    space = space_of(16 * PAGE_BYTES, "short")
    writes, reads = os.pwritev, os.preadv

    def short(parts):
        return [next(part for part in parts if len(part))[:step]]

    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: writes(fd, short(parts), at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: reads(fd, short(parts), at))
    stored(store, space, KEY)
    assert read(store, space, KEY) == whole(space, KEY)


def test_a_file_system_without_direct_io_will_do(path, space, monkeypatch):
    actual = os.open

    def without(file, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return actual(file, flags, *more)

    monkeypatch.setattr(os, "open", without)
    store = store_at(path)
    assert not store.direct
    stored(store, space, KEY)
    assert read(store, space, KEY) == whole(space, KEY)
    unprobed = DiskStore(store.options)
    assert read(unprobed, space, KEY) == whole(space, KEY)


def test_the_page_cache_keeps_nothing_of_a_block(store):
    if not store.direct:
        pytest.skip("the file system of the temporary directory knows no O_DIRECT")
    space = space_of(LARGE_BYTES)
    stored(store, space, KEY)
    assert read(store, space, KEY) == whole(space, KEY)
    with file_of(store, space, KEY).open("rb", buffering=0) as file:
        try:
            cached = os.preadv(file.fileno(), [memory(PAGE_BYTES)], PAGE_BYTES, os.RWF_NOWAIT)
        except BlockingIOError:
            cached = 0
    assert cached == 0


def test_threads_that_wipe_and_write_do_not_hurt_each_other(store, path, space):
    keys = chain("wiped", 60)
    written = threading.Semaphore(0)

    def write() -> None:
        for key in keys:
            stored(store, space, key)
            written.release()

    with ThreadPoolExecutor(3) as pool:
        writing = [pool.submit(write) for _ in range(2)]
        for _ in range(len(keys)):
            assert written.acquire(timeout=20)
            store.wipe(space.digest)
        for each in writing:
            each.result()
    stored(store, space, KEY)
    assert (path / space.digest / MANIFEST).read_text() == space.manifest
    assert not list(path.rglob("*.tmp"))
    store.wipe(space.digest)
    assert [each.name for each in path.iterdir()] == [MARKER]
