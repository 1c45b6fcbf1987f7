"""What is measured of one lower tier while it works: speed, what coding takes, and the metrics.

The times of jobs are taken without coding, which is the processor's and not the medium's. Runs on
the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from .averages import averaged
from .coding import Coding
from .core import ReadOutcome, Tier
from .lower_options import LowerOptions
from .metrics import Metrics
from .tiers.base import Written
from .tiers.compression import Coded
from .tiers.pool import Job
from .tiers.speed import WEIGHT, Speed

T = TypeVar("T")

OPERATIONS = ("find", "read", "write")


class Measures:
    """The measures of one tier."""

    def __init__(
        self, tier: Tier, options: LowerOptions, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self.speed = Speed()
        decoders = min(options.threads, len(os.sched_getaffinity(0)))
        self.coding = Coding(options.codec, decoders)
        self.queued_read_bytes = 0
        self._write_seconds: float | None = None
        self._clock = clock
        # Looked up once: a label costs as much as all that is measured of a block.
        self._seconds = {op: metrics.tier_seconds.labels(tier, op) for op in OPERATIONS}
        self._codec_seconds = {
            op: metrics.codec_seconds.labels(tier, op) for op in ("encode", "decode")
        }
        self._read_bytes = metrics.read_bytes.labels(tier)
        self._written_bytes = metrics.written_bytes.labels(tier)
        self._raw_bytes = metrics.codec_raw_bytes.labels(tier)
        self._stored_bytes = metrics.codec_stored_bytes.labels(tier)

    def found(self, job: Job[int]) -> None:
        """A question was answered."""
        self._observe("find", job)
        self.speed.asked(job.seconds)

    def read_begins(self, size: int) -> None:
        """A read of `size` bytes is queued."""
        self.speed.began(self._clock())
        self.queued_read_bytes += size

    def read_ends(self, size: int, moved: int) -> None:
        """It is over, or was taken back."""
        self.queued_read_bytes -= size
        self.speed.ended(self._clock(), moved)
        self._read_bytes.inc(moved)

    def read(self, job: Job[ReadOutcome], size: int, decoded: Sequence[Coded]) -> None:
        """A read came back; `decoded` is what decompressing took, if there was any."""
        if job.result is ReadOutcome.READ:
            coded = decoded[0] if decoded else Coded(size, size)
            job.seconds -= coded.seconds
            self.coding.read(*coded)
            self._codec_seconds["decode"].inc(coded.seconds)
        self._observe("read", job)

    def wrote(self, job: Job[Written]) -> None:
        """A write came back."""
        if (written := job.result) is not None:
            coded = written.coded
            job.seconds -= coded.seconds
            self._write_seconds = averaged(self._write_seconds, job.seconds, WEIGHT)
            if coded.raw_bytes:
                self.coding.encoded(coded.raw_bytes, coded.stored_bytes)
            self._raw_bytes.inc(coded.raw_bytes)
            self._stored_bytes.inc(coded.stored_bytes)
            self._codec_seconds["encode"].inc(coded.seconds)
            self._written_bytes.inc(written.record_bytes)
        self._observe("write", job)

    def expected(self, size: int) -> float | None:
        """Return the seconds that reading `size` bytes would take now; None if unknown."""
        return self.speed.seconds(size, self.queued_read_bytes, self._clock())

    def price(self, size: int) -> tuple[float | None, float | None]:
        """Return the seconds of reading `size` bytes and of one write; None for what is unknown.

        As they were measured last, however long ago.
        """
        speed = self.speed
        load = None if speed.bandwidth is None else (speed.latency or 0.0) + size / speed.bandwidth
        return load, self._write_seconds

    def _observe(self, op: str, job: Job[T]) -> None:
        self._seconds[op].observe(job.seconds)
