"""Whole files between a medium and the caller's memory, past the page cache where that works.

Blocks come from slots and go to slots, so the page cache would only keep them twice. O_DIRECT
wants memory, offsets and sizes in whole pages; what does not keep to that, or lies on a file
system that knows no O_DIRECT, is moved through the page cache and dropped from it afterwards.
All of this blocks and raises OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from ..core import PAGE_BYTES

Move: TypeAlias = Callable[[int, Sequence[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
"""Flags that make a file."""

TEMPORARY = re.compile(r"\.[0-9a-z-]+\.[0-9a-f]{32}\.tmp")
"""Names of files that are being written, or were when their writer died."""


def temporary(folder: Path, name: str) -> Path:
    """Return a new name in `folder` that no other process or server will ever take."""
    return folder / f".{name}.{uuid.uuid4().hex}.tmp"


def allocated(path: Path) -> int:
    """Return the bytes that a file or folder takes of its medium, as `du` counts them."""
    return path.lstat().st_blocks * 512


@contextlib.contextmanager
def opened(path: Path, flags: int, direct: bool) -> Iterator[int]:
    """Open a file, with O_DIRECT if `direct` and if the file system knows it."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
        # Some file systems have created the file by the time that they refuse.
        descriptor = os.open(path, flags & ~os.O_EXCL, 0o600)
    try:
        yield descriptor
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    os.close(descriptor)  # Here a network file system may say that it had no room.


def move_all(move: Move, descriptor: int, parts: Sequence[memoryview]) -> int:
    """Read or write `parts` one after the other from the file's start on.

    Returns the bytes moved: fewer than asked for only where a file that is read ends early.
    """
    rest = [part for part in parts if len(part)]
    done = 0
    while rest:
        try:
            count = move(descriptor, rest, done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _leave_direct(descriptor):
                raise
            continue
        if not count:
            break
        done += count
        rest = _after(rest, count)
    _forget(descriptor)
    return done


def write_new(target: Path, parts: Sequence[memoryview], direct: bool) -> int:
    """Write a file under a temporary name and give it its own, replacing what has it.

    Returns the bytes that it takes of its medium. Nothing waits for the medium to have it all
    (fsync): after a crash of the machine the file may be torn or gone, which its checksum tells,
    and a cache may lose what was written in the last seconds.
    """
    path = temporary(target.parent, target.stem)
    try:
        with opened(path, NEW, direct) as descriptor:
            done = move_all(os.pwritev, descriptor, parts)
            assert done == sum(map(len, parts)), "a write that ends early has an error"
            size = os.fstat(descriptor).st_blocks * 512
        path.rename(target)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return size


def unlink_same(path: Path, descriptor: int) -> None:
    """Remove a file unless another one has its name by now. Errors are ignored."""
    with contextlib.suppress(OSError):
        if os.path.samestat(path.lstat(), os.fstat(descriptor)):
            path.unlink()


def probe(folder: Path) -> bool:
    """Write a page to a file in `folder` and read it back. Returns whether O_DIRECT worked."""
    try:
        direct = _round_trip(folder, direct=True)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        direct = False
    if not direct and not _round_trip(folder, direct=False):
        raise OSError(errno.EIO, "a page that was just written reads differently")
    return direct


def medium_now_ns(folder: Path) -> int:
    """Return the time as the file system of `folder` stamps it. Raises OSError."""
    path = temporary(folder, "clock")
    with opened(path, NEW, direct=False) as descriptor:
        path.unlink()
        return os.fstat(descriptor).st_mtime_ns


class PagePerThread:
    """One page-aligned page for each thread that asks."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self) -> memoryview:
        """Return the thread's own page, with whatever it was left with."""
        page: memoryview | None = getattr(self._local, "page", None)
        if page is None:
            page = self._local.page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        return page


def _round_trip(folder: Path, direct: bool) -> bool:
    path = temporary(folder, "probe")
    there, back = (memoryview(mmap.mmap(-1, PAGE_BYTES)) for _ in range(2))
    there[:] = os.urandom(PAGE_BYTES)
    try:
        with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct) as descriptor:
            move_all(os.pwritev, descriptor, [there])
            move_all(os.preadv, descriptor, [back])
            kept = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT) is direct
    finally:
        path.unlink(missing_ok=True)
    return kept and there == back


def _leave_direct(descriptor: int) -> bool:
    """Go on through the page cache. Returns False if that is what was done already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


def _after(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of `parts` after their first `count` bytes."""
    rest = []
    for part in parts:
        if count < len(part):
            rest.append(part[count:])
        count = max(0, count - len(part))
    return rest


def _forget(descriptor: int) -> None:
    """Let the page cache drop the file, if it went through there."""
    if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
