"""How fast this engine computes prompts: tokens and seconds of the steps that computed many.

The server weighs it against what a load would take. A step lasts from its plan, or from the end of
the one before, to its output; where steps overlap (asynchronous scheduling) that is still right.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

TOKENS_AT_LEAST = 64
"""Steps that compute fewer prompt tokens are mostly overhead."""
STEPS_AT_MOST = 8
"""Steps under way; what lies further back had no output."""


class Measure(NamedTuple):
    """Prompt tokens and the seconds that their steps took; both 0 if nothing was measured."""

    tokens: int
    seconds: float


class Meter:
    """Measures steps. All calls come from the scheduler's thread."""

    def __init__(self) -> None:
        self._planned: deque[tuple[float, int]] = deque(maxlen=STEPS_AT_MOST)
        self._last = 0.0
        self._tokens = 0
        self._seconds = 0.0

    def planned(self, scheduled: Iterable[int]) -> None:
        """A step begins; `scheduled` are the tokens of each request in it."""
        tokens = list(scheduled)
        if tokens:
            prompt = sum(each for each in tokens if each > 1)
            self._planned.append((time.monotonic(), prompt))

    def stepped(self) -> None:
        """The oldest step under way has its output."""
        now = time.monotonic()
        if self._planned:
            began, tokens = self._planned.popleft()
            if tokens >= TOKENS_AT_LEAST:
                self._tokens += tokens
                self._seconds += now - max(began, self._last)
        self._last = now

    def take(self) -> Measure:
        """Return what was measured since the last call."""
        measure = Measure(self._tokens, self._seconds)
        self._tokens, self._seconds = 0, 0.0
        return measure
