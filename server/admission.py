"""Admission: whether a lower tier takes a block. Apart from eviction, which is about what goes.

Pure arithmetic over what was seen of blocks (`demand.py`) and what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .core import AdmissionMode, AdmitOutcome, BlockKey
from .demand import Demand

LEAST_CHANCE = 0.02
"""`learned` takes a block that is asked for again in one of fifty cases, or more often."""
HITS = 2
"""`second_hit` takes a block from this use on, the one that stored it included."""
BURST_SECONDS = 10.0
"""A throttled tier may take at once what it may take in this time."""


class Price(NamedTuple):
    """Seconds for one block; None for what nobody has measured yet."""

    compute: float | None
    load: float | None
    write: float | None
    """For which writing it keeps the medium busy."""


def judge(
    mode: AdmissionMode, demand: Demand, key: BlockKey, price: Callable[[], Price]
) -> AdmitOutcome:
    """Return whether a tier takes a block of the host tier, or why it does not."""
    match mode:
        case AdmissionMode.ALWAYS:
            return AdmitOutcome.ADMITTED
        case AdmissionMode.SECOND_HIT:
            enough = demand.uses(key) >= HITS
            return AdmitOutcome.ADMITTED if enough else AdmitOutcome.USED_ONCE
        case AdmissionMode.LEARNED:
            enough = demand.chance(key) >= LEAST_CHANCE
            return AdmitOutcome.ADMITTED if enough else AdmitOutcome.UNLIKELY
        case AdmissionMode.COST:
            enough = _pays(demand.chance(key), price())
            return AdmitOutcome.ADMITTED if enough else AdmitOutcome.TOO_DEAR


def _pays(chance: float, price: Price) -> bool:
    """Return whether a block is expected to save more time than it takes, byte for byte."""
    compute, load, write = price
    if compute is None or load is None or write is None:
        return True  # So that it becomes known.
    return chance * (compute - load) > write


class Throttle:
    """At most so many bytes a second, on average: for a medium that wears out. Time is passed in.

    A rate of None is no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._spare = 0.0
        """Bytes that may be taken, as of `_since`; less than none while a block is paid off."""
        self._since = float("-inf")

    def lets(self, size: int, now: float) -> bool:
        """Return whether `size` bytes may be taken now, and count them if so."""
        if self.rate is None:
            return True
        most = self.rate * BURST_SECONDS
        self._spare = min(self._spare + (now - self._since) * self.rate, most)
        self._since = now
        if self._spare <= 0.0:
            return False
        self._spare -= size
        return True
