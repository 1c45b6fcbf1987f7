"""MQ that finds its life by itself.

How long a count of uses should count depends on the traffic and on the size of the tier. Shadows
(caches of keys without bytes, one for each life) see each request and count the hits that they
would have had; the best one's life is taken. To be cheap they see every 8th block of a chain, by
position, with an 8th of the capacity: contiguous prefixes stay contiguous, and the ranking hardly
changes. Of large tiers they see fewer of these, picked by hash; and still a hit counts only if all
that a shadow sees of the chain before it are hits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log2
from typing import ClassVar
from zlib import crc32

from ..core import BlockKey
from .base import PolicyState
from .mq import MQ
from .shadow import Shadow

LIVES = (0.1, 0.5, 1.0, 4.0)
FIRST_LIFE = 0.5
STEP, STEP_AT_MOST = 8, 128
"""Shadows see one block of a chain in this many, by position: the most where the tier is large."""
THIN_FIRST = 4
"""Of these they see one in so many, by hash, before the step grows."""
SHADOW_BLOCKS, SHADOW_BLOCKS_AT_LEAST = 256, 32
"""A shadow of a large tier holds about the first, and one of a small tier at least the second."""
SEEN_AT_ONCE = 64
"""Blocks that shadows are shown together."""
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
        self._shadows = [Shadow(life) for life in LIVES]
        self._room: int | None = None
        """Resident blocks at the latest eviction: the capacity; None while all have fitted."""
        self._step, self._thin = STEP, 1
        """Shadows see each so many blocks of a chain, and of these one in so many."""
        self._seen: list[Sequence[BlockKey]] = []
        """What shadows see of the latest requests, which they serve together."""
        self._seen_blocks = 0
        self._requests = 0

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Record a request's use of its chain, here and in the shadows."""
        if sampled := self._sample(chain):
            self._seen.append(sampled)
            self._seen_blocks += len(sampled)
            if self._seen_blocks >= SEEN_AT_ONCE:
                self._show()
        self._requests += 1
        if not self._requests % PERIOD:
            self._show()
            self._choose()
            self._fit_sample()
        super().touch(chain)

    def evict(self, key: BlockKey) -> None:
        """Take out a block and remember its uses."""
        self._meet_room()
        super().evict(key)

    def make_room(self, count: int, goes: Callable[[BlockKey], bool]) -> int:
        """Evict up to `count` blocks that may go, coldest first. Returns how many."""
        if count:
            self._meet_room()
        return super().make_room(count, goes)

    def export(self) -> PolicyState:
        """Return what MQ returns, and the hits of each life; the shadows stay behind."""
        state = super().export()
        hits = {f"hits {shadow.life}": shadow.hits for shadow in self._shadows}
        return replace(state, learnt={**state.learnt, **hits})

    def adopt(self, state: PolicyState) -> None:
        """Take over what MQ takes over, the life that another MQ had, and what shadows hit."""
        super().adopt(state)
        self.life = state.learnt.get("life", FIRST_LIFE)
        self._fit_sample()
        for shadow in self._shadows:
            shadow.hits = state.learnt.get(f"hits {shadow.life}", 0.0)

    def _sample(self, chain: Sequence[BlockKey]) -> Sequence[BlockKey]:
        sampled = chain[:: self._step]
        if others := self._thin - 1:
            hashed = zip(sampled, map(crc32, sampled), strict=True)
            return [key for key, crc in hashed if not crc & others]
        return sampled

    def _show(self) -> None:
        """Let the shadows serve the requests that wait for it."""
        room = None
        if self._room is not None:
            self._room = max(self._room, len(self))
            room = self._room // (self._step * self._thin)
        for shadow in self._shadows:
            shadow.serve(self._seen, room)
        self._seen.clear()
        self._seen_blocks = 0

    def _meet_room(self) -> None:
        """Note that what is resident now is all that there is room for."""
        first, self._room = self._room is None, len(self)
        if first:
            self._fit_sample()

    def _fit_sample(self) -> None:
        """Let shadows see as much as suits the size of the tier.

        What is seen of a larger tier is a part of what is seen of a smaller one.
        """
        blocks = self._room or len(self)
        if self._room is not None and blocks < STEP * SHADOW_BLOCKS_AT_LEAST:
            self._step, self._thin = max(blocks // SHADOW_BLOCKS_AT_LEAST, 1), 1
            return
        parts = 1 << max(round(log2(max(blocks, 1) / (STEP * SHADOW_BLOCKS))), 0)
        more = min(max(parts // THIN_FIRST, 1), STEP_AT_MOST // STEP)
        self._step, self._thin = STEP * more, parts // more

    def _choose(self) -> None:
        """Take the shortest life that no longer one clearly beats: with it MQ is nearly LRU."""
        best = self._shadows[0]
        for shadow in self._shadows:
            if shadow.hits > LEAD * best.hits:
                best = shadow
        if best.hits:
            self.life = best.life
        for shadow in self._shadows:
            shadow.hits *= DECAY
