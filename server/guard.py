"""The guard of a change: it is taken back when the hit ratio falls.

Hits are prompt tokens that came from kvtier ÷ those that the device had not got, over a window. The
trend keeps the totals of each second for an hour. Time is passed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

TREND_SECONDS = 3600


class Verdict(Enum):
    """What a guard says of a change."""

    WATCHING = "watching"
    FELL = "fell"
    HELD = "held"
    UNKNOWN = "unknown"
    """Too little was asked for, before or after, to say."""


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """When a change is taken back."""

    max_drop: float
    """Hit ratio that may be lost, from 0 to 1."""
    within_seconds: float
    """For how long it is watched; before the change, as long counts."""
    least_tokens: int = 10_000
    """Prompt tokens that must have been asked for, before and after, for a judgement."""


class Trend:
    """Totals of tokens asked for and hit, second by second."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=TREND_SECONDS)

    def sample(self, now: float, asked: int, hit: int) -> None:
        """Note the totals so far."""
        self._samples.append((now, asked, hit))

    def over(self, begin: float, end: float) -> tuple[int, int]:
        """Return the tokens asked for and hit between two times, as far as they were sampled."""
        inside = [one for one in self._samples if begin <= one[0] <= end]
        if len(inside) < 2:
            return 0, 0
        return inside[-1][1] - inside[0][1], inside[-1][2] - inside[0][2]

    def ratio(self, begin: float, end: float, least: int = 1) -> float | None:
        """Return the hit ratio between two times; None if fewer than `least` tokens were asked."""
        asked, hit = self.over(begin, end)
        return hit / asked if asked >= least else None


class Guard:
    """Watches one change, made at `since`."""

    def __init__(self, options: GuardOptions, trend: Trend, since: float) -> None:
        self.options = options
        self.since = since
        self._trend = trend
        begin = since - options.within_seconds
        self.before = trend.ratio(begin, since, options.least_tokens)

    def says(self) -> str:
        """Return what it watches for, in words."""
        if self.before is None:
            return "guard: too few tokens before the change to say what is normal"
        floor = self.before - self.options.max_drop
        return f"guard: rolled back below a hit ratio of {max(floor, 0.0):.3f}"

    def judge(self, now: float) -> Verdict:
        """Return what can be said by now."""
        over = now >= self.since + self.options.within_seconds
        after = self._trend.ratio(self.since, now, self.options.least_tokens)
        if self.before is None or after is None:
            return Verdict.UNKNOWN if over else Verdict.WATCHING
        if after < self.before - self.options.max_drop:
            return Verdict.FELL
        return Verdict.HELD if over else Verdict.WATCHING
