"""The disk tier (L2): one record a file, in a directory that servers may share.

A record appears by a rename, as a whole, and a reader holds its file open: any number of servers
may write, read and remove in one directory without a lock. All calls block; all but `open` may
overlap. Where files lie is `tree.py`'s business, how bytes move that of `files.py`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..codec import HEADER_PAGE_BYTES, Codec, RecordError, expect, pack, unpack
from ..core import PAGE_BYTES, BlockKey, Fault, ReadOutcome, Tier, align_up
from . import files
from .base import Listing, RecordStore, Space, TierFault, Written, ignore
from .compression import Coded, Coder
from .tree import Tree

log = logging.getLogger(__name__)

WRITE_ATTEMPTS = 50
"""How often a write is tried. It makes the folder that is missing, and a wipe may remove it."""

_FAULTS_OF_WRITING: Mapping[int | None, Fault] = {
    errno.ENOSPC: Fault.FULL,
    errno.EDQUOT: Fault.FULL,
    errno.EROFS: Fault.READ_ONLY,
    errno.EACCES: Fault.READ_ONLY,
    errno.EPERM: Fault.READ_ONLY,
    errno.ENOENT: Fault.UNREACHABLE,
    errno.ENOTDIR: Fault.UNREACHABLE,
    errno.EEXIST: Fault.UNREACHABLE,
    errno.ENODEV: Fault.UNREACHABLE,
    errno.ESTALE: Fault.UNREACHABLE,
    errno.ENOTCONN: Fault.UNREACHABLE,
    errno.ETIMEDOUT: Fault.TIMEOUT,
}
_FAULTS_OF_READING: Mapping[int | None, Fault] = {
    **_FAULTS_OF_WRITING,
    errno.EACCES: Fault.UNREACHABLE,
    errno.EPERM: Fault.UNREACHABLE,
}
_FIXES = {
    Fault.FULL: "free some room there, or lower disk.capacity",
    Fault.READ_ONLY: "mount it for writing and let this user write to it, or set disk.path",
    Fault.TIMEOUT: "see why the file system does not answer",
    Fault.UNREACHABLE: "mount it and let this user in, or set disk.path to another directory",
    Fault.IO: "the kernel's log may say more",
}


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Where the store lies, and what it leaves to others."""

    path: Path
    free_floor_bytes: int
    """What stays free of the file system, give or take one record for each thread that writes."""
    leftover_seconds: float = 60.0
    """Age from which a temporary file is taken for one whose writer died."""


class DiskStore(RecordStore):
    """Records as files. After a fault FULL or READ_ONLY, of `open` too, reads go on."""

    tier = Tier.DISK
    listed = True

    def __init__(self, options: DiskOptions) -> None:
        self.options = options
        self._tree = Tree(options.path, options.leftover_seconds)
        self.direct = True
        """Whether files are opened with O_DIRECT first; `open` finds out if that works."""
        self._pages = files.PagePerThread()
        self._coder = Coder()

    def open(self) -> None:
        """Make the directory or recognise it, and try to write there. Raises TierFault."""
        with self._mapped(_FAULTS_OF_WRITING):
            self._tree.recognise()
            self.direct = files.probe(self.options.path)

    def scan(self) -> Iterator[Listing]:
        """Yield the folders that changed since the last whole scan; remove old leftovers."""
        with self._mapped(_FAULTS_OF_READING):
            yield from self._tree.scan()

    def find(self, space: Space, keys: Sequence[BlockKey]) -> int:
        """Return how many files are there before the first gap, with a system call for each."""
        path_of = self._tree.paths(space.digest)
        for count, key in enumerate(keys):
            if not os.access(path_of(key), os.F_OK):
                with self._mapped(_FAULTS_OF_READING), contextlib.suppress(FileNotFoundError):
                    Path(path_of(key)).lstat()  # Raises what `access` keeps to itself.
                return count
        return len(keys)

    def read(
        self,
        space: Space,
        key: BlockKey,
        into: memoryview,
        report: Callable[[Coded], object] = ignore,
    ) -> ReadOutcome:
        """Read a file straight into `into`, verify it, and set its time to now."""
        assert len(into) == space.payload_bytes, "the caller's memory is one slot"
        path = self._tree.record(space.digest, key)
        with self._mapped(_FAULTS_OF_READING):
            try:
                with files.opened(path, os.O_RDONLY, self.direct) as descriptor:
                    return self._read(descriptor, path, space, key, into, report)
            except FileNotFoundError:
                return ReadOutcome.MISSING

    def write(
        self,
        space: Space,
        key: BlockKey,
        parent: BlockKey,
        payload: memoryview,
        codec: Codec = Codec.RAW,
    ) -> Written:
        """Write a file under a temporary name, raw straight from `payload`, and rename it."""
        assert len(payload) == space.payload_bytes, "the caller's memory is one slot"
        target = self._tree.record(space.digest, key)
        stored = self._coder.encode(space, key, parent, payload, codec)
        page = self._header_page(pack(stored.header))
        parts = [page, stored.padded, _padding(len(stored.padded))]
        with self._mapped(_FAULTS_OF_WRITING):
            self._keep_floor(sum(map(len, parts)))
            for attempt in range(1, WRITE_ATTEMPTS + 1):
                try:
                    if attempt > 1:
                        self._tree.make_folders(target.parent)
                    record_bytes = files.write_new(target, parts, self.direct)
                    grown = self._tree.describe(space) if attempt > 1 else []
                    overhead = self._tree.growth(*grown, target.parent)
                    return Written(record_bytes, overhead, stored.coded)
                except (FileNotFoundError, FileExistsError):
                    # The second is what mkdir says of a folder that went as it looked at it.
                    if attempt == WRITE_ATTEMPTS:
                        raise
        raise AssertionError("the last attempt returns or raises")

    def drop(self, namespace: str, keys: Sequence[BlockKey]) -> None:
        """Remove files. Their folders stay."""
        with self._mapped(_FAULTS_OF_WRITING):
            for key in keys:
                self._tree.record(namespace, key).unlink(missing_ok=True)

    def wipe(self, namespace: str) -> None:
        """Remove a namespace's files, and the folders that this leaves empty."""
        with self._mapped(_FAULTS_OF_WRITING):
            self._tree.wipe(namespace)

    def close(self) -> None:
        """Do nothing: between calls nothing is held."""

    def _read(
        self,
        descriptor: int,
        path: Path,
        space: Space,
        key: BlockKey,
        into: memoryview,
        report: Callable[[Coded], object],
    ) -> ReadOutcome:
        page = self._pages.get()
        parts = [page, into, _padding(len(into))]
        done = files.move_all(os.preadv, descriptor, parts)
        try:
            header = unpack(page[:done])
            expect(header, space.raw, key, space.payload_bytes)
            if done < HEADER_PAGE_BYTES + header.stored_bytes:
                raise RecordError(f"a file of {done} bytes is cut short")
            outcome = self._coder.restore(header, into, report)
        except RecordError as error:
            log.debug("disk: %s is corrupt and goes: %s", path, error)
            files.unlink_same(path, descriptor)
            return ReadOutcome.CORRUPT
        with contextlib.suppress(OSError):  # A read-only file system still serves reads.
            os.utime(descriptor)
        return outcome

    def _header_page(self, header: bytes) -> memoryview:
        page = self._pages.get()
        page[:] = header.ljust(HEADER_PAGE_BYTES, b"\0")
        return page

    def _keep_floor(self, record_bytes: int) -> None:
        medium = os.statvfs(self.options.path)
        free = medium.f_bavail * medium.f_frsize
        if free - record_bytes < self.options.free_floor_bytes:
            raise TierFault(
                Fault.FULL,
                f"disk: {self.options.path}: {free} bytes of the file system are free, and "
                f"{self.options.free_floor_bytes} are to stay so: {_FIXES[Fault.FULL]}",
            )

    @contextlib.contextmanager
    def _mapped(self, faults: Mapping[int | None, Fault]) -> Iterator[None]:
        """Turn what the medium says into a TierFault."""
        try:
            yield
        except OSError as error:
            fault = faults.get(error.errno, Fault.IO)
            said = error.strerror or str(error)
            raise TierFault(fault, f"disk: {self.options.path}: {said}: {_FIXES[fault]}") from error


def _padding(size: int) -> memoryview:
    """Return what is missing from `size` to whole pages: nothing for a slot."""
    return memoryview(bytearray(align_up(size, PAGE_BYTES) - size))
