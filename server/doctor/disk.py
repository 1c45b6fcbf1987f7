"""What the directory of the disk tier can do: room, O_DIRECT, and its speed in a short test."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..sections import DiskSettings
from ..sizes import format_size, rough_size
from ..tiers import files
from ..tiers.tree import LOST_AND_FOUND, MARKER
from .findings import Finding, problem, warning, well
from .host import existing

CHECK = "disk tier"
SLOW_BYTES_PER_SECOND = 100e6
"""Below it most prompts are computed sooner than they are read."""
ELSEWHERE = "Let this user write there, or set disk.path to another directory."


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a test of speed may take."""

    seconds: float = 1.0
    """Of writing, and as long again of reading, give or take one piece."""
    size: int = 256 << 20
    piece: int = 4 << 20


class Speed(NamedTuple):
    """Bytes a second."""

    written: float
    read: float


def disk_tier(disk: DiskSettings, used: int | None, bounds: Bounds = Bounds()) -> list[Finding]:
    """Return how the directory does; `used` is what a running server has in it. Blocks.

    Writes one file for the test, and removes it.
    """
    if disk.path is None:
        return [well(CHECK, "The settings have none (disk.path).")]
    try:
        return _examined(disk, disk.path, used, bounds)
    except OSError as error:
        return [problem(CHECK, f"{disk.path} can't be used: {error.strerror}.", ELSEWHERE)]


def _examined(disk: DiskSettings, path: Path, used: int | None, bounds: Bounds) -> list[Finding]:
    folder = existing(path)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return [problem(CHECK, f"This user can't write to {folder}.", ELSEWHERE)]
    if (strange := _strange(path)) is not None:
        said = f"{path} has {strange!r} and no {MARKER}: it is not kvtier's."
        return [problem(CHECK, said, "Set disk.path to an empty directory.")]
    direct = files.probe(folder)
    room = _free(folder) - disk.keep_free
    found = [_direct(folder, direct), _room(disk, folder, used)]
    if room > bounds.piece:
        found.append(_speed(folder, measure(folder, direct, bounds, room)))
    return found


def measure(
    folder: Path,
    direct: bool,
    bounds: Bounds,
    room: int,
    clock: Callable[[], float] = time.monotonic,
) -> Speed:
    """Write a file of random bytes and read it back, as one thread of the tier does. OSError."""
    piece = memoryview(mmap.mmap(-1, bounds.piece))
    piece[:] = os.urandom(bounds.piece)
    path = files.temporary(folder, "doctor")
    try:
        with files.opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct) as descriptor:

            def write(done: int) -> int:
                count = os.pwritev(descriptor, [piece], done)
                if not direct:
                    os.fdatasync(descriptor)
                return count

            size, written = _timed(write, min(bounds.size, room), bounds, clock)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            _, read = _timed(lambda done: os.preadv(descriptor, [piece], done), size, bounds, clock)
    finally:
        path.unlink(missing_ok=True)
    return Speed(written, read)


def _timed(
    step: Callable[[int], int], size: int, bounds: Bounds, clock: Callable[[], float]
) -> tuple[int, float]:
    """Take whole pieces of `size` bytes while there is time; return bytes and bytes a second."""
    began, done, seconds = clock(), 0, 0.0
    while done + bounds.piece <= size and seconds < bounds.seconds:
        count = step(done)
        seconds = clock() - began
        done += count
        if count < bounds.piece:
            break
    return done, done / seconds if seconds else 0.0


def _direct(folder: Path, direct: bool) -> Finding:
    if direct:
        return well(CHECK, f"{folder} can be written, past the page cache (O_DIRECT).")
    return warning(
        CHECK,
        f"{folder} can be written, but not past the page cache (O_DIRECT): blocks lie in memory "
        f"twice for a moment, and reads cost more CPU time.",
        "Set disk.path to a local ext4 or XFS file system if there is one.",
    )


def _room(disk: DiskSettings, folder: Path, used: int | None) -> Finding:
    free = _free(folder)
    has, floor = f"{rough_size(free)} are free there", format_size(disk.keep_free)
    if free <= disk.keep_free:
        said = f"{has}, no more than disk.keep_free ({floor}): nothing is kept."
        return problem(CHECK, said, "Free some room, or lower disk.keep_free.")
    reach = free - disk.keep_free + (used or 0)
    if reach < disk.capacity and (used is not None or not (folder / MARKER).exists()):
        said = f"{has}: the tier gets {rough_size(reach)} of disk.capacity"
        said = f"{said} ({format_size(disk.capacity)})."
        return warning(CHECK, said, "Free some room, or lower disk.capacity.")
    return well(CHECK, f"{has}.")


def _speed(folder: Path, speed: Speed) -> Finding:
    written, read = rough_size(speed.written), rough_size(speed.read)
    said = f"One thread wrote {written}/s to {folder} and read {read}/s"
    if speed.read < SLOW_BYTES_PER_SECOND:
        return warning(
            CHECK,
            f"{said}: most prompts are computed sooner than they are read.",
            "Set disk.path to a faster disk; disk.codec: auto helps a little.",
        )
    return well(CHECK, f"{said}.")


def _strange(path: Path) -> str | None:
    """Return the name of something that makes the server refuse the directory."""
    if not path.exists() or (path / MARKER).exists():
        return None
    names = (entry.name for entry in path.iterdir())
    return next(
        (name for name in names if name != LOST_AND_FOUND and not files.TEMPORARY.fullmatch(name)),
        None,
    )


def _free(folder: Path) -> int:
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize
