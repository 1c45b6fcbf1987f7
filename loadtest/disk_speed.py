"""How fast the disk store reads, writes and scans, beside fio and find on the same files.

    python -m loadtest.disk_speed [--path DIRECTORY]

Records go from and to slots in a slab, through a pool of two threads. fio has two jobs (psync,
O_DIRECT, one call a file), reads the very files that the store wrote, and writes as many of the
same size; neither asks for fsync, and both have one piece of memory for each thread. They are
measured in turn, each first in every other pair, after a pause in which a medium that rations its
bandwidth may recover; each pair gives a ratio. A scan is that of a server that starts, over
100,000 files, beside `find` that prints path, size, blocks and time of each. The default directory
is a temporary one. Its file system must know O_DIRECT: what lies in the page cache is no
measurement of a disk.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from kvtier.codec import HEADER_PAGE_BYTES
from kvtier.core import PAGE_BYTES, ReadOutcome, align_up
from kvtier.tiers.base import Space
from kvtier.tiers.disk import DiskOptions, DiskStore

from .report import Row, show
from .rig import RigError

PAYLOAD_BYTES = (1_474_560, align_up(6_000_000, PAGE_BYTES))
"""A block of 32 tokens of SmolLM2-135M in float32, and one of a larger model."""
BATCH_BYTES = 384 << 20
"""What one measurement reads or writes."""
THREADS = 2
PAIRS = 8
PAUSE_SECONDS = 0.5
SCANNED_FILES = 100_000
FIO_SECONDS_AT_MOST = 120


@dataclass(frozen=True, slots=True)
class Pair:
    """Two measurements, one right after the other: bytes or files a second."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Ours ÷ theirs."""
        return self.ours / self.theirs


def disk_read_ratio(path: Path | None = None) -> list[float]:
    """Return bytes/s of reads into slots ÷ those of fio, pair by pair, of all sizes."""
    return [pair.ratio for size in PAYLOAD_BYTES for pair in reads(size, path)]


def disk_write_ratio(path: Path | None = None) -> list[float]:
    """Return bytes/s of writes from slots ÷ those of fio, pair by pair, of all sizes."""
    return [pair.ratio for size in PAYLOAD_BYTES for pair in writes(size, path)]


def scan_ratio(path: Path | None = None) -> list[float]:
    """Return the seconds of a scan of 100,000 files ÷ those of find, pair by pair."""
    return [1 / pair.ratio for pair in scans(path)]


def reads(payload_bytes: int, path: Path | None = None) -> list[Pair]:
    """Measure reads."""
    with _bench(payload_bytes, path) as bench:
        bench.each(bench.write)
        fio = FioReads(bench.files(), bench.folder / "links", THREADS)
        bench.each(bench.read)
        pairs = _pairs(lambda: bench.each(bench.read), fio.speed)
    _show(f"read of {payload_bytes / 1e6:.2f} MB", pairs, "GB/s", 1e-9, "fio")
    return pairs


def writes(payload_bytes: int, path: Path | None = None) -> list[Pair]:
    """Measure writes of files that are not there yet."""
    with _bench(payload_bytes, path) as bench:
        folder = bench.folder / "fio"
        files = _Files(folder, bench.record_bytes, len(bench.keys), THREADS)
        command = _fio("write", files, "--create_on_open=1", "--fallocate=none")

        def ours() -> float:
            try:
                return bench.each(bench.write)
            finally:
                bench.store.drop(bench.space.digest, bench.keys)  # Folders are made once.

        def theirs() -> float:
            folder.mkdir()
            try:
                return _fio_speed(command, "write")
            finally:
                shutil.rmtree(folder)

        ours()
        pairs = _pairs(ours, theirs)
    _show(f"write of {payload_bytes / 1e6:.2f} MB", pairs, "GB/s", 1e-9, "fio")
    return pairs


def scans(path: Path | None = None) -> list[Pair]:
    """Measure scans of empty files: only names and times count."""
    with _folder(path) as folder:
        options = DiskOptions(folder / "store", 0)
        fill(options.path, SCANNED_FILES)
        find = f"find {options.path} -printf '%p %s %b %T@\\n' > /dev/null"

        def scan() -> None:
            found = sum(len(listing.records) for listing in DiskStore(options).scan())
            assert found == SCANNED_FILES, f"the scan found {found} records"

        def theirs() -> None:
            subprocess.run(find, shell=True, check=True)

        scan()
        pairs = _pairs(
            lambda: SCANNED_FILES / _seconds(scan), lambda: SCANNED_FILES / _seconds(theirs)
        )
    _show(f"scan of {SCANNED_FILES:,} files", pairs, "files/s", 1.0, "find")
    return pairs


def fill(path: Path, count: int, record_bytes: int = 0) -> None:
    """Make the directory of a store with so many records that have a size, but no content."""
    DiskStore(DiskOptions(path, 0)).open()
    above = path / hashlib.sha256(b"scan").hexdigest()
    for first in range(256):
        (above / f"{first:02x}").mkdir(parents=True)
    for number in range(count):
        name = hashlib.sha256(b"%d" % number).hexdigest()
        with (above / name[:2] / f"{name}.kv").open("wb") as file:
            if record_bytes:
                os.posix_fallocate(file.fileno(), 0, record_bytes)


class _Bench:
    """A store with the slots of a slab, and keys that fill `BATCH_BYTES`."""

    def __init__(self, folder: Path, payload_bytes: int) -> None:
        self.folder = folder
        self.store = DiskStore(DiskOptions(folder / "store", 0))
        self.store.open()
        if not self.store.direct:
            raise RigError(f"{folder} lies on a file system without O_DIRECT: take another --path")
        self.space = Space(hashlib.sha256(b"disk speed").hexdigest(), payload_bytes, "{}")
        self.record_bytes = HEADER_PAGE_BYTES + payload_bytes
        count = BATCH_BYTES // self.record_bytes // THREADS * THREADS
        self.keys = [hashlib.sha256(b"%d" % number).digest() for number in range(count)]
        self.free: SimpleQueue[memoryview] = SimpleQueue()
        for slot in _slots(payload_bytes):
            slot[:] = os.urandom(payload_bytes)
            self.free.put(slot)
        self.pool = ThreadPoolExecutor(THREADS)

    def each(self, work: Callable[[bytes, memoryview], None]) -> float:
        """Do something with each block in the pool. Returns bytes a second."""

        def one(key: bytes) -> None:
            slot = self.free.get()
            work(key, slot)
            self.free.put(slot)

        seconds = _seconds(lambda: list(self.pool.map(one, self.keys)))
        return self.record_bytes * len(self.keys) / seconds

    def read(self, key: bytes, slot: memoryview) -> None:
        """Read a block into its slot."""
        outcome = self.store.read(self.space, key, slot)
        assert outcome is ReadOutcome.READ, f"a record that was written is {outcome}"

    def write(self, key: bytes, slot: memoryview) -> None:
        """Write a block from its slot."""
        self.store.write(self.space, key, b"", slot)

    def files(self) -> list[Path]:
        """Return the files of all records."""
        files = sorted(self.folder.rglob("*.kv"))
        assert len(files) == len(self.keys), "each block is a file"
        return files


@dataclass(frozen=True, slots=True)
class _Files:
    """What fio goes through: as many files of one size for each job, under names that it makes."""

    folder: Path
    record_bytes: int
    count: int
    jobs: int


class FioReads:
    """fio reading records that are there, whole and O_DIRECT, with one record a job at a time."""

    def __init__(self, records: Sequence[Path], folder: Path, jobs: int) -> None:
        """Make `folder`, with links to the records, all of one size. Raises RigError."""
        _need_fio()
        sizes = {record.stat().st_size for record in records}
        assert len(sizes) == 1, "all records are of one size"
        assert not len(records) % jobs, "each job has as many records"
        folder.mkdir()
        for number, record in enumerate(records):
            (folder / f"{number % jobs}.{number // jobs}").hardlink_to(record)
        files = _Files(folder, sizes.pop(), len(records), jobs)
        self._command = _fio("read", files, "--allow_file_create=0")

    def speed(self) -> float:
        """Read all records once. Returns bytes a second."""
        return _fio_speed(self._command, "read")


def _fio(rw: str, files: _Files, *more: str) -> list[str]:
    share = files.count // files.jobs
    common = [
        *("fio", "--output-format=json", "--group_reporting", "--direct=1"),
        *("--ioengine=psync", "--thread", f"--rw={rw}", f"--bs={files.record_bytes}"),
        *("--file_service_type=sequential", f"--directory={files.folder}", *more),
        *("--filename_format=$jobname.$filenum", f"--nrfiles={share}"),
        *(f"--filesize={files.record_bytes}", f"--size={files.record_bytes * share}"),
    ]
    return common + [f"--name={job}" for job in range(files.jobs)]


def _slots(payload_bytes: int) -> Iterator[memoryview]:
    """Yield one slot for each thread, in memory like that of a slab."""
    descriptor = os.memfd_create("disk-speed", os.MFD_CLOEXEC)
    os.posix_fallocate(descriptor, 0, THREADS * payload_bytes)
    how = mmap.MAP_SHARED | mmap.MAP_POPULATE
    slab = memoryview(mmap.mmap(descriptor, THREADS * payload_bytes, how))
    os.close(descriptor)
    for at in range(0, len(slab), payload_bytes):
        yield slab[at : at + payload_bytes]


@contextlib.contextmanager
def _folder(path: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=path, prefix="disk-speed-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _bench(payload_bytes: int, path: Path | None) -> Iterator[_Bench]:
    _need_fio()
    with _folder(path) as folder:
        bench = _Bench(folder, payload_bytes)
        try:
            yield bench
        finally:
            bench.pool.shutdown()


def _pairs(ours: Callable[[], float], theirs: Callable[[], float]) -> list[Pair]:
    """Measure both in turn; each goes first in every other pair."""

    def rested(measure: Callable[[], float]) -> float:
        time.sleep(PAUSE_SECONDS)
        return measure()

    pairs = []
    for number in range(PAIRS):
        if number % 2:
            last = rested(theirs)
            pairs.append(Pair(rested(ours), last))
        else:
            first = rested(ours)
            pairs.append(Pair(first, rested(theirs)))
    return pairs


def _need_fio() -> None:
    if shutil.which("fio") is None:
        raise RigError("fio is not installed, and it is what the disk tier is measured against")


def _fio_speed(command: Sequence[str], direction: str) -> float:
    done = subprocess.run(
        command, text=True, capture_output=True, timeout=FIO_SECONDS_AT_MOST, check=False
    )
    if done.returncode:
        raise RigError(f"fio failed: {done.stderr.strip()[-300:]}")
    [group] = json.loads(done.stdout)["jobs"]
    return float(group[direction]["bw_bytes"])


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(arguments: Sequence[str]) -> int:
    """Print all measurements."""
    parser = argparse.ArgumentParser(prog="loadtest.disk_speed")
    parser.add_argument("--path", type=Path, help="directory to measure in")
    path = parser.parse_args(arguments).path
    for size in PAYLOAD_BYTES:
        reads(size, path)
        writes(size, path)
    scans(path)
    return 0


def _show(what: str, pairs: Sequence[Pair], unit: str, scale: float, theirs: str) -> None:
    rows = [
        Row("kvtier", [pair.ours for pair in pairs], unit, scale),
        Row(theirs, [pair.theirs for pair in pairs], unit, scale),
        Row(f"kvtier ÷ {theirs}", [pair.ratio for pair in pairs]),
    ]
    show(f"disk: {what}", rows)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RigError as error:
        sys.exit(f"disk_speed: {error}")
