"""MQ that finds its life by itself.

How long a count of uses should count depends on the traffic and on the size of the tier. Shadows
(caches of keys without bytes, one for each life) see each request and count the hits that they
would have had; the best one's life is taken. To be cheap they see every 8th block of a chain, by
position, with an 8th of the capacity: contiguous prefixes stay contiguous, and the ranking hardly
changes; of large tiers they see fewer. Sampling blocks by hash would tear the prefixes apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from ..core import BlockKey
from .base import PolicyState
from .mq import MQ

LIVES = (0.1, 0.5, 1.0, 4.0)
FIRST_LIFE = 0.5
STEP, STEP_AT_MOST = 8, 128
"""Shadows see one block of a chain in this many: the most where the tier is large."""
SHADOW_BLOCKS, SHADOW_BLOCKS_AT_LEAST = 1024, 32
"""A shadow of a large tier holds about the first, and one of a small tier at least the second."""
SLACK_SHARE = 32
"""A shadow may hold as much more than it should, its blocks ÷ this, so that it evicts seldom."""
PERIOD = 100
"""Requests between choices."""
DECAY = 0.95
"""What earlier hits count for after each choice."""
LEAD = 1.01
"""A longer life must have this many times the hits of a shorter one."""


class Auto(MQ):
    """Self-tuned MQ."""

    name: ClassVar[str] = "auto"

    def __init__(self) -> None:
        super().__init__(FIRST_LIFE)
        self._shadows = [_Shadow(life) for life in LIVES]
        self._room: int | None = None
        """Resident blocks at the latest eviction: the capacity; None while all have fitted."""
        self._requests = 0

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Record a request's use of its chain, here and in the shadows."""
        step, room = STEP, None
        if self._room is not None:
            self._room = max(self._room, len(self))
            step = min(max(STEP, self._room // SHADOW_BLOCKS), STEP_AT_MOST)
            step = max(min(step, self._room // SHADOW_BLOCKS_AT_LEAST), 1)
            room = self._room // step
        sampled = chain[::step]
        for shadow in self._shadows:
            shadow.request(sampled, room)
        self._requests += 1
        if not self._requests % PERIOD:
            self._choose()
        super().touch(chain)

    def evict(self, key: BlockKey) -> None:
        """Take out a block and remember its uses."""
        self._room = len(self)
        super().evict(key)

    def make_room(self, count: int, goes: Callable[[BlockKey], bool]) -> int:
        """Evict up to `count` blocks that may go, coldest first. Returns how many."""
        if count:
            self._room = len(self)
        return super().make_room(count, goes)

    def export(self) -> PolicyState:
        """Return what MQ returns, and the hits of each life; the shadows stay behind."""
        state = super().export()
        hits = {f"hits {shadow.mq.life}": shadow.hits for shadow in self._shadows}
        return replace(state, learnt={**state.learnt, **hits})

    def adopt(self, state: PolicyState) -> None:
        """Take over what MQ takes over, the life that another MQ had, and what shadows hit."""
        super().adopt(state)
        self.life = state.learnt.get("life", FIRST_LIFE)
        for shadow in self._shadows:
            shadow.hits = state.learnt.get(f"hits {shadow.mq.life}", 0.0)

    def _choose(self) -> None:
        """Take the shortest life that no longer one clearly beats: with it MQ is nearly LRU."""
        best = self._shadows[0]
        for shadow in self._shadows:
            if shadow.hits > LEAD * best.hits:
                best = shadow
        if best.hits:
            self.life = best.mq.life
        for shadow in self._shadows:
            shadow.hits *= DECAY


class _Shadow:
    """A cache of keys under MQ with one life. `hits` are contiguous ones, decayed."""

    def __init__(self, life: float) -> None:
        self.mq = MQ(life)
        self.hits = 0.0

    def request(self, chain: Sequence[BlockKey], room: int | None) -> None:
        """Serve a request from at most `room` blocks; None sets no bound."""
        mq = self.mq
        hits = mq.leading(chain)
        self.hits += hits
        mq.touch(chain)
        if hits < len(chain):
            mq.fill(chain, hits, 1)
        if room is not None and (excess := len(mq) - room) > room // SLACK_SHARE:
            leased = set(chain[:hits])
            mq.make_room(excess, lambda key: key not in leased)
