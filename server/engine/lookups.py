"""Lookups: what a request asks the server for before it is scheduled, and what becomes of it.

An answer is a match: slots that are leased until the request has loaded them or does not want them
any more. Where lower tiers have more than the host tier, the answer comes later; vLLM is asked to
come back with the request meanwhile, and serves others. What stays out is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..core import Tier
from .account import Account
from .requests import Awaited, Match, Tracked, joined
from .tracing import LOOKUP, Span, Tracer

GRACE_SECONDS = 0.5
"""How much later than promised an answer may come before it counts as a miss."""


class Lookups:
    """All lookups of one engine. Keeps its state in the requests."""

    def __init__(self, account: Account, tracer: Tracer, block_tokens: int) -> None:
        self._account = account
        self._tracer = tracer
        self._block_tokens = block_tokens

    def known(
        self, tracked: Tracked, first: int, last: int, patience: float
    ) -> Match | Awaited | None:
        """Return what is known of the blocks from `first` up to `last`, or awaited.

        An answer is waited for `patience` seconds at most. What was asked of another server, or for
        other blocks, is given back.
        """
        asked = (self._account.by, first, last)
        if (awaited := tracked.awaited) is not None and awaited.question == asked:
            self._take_answer(tracked, awaited, patience)
        for known in (tracked.match, tracked.awaited):
            if known is not None and known.question == asked:
                return known
        self.forget(tracked)
        return None

    def ask(self, tracked: Tracked, hashes: Sequence[bytes], first: int) -> Match | Awaited | None:
        """Ask the server. None is a miss."""
        span = self._tracer.span(LOOKUP, tracked.request.trace_headers)
        tenant = tracked.tenant(self._account.salt_key)
        found = self._account.lookup(joined(hashes), first, tenant)
        by, last = self._account.by, len(hashes)
        if found is None:
            self._end(span, first, last, 0)
            return None
        tracked.refill = found.absent
        if found.within:
            until = time.monotonic() + found.within + GRACE_SECONDS
            tracked.awaited = Awaited(first, last, by, found.seq, until, span)
            return tracked.awaited
        self._end(span, first, last, len(found.slots))
        tracked.match = Match(first, last, found.slots, by, found.seq)
        return tracked.match

    def forget(self, tracked: Tracked) -> None:
        """Give back what the request was promised."""
        if tracked.match is not None:
            self.release(tracked.match)
            tracked.match = None
        if (awaited := tracked.awaited) is not None:
            tracked.awaited = None
            self._account.abandon(awaited.lease)
            self._give_back(awaited.lease, awaited)
            self._end(awaited.span, awaited.first, awaited.last, 0)

    def release(self, match: Match) -> None:
        """End the lease of a match."""
        if match.slots:
            self._give_back(match.lease, match)

    def _give_back(self, lease: int, what: Match | Awaited) -> None:
        if what.by == self._account.by:
            self._account.say.releases.append(lease)

    def _take_answer(self, tracked: Tracked, awaited: Awaited, patience: float) -> None:
        """Make the answer that has come the request's match; a miss if it is overdue."""
        found = self._account.answer(awaited.lease, patience)
        first, last = awaited.first, awaited.last
        if found is not None:
            tracked.awaited = None
            tracked.match = Match(
                first, last, found.slots, awaited.by, awaited.lease, found.disk, found.redis
            )
            tier = Tier.REDIS if found.redis else Tier.DISK if found.disk else Tier.HOST
            self._end(awaited.span, first, last, len(found.slots), tier)
        elif time.monotonic() > awaited.until:
            self._account.overdue()
            self.forget(tracked)
            tracked.match = Match(first, last, [], awaited.by, awaited.lease)

    def _end(self, span: Span, first: int, last: int, hits: int, tier: Tier = Tier.HOST) -> None:
        tokens = self._block_tokens
        span.end(
            requested_tokens=last * tokens,
            device_tokens=first * tokens,
            hit_tokens=hits * tokens,
            tier=tier,
        )
