"""How fast the disk store reads, writes and scans, beside fio and find on the same files.

    python -m loadtest.disk_speed [--path DIRECTORY]

Records go from and to slots in a slab, through a pool of two threads. fio has two jobs (psync,
O_DIRECT, one call a file), reads the very files that the store wrote, and writes as many of the
same size; neither asks for fsync. The two are measured in turn, and each pair gives a ratio. A
scan is that of a server that starts, over 100,000 files, beside `find` that prints path, size,
blocks and time of each. The default directory is a temporary one. Its file system must know
O_DIRECT: what lies in the page cache is no measurement of a disk.
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
PAIRS = 7
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
        command = bench.fio("read", bench.files(), "--allow_file_create=0")
        bench.each(bench.read)
        return [Pair(bench.each(bench.read), _fio_speed(command, "read")) for _ in range(PAIRS)]


def writes(payload_bytes: int, path: Path | None = None) -> list[Pair]:
    """Measure writes of files that are not there yet."""
    with _bench(payload_bytes, path) as bench:
        folder = bench.folder / "fio"
        names = [folder / f"{number}" for number in range(len(bench.keys))]
        command = bench.fio("write", names, "--create_on_open=1", "--fallocate=none")

        def pair() -> Pair:
            ours = bench.each(bench.write)
            bench.store.wipe(bench.space.digest)
            folder.mkdir()
            theirs = _fio_speed(command, "write")
            shutil.rmtree(folder)
            return Pair(ours, theirs)

        pair()
        return [pair() for _ in range(PAIRS)]


def scans(path: Path | None = None) -> list[Pair]:
    """Measure scans of files without content: only names and times count."""
    with _folder(path) as folder:
        options = DiskOptions(folder / "store", 0)
        store = DiskStore(options)
        store.open()
        above = options.path / hashlib.sha256(b"scan").hexdigest()
        for first in range(256):
            (above / f"{first:02x}").mkdir(parents=True)
        for number in range(SCANNED_FILES):
            name = hashlib.sha256(b"%d" % number).hexdigest()
            (above / name[:2] / f"{name}.kv").touch()
        find = f"find {options.path} -printf '%p %s %b %T@\\n' > /dev/null"

        def scan() -> None:
            found = sum(len(listing.records) for listing in DiskStore(options).scan())
            assert found == SCANNED_FILES, f"the scan found {found} records"

        def pair() -> Pair:
            seconds = _seconds(scan)
            theirs = _seconds(lambda: subprocess.run(find, shell=True, check=True))
            return Pair(SCANNED_FILES / seconds, SCANNED_FILES / theirs)

        pair()
        return [pair() for _ in range(PAIRS)]


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
        descriptor = os.memfd_create("disk-speed", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, count * payload_bytes)
        slab = memoryview(mmap.mmap(descriptor, count * payload_bytes, flags=_SHARED))
        os.close(descriptor)
        self.slots = [slab[at : at + payload_bytes] for at in range(0, len(slab), payload_bytes)]
        for key, slot in zip(self.keys, self.slots, strict=True):
            slot[:] = hashlib.shake_128(key).digest(payload_bytes)
        self.pool = ThreadPoolExecutor(THREADS)

    def each(self, work: Callable[[bytes, memoryview], None]) -> float:
        """Do something with each block in the pool. Returns bytes a second."""
        seconds = _seconds(lambda: list(self.pool.map(work, self.keys, self.slots)))
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

    def fio(self, rw: str, files: Sequence[Path], *more: str) -> list[str]:
        """Return the command that goes through `files` with as many jobs as we have threads."""
        common = [
            *("fio", "--output-format=json", "--group_reporting", "--direct=1"),
            *("--ioengine=psync", "--thread", f"--rw={rw}", f"--bs={self.record_bytes}"),
            *("--file_service_type=sequential", *more),
        ]
        share = len(files) // THREADS
        for job in range(THREADS):
            mine = files[job * share : (job + 1) * share]
            common += [
                *(f"--name=job{job}", f"--filename={':'.join(map(str, mine))}"),
                *(f"--filesize={self.record_bytes}", f"--size={self.record_bytes * share}"),
            ]
        return common


_SHARED = mmap.MAP_SHARED | mmap.MAP_POPULATE


@contextlib.contextmanager
def _folder(path: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=path, prefix="disk-speed-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _bench(payload_bytes: int, path: Path | None) -> Iterator[_Bench]:
    if shutil.which("fio") is None:
        raise RigError("fio is not installed, and it is what the disk tier is measured against")
    with _folder(path) as folder:
        bench = _Bench(folder, payload_bytes)
        try:
            yield bench
        finally:
            bench.pool.shutdown()


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
        for what, measure in (("read", reads), ("write", writes)):
            _print(f"{what} of {size / 1e6:.2f} MB", measure(size, path), "GB/s", 1e-9, "fio")
    _print("scan", scans(path), "files/s", 1.0, "find")
    return 0


def _print(what: str, pairs: Sequence[Pair], unit: str, scale: float, theirs: str) -> None:
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
