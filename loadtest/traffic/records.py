"""What came of each request, and the file that keeps it: one JSON object a line.

A line is written when its request has ended, so that a run that was killed keeps what it had; half
a line at the end is passed over by readers.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from .requests import TrafficError


class Failure(Enum):
    """Why a request brought no answer, or none that counts."""

    REFUSED = "refused"
    """No connection came about."""
    STATUS = "status"
    """The server answered with another status than 200, or with an error in the stream."""
    LOST = "lost"
    """The connection ended before the answer did."""
    TIMEOUT = "timeout"
    """One of the runner's limits was reached."""
    MALFORMED = "malformed"
    """Something else than completions came."""
    USAGE = "usage"
    """The answer's own counts of tokens contradict the request, or are missing."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of one request. Times are in seconds; `sent` and `ended` count from the start."""

    name: str
    sent: float
    ended: float
    late: float = 0.0
    """How long after its time it was sent (open loop)."""
    ttft: float | None = None
    """From sending to the first token; None if none came."""
    gaps: list[float] = []
    """Between one token and the next; tokens that came together have one gap."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that the server says it did not compute; None if it does not say."""
    output_tokens: int = 0
    digest: str = ""
    """Of the whole text of the answer."""
    failure: Failure | None = None
    error: str | None = None
    """What happened, in a sentence."""

    @property
    def seconds(self) -> float:
        """From sending to the end."""
        return self.ended - self.sent


class RecordFile:
    """Appends records to a file, each at once. A context manager. Blocks for a line's writing."""

    def __init__(self, path: Path) -> None:
        """Make the file anew. Raises TrafficError."""
        self.path = path
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise TrafficError(f"The records {path} can't be written: {error}.") from None

    def append(self, record: Record) -> None:
        """Write a line."""
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, without half a line at its end. Raises TrafficError."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise TrafficError(f"The records {path} can't be read: {error}.") from None
    found = []
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith(b"\n"):
            break
        try:
            found.append(msgspec.json.decode(line, type=Record))
        except msgspec.DecodeError as error:
            raise TrafficError(f"{path}, line {number}: no record: {error}.") from None
    return found
