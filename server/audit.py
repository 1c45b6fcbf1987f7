"""The audit: who changed which setting when, and what followed. A file of JSON lines.

Entries survive restarts. What followed a change is known some time later, and is an entry of its
own that names the change. The file is written by one thread, a line at a time.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from .sections import Value

log = logging.getLogger("kvtier.audit")

KEPT = 1000
"""Entries that can be read over HTTP; the file has more."""
FILE_BYTES_AT_MOST = 8 << 20
"""A longer file is put aside as `audit.jsonl.1`, of which there is one."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line. `time` is Unix time; values are those of a settings file."""

    id: int
    time: float
    who: str
    what: str
    """`change`, `rollback`, `reload`, `reset`, or `effect`."""
    version: int
    """Of the settings, after it."""
    changes: dict[str, tuple[Value, Value]] = {}
    """By key: from, to."""
    of: int | None = None
    """The entry whose effect this tells, or which is rolled back."""
    note: str = ""
    evicted_blocks: dict[str, int] = {}
    """By tier, since the change."""
    hit_ratio_before: float | None = None
    hit_ratio_after: float | None = None
    """Prompt tokens that came from kvtier ÷ those that the device had not got; None if nothing was
    asked for."""


class Audit:
    """The entries, the newest last, of which a file in `folder` has more. `clock`: Unix time."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._file = folder / "audit.jsonl"
        self._clock = clock
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._last = 0
        self._said = False

    def load(self) -> None:
        """Read what earlier servers wrote. Blocks. A line that is damaged is passed over."""
        if not self._file.exists():
            return
        decode = msgspec.json.Decoder(Entry).decode
        for line in self._file.read_bytes().splitlines():
            try:
                self._entries.append(decode(line))
            except msgspec.DecodeError:
                log.warning("a damaged line of %s is passed over", self._file)
        self._last = max((entry.id for entry in self._entries), default=0)

    async def add(
        self,
        who: str,
        what: str,
        version: int,
        changes: Mapping[str, tuple[Value, Value]] | None = None,
        **more: object,
    ) -> Entry:
        """Add an entry and write it down; where that fails, a log line says so once."""
        self._last += 1
        entry = msgspec.convert(
            {
                "id": self._last,
                "time": self._clock(),
                "who": who,
                "what": what,
                "version": version,
                "changes": dict(changes or {}),
                **more,
            },
            Entry,
        )
        self._entries.append(entry)
        try:
            await asyncio.to_thread(self._write, msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            if not self._said:
                log.warning("the audit can't be written to %s: %s", self._file, error)
            self._said = True
        return entry

    def page(self, before: int | None, limit: int) -> list[Entry]:
        """Return up to `limit` entries that came before a number, the newest first."""
        found = [entry for entry in self._entries if before is None or entry.id < before]
        return found[::-1][:limit]

    def _write(self, line: bytes) -> None:
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._file.exists() and self._file.stat().st_size > FILE_BYTES_AT_MOST:
            self._file.replace(self._file.with_name(f"{self._file.name}.1"))
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "ab") as out:
            out.write(line)
