"""Where the files of the disk tier lie, and what is there.

    <path>/kvtier-store                    marks the directory as kvtier's, with its version
    <path>/<namespace>/manifest.json       the namespace's manifest, for people
    <path>/<namespace>/<hh>/<key>.kv       a record; <hh> is the key's first byte

Names are the hex digits of digests and keys, so no identity ever reaches a path. What has another
name is not kvtier's, and is left alone. Everything here blocks, and raises OSError.

The overhead is what `du` counts beside the records: folders, manifests and the marker. What a
namespace takes as a whole stands in the listing of first byte 0; what belongs to no namespace
stands in a listing without one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ..core import KEY_BYTES, BlockKey, Fault
from . import files
from .base import Held, Listing, Space, TierFault

log = logging.getLogger(__name__)

MARKER = "kvtier-store"
MARKER_TEXT = "kvtier disk store, format 1\n"
MANIFEST = "manifest.json"
NAMESPACE = re.compile(r"[0-9a-f]{64}")
FIRST = re.compile(r"[0-9a-f]{2}")
RECORD = re.compile(r"[0-9a-f]{64}\.kv")
LOST_AND_FOUND = "lost+found"
"""What a file system of its own has at its top."""

COARSE_NS = 2_000_000_000
"""For so long after a folder changed, another change may leave its time as it is."""

Stamp: TypeAlias = tuple[int, int]
"""What tells whether a listing may differ from the last: time of change, and overhead."""


class Place(NamedTuple):
    """What one listing is of."""

    namespace: str
    first: int
    folder: Path | None
    """Where the records lie, if there is such a folder."""
    changed_ns: int
    """When it last changed, by the medium's clock, or 0."""
    overhead_bytes: int

    @property
    def name(self) -> tuple[str, int]:
        """Return what tells it from others."""
        return self.namespace, self.first

    @property
    def stamp(self) -> Stamp:
        """Return its stamp."""
        return self.changed_ns, self.overhead_bytes


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a whole scan listed. A place with the stamp None is listed again in any case."""

    began_ns: int
    stamps: Mapping[tuple[str, int], Stamp | None]


class Tree:
    """The directory of one disk store. `recognise` comes first."""

    def __init__(self, path: Path, leftover_seconds: float) -> None:
        self.path = path
        self._leftover_ns = int(leftover_seconds * 1e9)
        self._device: int | None = None
        self._scanned = Scanned(0, {})
        self._foreign_told = False
        self._sizes: dict[Path, int] = {}
        """What was told of folders, manifests and the marker; only touched under `_lock`."""
        self._lock = threading.Lock()

    def recognise(self) -> None:
        """Make the directory, or see that it is kvtier's. Also raises TierFault."""
        self.path.mkdir(mode=0o700, parents=self._device is None, exist_ok=True)
        device = self.path.stat().st_dev
        if not self._marked():
            if self._device not in {None, device}:
                raise self._refused(f"is not the file system that was there, and has no {MARKER}")
            strange = self._strange()
            # Another server may have marked it in between.
            if strange is not None and not self._marked():
                raise self._refused(f"has no {MARKER}, but has {strange!r}: it is not kvtier's")
            self._write_text(self.path / MARKER, MARKER_TEXT)
        self._device = device
        self._overhead(self.path)

    def record(self, namespace: str, key: BlockKey) -> Path:
        """Return the file of a record."""
        return Path(self.paths(namespace)(key))

    def paths(self, namespace: str) -> Callable[[BlockKey], str]:
        """Return what gives the file of a record of the namespace."""
        base = self._folder(namespace)

        def path_of(key: BlockKey) -> str:
            assert len(key) == KEY_BYTES, "a key is a whole hash"
            name = key.hex()
            return f"{base}/{name[:2]}/{name}.kv"

        return path_of

    def make_folders(self, folder: Path) -> None:
        """Make the folder of records and the one above it.

        Raises TierFault if the directory is not kvtier's any more, and FileNotFoundError if a wipe
        came in between.
        """
        if not self._marked():  # Records would fill the file system below an unmounted one.
            raise TierFault(
                Fault.UNREACHABLE, f"disk: {self.path} has no {MARKER} any more: is it mounted?"
            )
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)

    def describe(self, space: Space) -> list[Path]:
        """Lay a manifest beside a namespace's records. Returns what may have grown by all this."""
        above = self._folder(space.digest)
        manifest = above / MANIFEST
        if not manifest.exists():
            self._write_text(manifest, space.manifest)
        return [self.path, above, manifest]

    def growth(self, *paths: Path) -> int:
        """Return how much more folders and manifests take than was told of them before.

        Negative where a file system makes folders smaller.
        """
        return sum(self._tell(path, files.allocated(path)) for path in paths)

    def scan(self) -> Iterator[Listing]:
        """Yield what changed since the last whole scan. Removes leftovers of writers that died."""
        began = self._now_ns()
        stamps: dict[tuple[str, int], Stamp | None] = {}
        for place in self._places(began):
            stamps[place.name] = place.stamp
            if self._unchanged(place):
                continue
            records: list[Held] = []
            if place.folder and not self._list(place.folder, began, records):
                stamps[place.name] = None
            yield Listing(*place.name, records, place.overhead_bytes)
        for gone in self._scanned.stamps.keys() - stamps.keys():
            self._tell_gone(*gone)
            yield Listing(*gone, [], 0)
        self._scanned = Scanned(began, stamps)

    def wipe(self, namespace: str) -> None:
        """Remove the records of a namespace, and each folder that this leaves empty."""
        above = self._folder(namespace)
        for folder in _folders(above, FIRST):
            for name in _listed(folder):
                path = folder / name
                if _is_record(folder.name, name) and path.is_file():
                    path.unlink(missing_ok=True)
            _remove_empty(folder)
        rest = _listed(above)
        if rest == [MANIFEST]:
            self._retire(above)
        elif not rest:
            _remove_empty(above)

    def _folder(self, namespace: str) -> Path:
        assert NAMESPACE.fullmatch(namespace), "a namespace is the hex digits of its digest"
        return self.path / namespace

    def _marked(self) -> bool:
        try:
            text = (self.path / MARKER).read_text(errors="replace")
        except FileNotFoundError:
            return False
        if text != MARKER_TEXT:
            raise self._refused(
                f"is marked {text[:60].strip()!r}, and this build works with "
                f"{MARKER_TEXT.strip()!r}"
            )
        return True

    def _strange(self) -> str | None:
        """Return something in the directory that kvtier did not put there before its marker."""
        for name in sorted(_listed(self.path)):
            if name not in {LOST_AND_FOUND, MARKER} and not files.TEMPORARY.fullmatch(name):
                return name
        return None

    def _refused(self, why: str) -> TierFault:
        return TierFault(
            Fault.UNREACHABLE,
            f"disk: {self.path} {why}: set disk.path to an empty directory or to kvtier's own",
        )

    def _write_text(self, target: Path, text: str) -> None:
        """Write a small file that has to be whole after a crash of the machine."""
        path = files.temporary(target.parent, target.stem)
        try:
            with files.opened(path, files.NEW, direct=False) as descriptor:
                files.move_all(os.pwritev, descriptor, [memoryview(text.encode())])
                os.fsync(descriptor)
            path.rename(target)
        finally:
            path.unlink(missing_ok=True)

    def _tell(self, path: Path, size: int) -> int:
        with self._lock:
            before = self._sizes.get(path, 0)
            self._sizes[path] = size
        return size - before

    def _tell_gone(self, namespace: str, first: int) -> None:
        above = self.path / namespace
        gone = [above / f"{first:02x}"] + ([] if first else [above, above / MANIFEST])
        for path in gone:
            self._tell(path, 0)

    def _overhead(self, path: Path) -> int:
        """Return what a folder or small file takes, 0 if it went."""
        with contextlib.suppress(FileNotFoundError):
            size = files.allocated(path)
            self._tell(path, size)
            return size
        return 0

    def _now_ns(self) -> int:
        try:
            return files.medium_now_ns(self.path)
        except OSError:  # Read-only or full: this host's clock has to do.
            return time.time_ns()

    def _places(self, began: int) -> Iterator[Place]:
        marker = self._overhead(self.path / MARKER)
        yield Place("", 0, None, 0, self._overhead(self.path) + marker)
        self._sweep(self.path, NAMESPACE, began)
        for above in _folders(self.path, NAMESPACE):
            self._sweep(above, FIRST, began)
            whole = self._overhead(above) + self._overhead(above / MANIFEST)
            folders = {int(folder.name, 16): folder for folder in _folders(above, FIRST)}
            for first in sorted({0, *folders}):
                yield self._place(above.name, first, folders.get(first), 0 if first else whole)

    def _place(self, namespace: str, first: int, folder: Path | None, whole: int) -> Place:
        if folder is not None:
            with contextlib.suppress(FileNotFoundError):
                status = folder.lstat()
                size = status.st_blocks * 512
                self._tell(folder, size)
                return Place(namespace, first, folder, status.st_mtime_ns, whole + size)
        return Place(namespace, first, None, 0, whole)

    def _unchanged(self, place: Place) -> bool:
        before = self._scanned
        settled = place.changed_ns < before.began_ns - COARSE_NS
        return settled and before.stamps.get(place.name) == place.stamp

    def _list(self, folder: Path, began: int, records: list[Held]) -> bool:
        """Add the folder's records. Returns False if a file may become a leftover yet."""
        settled = True
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if not _is_record(folder.name, name):
                    settled &= self._aside(entry, began)
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    key = bytes.fromhex(name[: 2 * KEY_BYTES])
                    records.append(Held(key, status.st_blocks * 512, status.st_mtime))
        return settled

    def _sweep(self, folder: Path, ours: re.Pattern[str], began: int) -> None:
        """Look after what lies beside the folders that have a name of ours."""
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                known = entry.name in {MARKER, MANIFEST, LOST_AND_FOUND}
                if not known and not ours.fullmatch(entry.name):
                    self._aside(entry, began)

    def _aside(self, entry: os.DirEntry[str], began: int) -> bool:
        """Remove an old leftover. Returns False for one that is young; foreign files stay."""
        if not files.TEMPORARY.fullmatch(entry.name):
            if not self._foreign_told:
                log.warning("disk: %s is not kvtier's: left alone, like others", entry.path)
            self._foreign_told = True
            return True
        with contextlib.suppress(OSError):
            if began - entry.stat(follow_symlinks=False).st_mtime_ns < self._leftover_ns:
                return False
            Path(entry.path).unlink()
        return True

    def _retire(self, above: Path) -> None:
        """Remove a namespace's folder that has nothing but its manifest, if it stays like that."""
        aside = files.temporary(self.path, "manifest")
        with contextlib.suppress(FileNotFoundError):
            (above / MANIFEST).rename(aside)
            if not _remove_empty(above):
                aside.rename(above / MANIFEST)
            aside.unlink(missing_ok=True)


def _is_record(first: str, name: str) -> bool:
    return name.startswith(first) and RECORD.fullmatch(name) is not None


def _listed(folder: Path) -> list[str]:
    """Return the names in a folder: none if it went."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return [entry.name for entry in entries]
    return []


def _folders(above: Path, names: re.Pattern[str]) -> list[Path]:
    """Return the folders in a folder that have such names."""
    with contextlib.suppress(FileNotFoundError), os.scandir(above) as entries:
        ours = (entry for entry in entries if names.fullmatch(entry.name))
        return [above / entry.name for entry in ours if entry.is_dir(follow_symlinks=False)]
    return []


def _remove_empty(folder: Path) -> bool:
    """Remove a folder if it is empty. Returns whether it is gone."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        return False
    return True
