"""A change of the host tier's capacity while engines use it.

Up: more slabs are made, in a thread. Down: one slab after the other is emptied, the coldest first,
and its memory given back. What the rest can hold is moved there, block by block; room for it is
made by the policy, so that the coldest blocks of all go. A slot that is leased, or promised to an
engine, is waited for. Runs on the event loop, and holds it for one block's copy at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace

from .core import SLOT_INDEX_BITS, EvictReason
from .directory import Block, Namespace
from .errors import StartError
from .hierarchy import Hierarchy

log = logging.getLogger("kvtier.resize")

WAIT_SECONDS = 0.02
"""Between looks at slots that others still hold."""


class Resizer:
    """Brings the host tier to its capacity, whatever that is by now."""

    def __init__(self, cache: Hierarchy) -> None:
        self._cache = cache
        self._host = cache.host
        self._changed = asyncio.Event()

    def resize(self, capacity_bytes: int) -> None:
        """Set the capacity; `run` sees to it."""
        self._host.options = replace(self._host.options, capacity_bytes=capacity_bytes)
        self._changed.set()

    async def run(self) -> None:
        """Follow the capacity until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._excess > 0:
                await self._shrink()
            try:
                await self._host.allocate()
            except StartError as error:  # Of no concern to what is there: the tier stays smaller.
                log.error("the host tier can't grow: %s", error)
                options = self._host.options
                self._host.options = replace(options, capacity_bytes=self._host.total_bytes)

    @property
    def _excess(self) -> int:
        return self._host.total_bytes - self._host.options.capacity_bytes

    async def _shrink(self) -> None:
        """Let one slab go."""
        if unowned := self._host.unowned:
            self._host.retire(None, unowned[0].number)
            return
        pinned = self._cache.pins.slabs()  # They can't be emptied before their pins end.
        owned = list(self._owned())
        owned = [one for one in owned if one[2] not in pinned] or owned
        found = min(owned, default=None, key=lambda one: one[0])
        if found is not None:
            await self._empty(found[1], found[2])

    def _owned(self) -> Iterator[tuple[int, Namespace, int]]:
        """Yield when each slab was used last, whose it is, and its number."""
        for space in self._cache.directory.namespaces.values():
            for number, owned in space.pool.slabs.items():
                yield owned.last_used, space, number

    async def _empty(self, space: Namespace, number: int) -> None:
        """Move or evict all blocks of a slab; then it goes."""
        pool = space.pool
        owned = pool.slabs[number]
        self._host.close_slab(pool, number)
        try:
            while owned.used:
                for block in space.in_slab(number):
                    self._move(space, block, number)
                    await asyncio.sleep(0)
                    if self._excess + owned.slab.size <= 0:
                        return
                await asyncio.sleep(WAIT_SECONDS)
                if self._excess + owned.slab.size <= 0:
                    return
            space.leave_slab(number)
            self._host.retire(pool, number)
        finally:
            if number in pool.slabs:
                self._host.reopen_slab(pool, number, set(self._cache.held_slots(space)))

    def _move(self, space: Namespace, block: Block, number: int) -> None:
        """Copy a block to a slot of another slab, or evict it if there is none.

        One that is leased stays, and so does one that went since it was seen in slab `number`.
        """
        self._cache.record_use()
        old = block.slot
        gone = space.blocks.get(block.key) is not block or old >> SLOT_INDEX_BITS != number
        if gone or block.leases:
            return
        block.leases += 1  # So that it does not go for its own room.
        slot = self._cache.evictor.make_room(space, 1)
        self._cache.evictor.unlease(space, [block])
        if slot is None:
            self._cache.evictor.drop(space, block, EvictReason.CAPACITY)
            return
        self._host.memory(slot, space.pool)[:] = self._host.memory(old, space.pool)
        space.move(block, slot)
        self._host.give_back(space.pool, old)
