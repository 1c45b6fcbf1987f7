"""Drives a policy with recorded requests, as the server would: lookup, touch, store, evict.

Only the contiguous prefix of a request counts as hit. What a request hit is leased while it is
served; what it brought is evicted like anything else, once the tier is above its capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from ..core import BlockKey
from ..policies import POLICIES, EvictionPolicy
from .trace import Trace

REQUESTS_BETWEEN_REPORTS = 64
NEVER = 1 << 62
"""Number of a request that never comes."""
BOUND = "MIN"
"""Name of the offline bound: evict what is wanted again last."""

Advance = Callable[[int], None]
"""Is told how many more requests have been served."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of a trace at one capacity (in blocks)."""

    policy: str
    capacity: int
    hit_blocks: int
    written_blocks: int
    evictions: int

    def hit_ratio(self, trace: Trace) -> float:
        """Return the share of all prompt tokens that came from the cache."""
        return self.hit_blocks * trace.block_tokens / trace.tokens if trace.tokens else 0.0


def replay(trace: Trace, policy: str, capacity: int, advance: Advance | None = None) -> Outcome:
    """Serve all requests from a cache of `capacity` blocks. `BOUND` is a policy here, too."""
    if policy == BOUND:
        return _bound(trace, capacity, advance)
    cache = Cache(POLICIES[policy](), capacity)
    keys = trace.keys
    for served, blocks in enumerate(trace.requests(), 1):
        cache.serve([keys[number] for number in blocks])
        if advance is not None and not served % REQUESTS_BETWEEN_REPORTS:
            advance(REQUESTS_BETWEEN_REPORTS)
    return Outcome(policy, capacity, cache.hit_blocks, cache.written_blocks, cache.evictions)


class Cache:
    """A tier without bytes: `capacity` blocks under a policy, and its counts."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.hit_blocks = 0
        self.written_blocks = 0
        self.evictions = 0

    def serve(self, chain: list[BlockKey]) -> int:
        """Serve one request. Returns how many blocks of its prefix were there."""
        policy = self.policy
        resident = policy.__contains__
        hits = 0
        for key in chain:
            if not resident(key):
                break
            hits += 1
        policy.touch(chain)
        if hits < len(chain):
            self._store(chain, hits)
        self.hit_blocks += hits
        return hits

    def _store(self, chain: list[BlockKey], hits: int) -> None:
        """Store what a request brought, as far as the tier has room beside what is leased."""
        policy = self.policy
        resident, insert = policy.__contains__, policy.insert
        before = len(policy)
        parent = chain[hits - 1] if hits else None
        for key in chain[hits : self.capacity]:
            if not resident(key):
                insert(key, 1, parent)
            parent = key
        self.written_blocks += len(policy) - before
        if (excess := len(policy) - self.capacity) > 0:
            self._evict(excess, chain[:hits])

    def _evict(self, excess: int, leased: list[BlockKey]) -> None:
        kept = set(leased)
        evict = self.policy.evict
        self.evictions += excess
        for key in self.policy.victims():
            if key not in kept:
                evict(key)
                excess -= 1
                if not excess:
                    return
        self.evictions -= excess


def _bound(trace: Trace, capacity: int, advance: Advance | None) -> Outcome:
    """Keep what is wanted again first, heads before tails: no policy can know that."""
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
    return Outcome(BOUND, capacity, hit_blocks, written, evictions)


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
