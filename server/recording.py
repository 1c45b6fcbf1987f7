"""Recording of lookups, for `kvtier replay`: which blocks each request began with, and when.

A line is one lookup; `docs/formats.md` has the format. A prefix that the file knows is named by its
last block, so that a chat takes room for what each turn adds. There are hashes, lengths and times,
and neither tokens nor salts nor tenants. Lines are made on the event loop and written by one
thread, each second; what that can't keep up with is not recorded, and counted.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from .core import BlockKey
from .metrics import Metrics
from .tiers.pool import Job, Pool, Urgency

log = logging.getLogger("kvtier.recording")

VERSION = 1
NAMESPACE_DIGITS = 16
"""Of a namespace's digest, in a file's name and header."""
HASH_BYTES = 8
"""Of a block's key: enough to tell blocks apart, and no more."""
FILES = 8
"""Into which the capacity is cut: the oldest goes as a whole."""
BLOCKS_A_FILE = 250_000
"""Known blocks after which a file ends, since each takes about 130 bytes of memory."""
UNWRITTEN_BYTES_AT_MOST = 8 << 20
FLUSH_SECONDS = 1.0
RETRY_SECONDS = 60.0
"""After a failure, so long nothing is recorded."""
CLOSE_SECONDS = 1.0


class Piece(NamedTuple):
    """Bytes to be added to a file."""

    name: str
    data: bytes
    last: bool
    """Nothing follows: the file can be compressed."""


@dataclass(slots=True)
class _Book:
    """What one file has so far. `known`: the number of each block, in order of appearance."""

    name: str
    lines: list[bytes]
    """Not handed to the thread yet."""
    known: dict[bytes, int] = field(default_factory=dict)
    size: int = 0


class Recorder:
    """Records into files of `folder`, of which about `capacity` bytes are kept.

    `post` hands a call to the event loop from any thread; `clock` gives Unix time.
    """

    def __init__(
        self,
        folder: Path,
        capacity: int,
        metrics: Metrics,
        post: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._files = Files(folder, capacity)
        self._file_bytes = max(capacity // FILES, 1)
        self._metrics = metrics
        self._clock = clock
        self._pool = Pool("recording", 2, post)  # Of two threads, one is kept for reads.
        self._books: dict[str, _Book] = {}
        self._ended: list[Piece] = []
        self._writing = False
        self._unwritten = 0
        self._not_before = float("-inf")
        self._begun = 0
        self._mark = secrets.token_hex(3)
        """Tells this server's files from those of others."""

    def record(
        self,
        namespace: str,
        block: tuple[int, int],
        keys: Sequence[BlockKey],
        device: int,
    ) -> None:
        """Record that a request began with `keys`, of which the device held the first few.

        `block` is a block's tokens and bytes.
        """
        if self._unwritten > UNWRITTEN_BYTES_AT_MOST or self._clock() < self._not_before:
            self._metrics.recorded_lookups.labels("dropped").inc()
            return
        book = self._books.get(namespace)
        if book is None:
            book = self._books[namespace] = self._begin(namespace, *block)
        line = self._line(book.known, [key[:HASH_BYTES] for key in keys], device)
        book.lines.append(line)
        book.size += len(line)
        self._unwritten += len(line)
        self._metrics.recorded_lookups.labels("recorded").inc()
        if book.size > self._file_bytes or len(book.known) > BLOCKS_A_FILE:
            self._end(namespace)

    def flush(self) -> None:
        """Hand what was recorded to the thread, unless it still has work."""
        pieces, self._ended = self._ended, []
        for book in self._books.values():
            if book.lines:
                pieces.append(Piece(book.name, b"".join(book.lines), last=False))
                book.lines = []
        if self._writing or not pieces:
            self._ended = pieces
            return
        self._writing = True
        size = sum(len(piece.data) for piece in pieces)
        done = partial(self._written, size)
        self._pool.submit(Urgency.UPKEEP, partial(self._files.write, pieces), done)

    async def run(self) -> None:
        """Write each second, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            self.flush()

    async def close(self) -> None:
        """Write the rest, but wait no longer than `CLOSE_SECONDS` for the medium."""
        for namespace in list(self._books):
            self._end(namespace)
        end = time.monotonic() + CLOSE_SECONDS
        while (self._writing or self._ended) and time.monotonic() < end:
            self.flush()
            await asyncio.sleep(0.01)
        self._pool.close()

    def _begin(self, namespace: str, block_tokens: int, block_bytes: int) -> _Book:
        short = namespace[:NAMESPACE_DIGITS]
        head = {
            "kvtier_lookups": VERSION,
            "namespace": short,
            "block_tokens": block_tokens,
            "block_bytes": block_bytes,
        }
        self._begun += 1
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(self._clock()))
        name = f"lookups-{stamp}-{self._begun:04d}-{self._mark}-{short}.jsonl"
        return _Book(name, [msgspec.json.encode(head) + b"\n"])

    def _line(self, known: dict[bytes, int], hashes: Sequence[bytes], device: int) -> bytes:
        """Return a lookup's line. What a file knows of a chain is always its beginning."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in known:
                low = middle + 1
            else:
                high = middle
        fields: dict[str, int | str] = {"t": int(self._clock() * 1000), "device": device}
        if low:
            fields["after"] = known[hashes[low - 1]]
        if low < len(hashes):
            fields["new"] = b"".join(hashes[low:]).hex()
            for each in hashes[low:]:
                known[each] = len(known)
        return msgspec.json.encode(fields) + b"\n"

    def _end(self, namespace: str) -> None:
        book = self._books.pop(namespace)
        self._ended.append(Piece(book.name, b"".join(book.lines), last=True))

    def _written(self, size: int, job: Job[None]) -> None:
        self._writing = False
        self._unwritten = max(self._unwritten - size, 0)
        if job.error is not None:
            # What follows would continue lines that are not there: begin anew.
            self._books, self._ended, self._unwritten = {}, [], 0
            self._not_before = self._clock() + RETRY_SECONDS
            log.warning("lookups can't be recorded in %s: %s", self._files.folder, job.error)


class Files:
    """The files of a folder. Blocks; used by one thread at a time."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder = folder
        self._capacity = capacity

    def write(self, pieces: Sequence[Piece]) -> None:
        """Add pieces to their files, compress those that end, and keep to the capacity.

        Raises OSError.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for piece in pieces:
            file = self.folder / piece.name
            with file.open("ab") as out:
                out.write(piece.data)
            if piece.last:
                _compress(file)
        self._prune()

    def _prune(self) -> None:
        """Remove the oldest files beyond the capacity; names are in order of time."""
        files = sorted(self.folder.glob("*lookups-*.jsonl*"))
        sizes = [file.stat().st_size for file in files]
        excess = sum(sizes) - self._capacity
        for file, size in zip(files, sizes, strict=True):
            if excess <= 0:
                return
            file.unlink()
            excess -= size


def _compress(file: Path) -> None:
    done, part = file.with_name(f"{file.name}.gz"), file.with_name(f".{file.name}.gz")
    with file.open("rb") as plain, gzip.open(part, "wb", compresslevel=6) as packed:
        shutil.copyfileobj(plain, packed)
    part.replace(done)
    file.unlink()
