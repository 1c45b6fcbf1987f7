"""The offline bound on hits: MIN evicts what is wanted again last, which no policy can know."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from ..core import Tier
from .simulator import REQUESTS_BETWEEN_REPORTS, Outcome, TierOutcome
from .trace import Trace

BOUND = "MIN"
"""Its name, among those of policies."""
NEVER = 1 << 62
"""Number of a request that never comes."""


def bound(trace: Trace, capacity: int, advance: Callable[[int], None] | None = None) -> Outcome:
    """Serve all requests from a cache of `capacity` blocks: heads are kept before tails.

    `advance` is told how many more requests were served.
    """
    following = _next_uses(trace)
    wanted = [-1] * trace.distinct
    """The request that wants a resident block next; -1 for one that is not resident."""
    heap: list[tuple[int, int, int]] = []
    hit_blocks = written = evictions = resident = at = 0
    for served, blocks in enumerate(trace.requests(), 1):
        contiguous = True
        new: list[int] = []
        for depth, number in enumerate(blocks):
            if wanted[number] < 0:
                contiguous = False
                new.append(number)
                resident += 1
            hit_blocks += contiguous
            wanted[number] = following[at]
            heappush(heap, (-following[at], -depth, number))
            at += 1
        while resident > capacity:
            due, _, number = heappop(heap)
            if wanted[number] == -due:
                wanted[number] = -1
                resident -= 1
                evictions += 1
        passed = sum(wanted[number] < 0 for number in new)
        written += len(new) - passed
        evictions -= passed
        if advance is not None and not served % REQUESTS_BETWEEN_REPORTS:
            advance(REQUESTS_BETWEEN_REPORTS)
    return Outcome((TierOutcome(Tier.HOST, capacity, hit_blocks, written, evictions),))


def _next_uses(trace: Trace) -> list[int]:
    """Return for each block access the number of the next request that uses the block."""
    following = [NEVER] * trace.accesses
    latest = [-1] * trace.distinct
    at = 0
    for request, blocks in enumerate(trace.requests()):
        for number in blocks:
            if latest[number] >= 0:
                following[latest[number]] = request
            latest[number] = at
            at += 1
    return following
