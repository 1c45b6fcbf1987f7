"""How fast a tier is, as measured while it works: what a load of so many bytes would take.

A read's time is taken as latency + bytes ÷ bandwidth of the whole tier; both are moving averages.
Bandwidth counts only while something is being read: bytes over the time in which at least one read
was under way. Where nothing was read for a while nothing is known, so that a tier that was once
slow is tried again. Time is passed in.
"""

from __future__ import annotations

from ..averages import averaged

WEIGHT = 0.2
"""Of the latest measure in the average."""
BUSY_SECONDS = 0.02
"""Bandwidth is measured over periods of at least this much work."""
STALE_SECONDS = 30.0
"""After so long without a measure, nothing is known."""


class Speed:
    """Measured latency (seconds) and bandwidth (bytes a second) of a tier's reads."""

    def __init__(self) -> None:
        self.latency: float | None = None
        """Of a question that moves no payload."""
        self.bandwidth: float | None = None
        self._measured = float("-inf")
        self._under_way = 0
        self._since = 0.0
        self._busy = 0.0
        self._bytes = 0

    def asked(self, seconds: float) -> None:
        """A question without payload took so long."""
        self.latency = averaged(self.latency, seconds, WEIGHT)

    def began(self, now: float) -> None:
        """A read began."""
        if not self._under_way:
            self._since = now
        self._under_way += 1

    def ended(self, now: float, moved: int) -> None:
        """A read ended and moved so many bytes; 0 if it failed."""
        self._under_way -= 1
        self._bytes += moved
        self._busy += now - self._since
        self._since = now
        if self._busy >= BUSY_SECONDS or (not self._under_way and self._busy > 0.0):
            if self._bytes:
                self.bandwidth = averaged(self.bandwidth, self._bytes / self._busy, WEIGHT)
                self._measured = now
            self._busy, self._bytes = 0.0, 0

    def seconds(self, size: int, queued: int, now: float) -> float | None:
        """Return what reading `size` bytes behind `queued` others takes; None if unknown."""
        if self.bandwidth is None or now - self._measured > STALE_SECONDS:
            return None
        return (self.latency or 0.0) + (size + queued) / self.bandwidth
