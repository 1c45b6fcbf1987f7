"""Prefetch: what lower tiers have of a prefix comes to the host tier before a request wants it.

It goes after reads that requests wait for, and takes free room: of what is there it replaces at
most a small share. What it has of the prefix is leased until it ends, so that the tail does not
drive out the head; nothing is kept then. Runs on the event loop, and never blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from .core import BlockKey
from .directory import Block, Namespace
from .errors import KVTierError
from .eviction import Evictor
from .lower import LowerTier
from .promotion import Promotions
from .tiers.pool import Urgency

PREFETCHES_AT_MOST = 4
READS_AT_MOST = 32
"""Reads of one prefetch that are under way at once."""
REPLACED_SHARE = 16
"""One prefetch evicts at most the namespace's slots ÷ this."""


class PrefetchRefused(KVTierError):
    """Too many prefetches are under way."""


@dataclass(slots=True, eq=False)
class Prefetch:
    """One prefix on its way. Positions count its blocks."""

    space: Namespace
    keys: Sequence[BlockKey]
    todo: deque[tuple[int, LowerTier]]
    """Where blocks lie whose reads have not begun."""
    replaceable: int
    """Blocks that may still be evicted for it."""
    blocks: list[Block] = field(default_factory=list)
    """Leased for it."""
    under_way: int = 0


class Prefetches:
    """All prefetches that have not ended."""

    def __init__(self, promotions: Promotions, evictor: Evictor) -> None:
        self.active: set[Prefetch] = set()
        self._promotions = promotions
        self._evictor = evictor

    def begin(
        self, space: Namespace, keys: Sequence[BlockKey], where: Sequence[LowerTier | None]
    ) -> int:
        """Begin to read the blocks that `where` names a lower tier for; None is the host tier.

        Returns how many blocks are on their way: those that there is room for. Raises
        PrefetchRefused.
        """
        if len(self.active) >= PREFETCHES_AT_MOST:
            raise PrefetchRefused(
                f"{PREFETCHES_AT_MOST} prefetches are under way: try again when one has ended."
            )
        replaceable = space.pool.total // REPLACED_SHARE
        room = max(self._evictor.spare(space.pool), 0) + replaceable
        one = Prefetch(space, keys, deque(), replaceable)
        for at, lower in enumerate(where):
            if (block := space.blocks.get(keys[at])) is not None:
                _lease(one, block)
            elif lower is None or len(one.todo) == room:
                break  # It left the host tier meanwhile, or there is no room.
            else:
                one.todo.append((at, lower))
        self.active.add(one)
        count = len(one.todo)
        self._go_on(one)
        return count

    def cut_off(self, space: Namespace, key: BlockKey) -> None:
        """A block is dropped: it is not prefetched, and neither is what continues it."""
        for one in self.active:
            if one.space is space and key in one.keys:
                end = one.keys.index(key)
                one.todo = deque(each for each in one.todo if each[0] < end)
                for later in one.keys[end:]:
                    if (coming := self._promotions.coming(space, later)) is not None:
                        coming.discarded = True

    def _go_on(self, one: Prefetch) -> None:
        while one.todo and one.under_way < READS_AT_MOST:
            at, lower = one.todo.popleft()
            key = one.keys[at]
            if (block := one.space.blocks.get(key)) is not None:  # Since it was put down here.
                _lease(one, block)
                continue
            if (coming := self._promotions.coming(one.space, key)) is None:
                if (slot := self._slot(one)) is None:
                    one.todo.clear()
                    break
                coming = self._promotions.fetch(
                    one.space, one.keys, at, slot, lower, Urgency.PREFETCH
                )
            coming.then.append(partial(self._came, one))
            one.under_way += 1
        if not one.under_way:
            self.active.discard(one)
            self._evictor.unlease(one.space, one.blocks)

    def _slot(self, one: Prefetch) -> int | None:
        """Return a taken slot, without passing the high watermark."""
        if self._evictor.spare(one.space.pool) > 0:
            return self._evictor.host.take(one.space.pool)
        if not one.replaceable:
            return None
        one.replaceable -= 1
        return self._evictor.exchange(one.space)

    def _came(self, one: Prefetch, block: Block | None) -> None:
        one.under_way -= 1
        if block is None:
            one.todo.clear()  # The prefix ends here.
        else:
            _lease(one, block)
        self._go_on(one)


def _lease(one: Prefetch, block: Block) -> None:
    block.leases += 1
    one.blocks.append(block)
