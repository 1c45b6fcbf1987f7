"""Whether a lower tier is asked now: its breaker, its faults, and what is logged of them.

Two things can be wrong. The medium fails or is slow: then nothing is asked of it until a probe went
well. Or it takes no writes, because it is full or read-only: then what it holds is still read, and
a write is tried again after a pause. Runs on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from .core import Fault, Tier
from .errors import KVTierError
from .metrics import Metrics
from .tiers.base import TierFault
from .tiers.breaker import Breaker, BreakerOptions
from .tiers.pool import Job, Urgency

T = TypeVar("T")

log = logging.getLogger("kvtier.health")

_NO_WRITES = (Fault.FULL, Fault.READ_ONLY)
"""Faults after which reads go on."""
NO_WRITES_SECONDS = 1.0
"""How long a medium that took no write is not asked to take another."""


class LeftAlone(KVTierError):
    """The tier went down while a call was queued, and the call was not made."""


class Health:
    """The state of one tier. `full` is called when the medium turns out to be full."""

    def __init__(
        self, tier: Tier, options: BreakerOptions, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self.breaker = Breaker(options)
        self.opened = False
        """The store has been got ready once."""
        self.full: Callable[[], None] = _nothing
        self._tier = tier
        self._metrics = metrics
        self._clock = clock
        self._no_writes_until = 0.0
        self._said = ""

    @property
    def up(self) -> bool:
        """Whether anything is asked of the tier now."""
        return self.opened and self.breaker.closed

    @property
    def writable(self) -> bool:
        """Whether a write may be tried now."""
        return self.up and self._clock() >= self._no_writes_until

    def judge(self, job: Job[T]) -> bool:
        """Take note of how a job went. Returns whether it went well."""
        if job.error is None:
            was_closed = self.breaker.closed
            took = 0.0 if job.urgency is Urgency.UPKEEP else job.seconds
            self.breaker.worked(took, self._clock())
            if was_closed and not self.breaker.closed:
                self._opened(f"a call took {took:.2f} s")
            return True
        if not isinstance(job.error, LeftAlone):
            self._fault(self._meaning(job.error))
        return False

    def ready(self, job: Job[None]) -> bool:
        """Take note of how getting ready went, at the start or as a probe."""
        if job.error is None:
            self.breaker.worked(0.0, self._clock())
            if not self.breaker.closed:  # Something else failed meanwhile.
                return False
            if self._said:
                log.info("the %s tier is back", self._tier)
                self._said = ""
        else:
            fault = self._meaning(job.error)
            self._fault(fault, at_once=True)
            if fault.fault not in _NO_WRITES:
                return False
        self.opened = True
        return True

    def stuck(self, seconds: float) -> None:
        """A job has been running for so long, and does not come back."""
        text = f"an operation has not come back for {seconds:.1f} s"
        self._fault(TierFault(Fault.TIMEOUT, text), at_once=True)

    def _meaning(self, error: Exception) -> TierFault:
        if isinstance(error, TierFault):
            return error
        log.error("a job of the %s tier failed", self._tier, exc_info=error)
        return TierFault(Fault.IO, "an internal error")

    def _fault(self, fault: TierFault, at_once: bool = False) -> None:
        self._metrics.tier_faults.labels(self._tier, fault.fault).inc()
        if fault.fault not in _NO_WRITES:
            self._fail(fault, at_once)
            return
        now = self._clock()
        first = now >= self._no_writes_until
        self._no_writes_until = now + NO_WRITES_SECONDS
        self.breaker.worked(0.0, now)  # It answers: what it holds can be read.
        if first:
            self._say(f"takes no writes for now: {fault}")
            if fault.fault is Fault.FULL:
                self.full()

    def _fail(self, fault: TierFault, at_once: bool) -> None:
        was_closed = self.breaker.closed
        self.breaker.failed(self._clock(), at_once)
        if was_closed and not self.breaker.closed:
            self._opened(str(fault))

    def _opened(self, why: str) -> None:
        self._metrics.breaker_openings.labels(self._tier).inc()
        self._say(f"is left alone for now: {why}")

    def _say(self, text: str) -> None:
        """Log a sentence once, until another one takes its place."""
        if text != self._said:
            self._said = text
            log.warning("the %s tier %s", self._tier, text)


def _nothing() -> None:
    """Nothing can be given up."""
