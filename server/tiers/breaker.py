"""A circuit breaker: a tier that fails or is slow is left alone, and probed until it is back.

Closed, calls go through. After some failures in a row it opens, and nothing is asked of the tier.
When a pause is over, one probe goes through (half open); the pause doubles with each one that
fails. A call that took too long counts as a failure, whatever it returned. Time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One probe is under way."""


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When it opens, and how long it stays so. All times in seconds."""

    failures: int = 3
    """Failures in a row that open it."""
    slow: float = 1.0
    """A call that takes longer is a failure."""
    pause_first: float = 0.5
    pause_most: float = 30.0


class Breaker:
    """One breaker. `state` is what it lets through now."""

    def __init__(self, options: BreakerOptions) -> None:
        self.options = options
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._pause = options.pause_first
        self._until = 0.0

    @property
    def closed(self) -> bool:
        """Whether calls go through."""
        return self.state is BreakerState.CLOSED

    def worked(self, seconds: float, now: float) -> None:
        """A call went well and took so long."""
        if seconds > self.options.slow:
            self.failed(now)
        elif self.state is not BreakerState.OPEN:
            self.state = BreakerState.CLOSED
            self._failures = 0
            self._pause = self.options.pause_first

    def failed(self, now: float, at_once: bool = False) -> None:
        """A call failed; `at_once` opens the breaker without waiting for more."""
        self._failures += 1
        if self.state is BreakerState.OPEN:
            return
        probed = self.state is BreakerState.HALF_OPEN
        if probed or at_once or self._failures >= self.options.failures:
            if probed:
                self._pause = min(self._pause * 2, self.options.pause_most)
            self.state = BreakerState.OPEN
            self._until = now + self._pause

    def probe_due(self, now: float) -> bool:
        """Return whether to probe now; the breaker is half open from then on."""
        if self.state is BreakerState.OPEN and now >= self._until:
            self.state = BreakerState.HALF_OPEN
            return True
        return False
