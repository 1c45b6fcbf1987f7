"""The host tier (L1): slots in shared-memory slabs under one byte budget.

The budget is cut into slabs of one size when the server starts. A slab belongs to the pool of one
namespace at a time and is cut into that namespace's slots; it moves to another pool only when it
is empty. This module knows which slot is free and whose slab it is. Which block lies in a slot,
and who leases it, is the hierarchy's business. Runs on the event loop, but for the making of
slabs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ..core import PAGE_BYTES, SlotRef, align_up, unpack_slot
from ..errors import HelloRefused
from ..metrics import Metrics
from ..policies import POLICIES, EvictionPolicy
from .slab import HUGE_PAGE_BYTES, HugePages, Slab, make_slab

SLABS_AT_LEAST = 16
SLAB_BYTES_AT_MOST = 1 << 30


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Settings of the host tier. Watermarks are shares of a pool's slots."""

    capacity_bytes: int
    policy: str = "lru"
    high_watermark: float = 0.98
    low_watermark: float = 0.95
    huge_pages: HugePages = HugePages.AUTO


@dataclass(slots=True)
class OwnedSlab:
    """A slab in a pool. `last_used` is the tick of the latest use of a block in it."""

    slab: Slab
    slots: int
    used: int = 0
    """Slots that are taken: committed, reserved or in limbo."""
    last_used: int = 0
    closing: bool = False
    """Its slots are handed out no more: it goes when the last one is given back."""


@dataclass(slots=True)
class Pool:
    """The slots of one namespace."""

    slot_bytes: int
    policy: EvictionPolicy
    slabs: dict[int, OwnedSlab] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    """Free slots, packed; the last one given back is taken first, while it is warm in cache."""
    draining: bool = False
    """The high watermark was passed and the low one is not reached yet."""

    @property
    def total(self) -> int:
        """Slots in all, without those of slabs that go."""
        return sum(owned.slots for owned in self.slabs.values() if not owned.closing)


class HostTier:
    """The slabs and the pools that share them."""

    def __init__(self, options: HostOptions, metrics: Metrics) -> None:
        self.options = options
        self.pools: dict[str, Pool] = {}
        self.slab_bytes = slab_size(options.capacity_bytes)
        self._slabs: dict[int, Slab] = {}
        self._unowned: list[Slab] = []
        self._mapped: dict[int, memoryview] = {}
        self._made = 0
        self._metrics = metrics

    async def allocate(self) -> None:
        """Make slabs up to the capacity, in a thread; each can be used at once.

        Raises StartError.
        """
        while (size := self._missing()) > 0:
            self._made += 1
            slab = await asyncio.to_thread(make_slab, self._made - 1, size, self.options.huge_pages)
            self._slabs[slab.number] = slab
            self._unowned.insert(0, slab)

    def _missing(self) -> int:
        """Return the size of the next slab to make; 0 if there is none."""
        rest = min(self.options.capacity_bytes - self.total_bytes, self.slab_bytes)
        always = self.options.huge_pages is HugePages.ALWAYS
        return rest - rest % (HUGE_PAGE_BYTES if always else PAGE_BYTES)

    @property
    def total_bytes(self) -> int:
        """Bytes of all slabs that stay."""
        closing = {
            number
            for pool in self.pools.values()
            for number, owned in pool.slabs.items()
            if owned.closing
        }
        return sum(slab.size for number, slab in self._slabs.items() if number not in closing)

    @property
    def allocated_bytes(self) -> int:
        """Memory that the kernel has given to all slabs."""
        return sum(slab.kernel_bytes() for slab in self._slabs.values())

    @property
    def huge(self) -> bool:
        """Whether every slab lies in huge pages."""
        return bool(self._slabs) and all(slab.huge for slab in self._slabs.values())

    def slab(self, number: int) -> Slab | None:
        """Return a slab by its number."""
        return self._slabs.get(number)

    def memory(self, slot: int, pool: Pool) -> memoryview:
        """Return the bytes of a slot, as the server itself sees them."""
        at = unpack_slot(slot)
        whole = self._mapped.get(at.slab)
        if whole is None:
            whole = self._mapped[at.slab] = self._slabs[at.slab].map()
        begin = at.index * pool.slot_bytes
        return whole[begin : begin + pool.slot_bytes]

    def open_pool(self, namespace: str, slot_bytes: int) -> Pool:
        """Return the namespace's pool. Raises HelloRefused if not one slot fits into a slab."""
        if (pool := self.pools.get(namespace)) is not None:
            return pool
        if slot_bytes > self.slab_bytes:
            raise HelloRefused(
                "slot_bytes",
                f"one block takes {slot_bytes} bytes, more than a slab of {self.slab_bytes}: "
                f"raise host.capacity to {slot_bytes * SLABS_AT_LEAST} bytes or more",
            )
        pool = self.pools[namespace] = Pool(slot_bytes, POLICIES[self.options.policy]())
        return pool

    def growable(self, pool: Pool) -> int:
        """Return how many slots the pool would gain from the slabs that no pool owns."""
        return sum(slab.size // pool.slot_bytes for slab in self._unowned)

    def grow(self, pool: Pool) -> bool:
        """Give an unowned slab to the pool. Returns whether there was one."""
        for position in range(len(self._unowned) - 1, -1, -1):
            slab = self._unowned[position]
            if slab.size >= pool.slot_bytes:
                del self._unowned[position]
                owned = OwnedSlab(slab, slab.size // pool.slot_bytes)
                pool.slabs[slab.number] = owned
                pool.free += [
                    SlotRef(slab.number, index).packed for index in reversed(range(owned.slots))
                ]
                return True
        return False

    def shrink(self, pool: Pool, number: int) -> None:
        """Take an empty slab away from the pool, for any pool to grow by."""
        owned = pool.slabs.pop(number)
        assert not owned.used, "only an empty slab may move"
        pool.free = [slot for slot in pool.free if unpack_slot(slot).slab != number]
        self._unowned.append(owned.slab)

    def close_slab(self, pool: Pool, number: int) -> None:
        """Hand out no more slots of a slab."""
        pool.slabs[number].closing = True
        pool.free = [slot for slot in pool.free if unpack_slot(slot).slab != number]

    def reopen_slab(self, pool: Pool, number: int, taken: set[int]) -> None:
        """Hand out a slab's slots again, but for those that are taken."""
        owned = pool.slabs[number]
        owned.closing = False
        slots = (SlotRef(number, index).packed for index in reversed(range(owned.slots)))
        pool.free += [slot for slot in slots if slot not in taken]

    def retire(self, pool: Pool | None, number: int) -> None:
        """Give the memory of an empty slab back to the kernel, though engines still map it.

        Its number is not used again.
        """
        if pool is not None:
            owned = pool.slabs.pop(number)
            assert not owned.used, "only an empty slab may go"
        self._unowned = [slab for slab in self._unowned if slab.number != number]
        self._mapped.pop(number, None)
        slab = self._slabs.pop(number)
        slab.give_up()
        slab.close()

    @property
    def unowned(self) -> list[Slab]:
        """Slabs that belong to no pool."""
        return self._unowned

    def take(self, pool: Pool) -> int | None:
        """Return a free slot, growing the pool if need be, or None."""
        if not pool.free and not self.grow(pool):
            return None
        slot = pool.free.pop()
        pool.slabs[unpack_slot(slot).slab].used += 1
        return slot

    def give_back(self, pool: Pool, slot: int) -> None:
        """Make a taken slot free again."""
        owned = pool.slabs[unpack_slot(slot).slab]
        owned.used -= 1
        if not owned.closing:
            pool.free.append(slot)

    def close(self) -> None:
        """Let go of all memory."""
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()
        self._unowned.clear()
        self._mapped.clear()


def slab_size(capacity_bytes: int) -> int:
    """Return the bytes of one slab for a budget: a 16th of it, 1 GiB at most, in huge pages."""
    share = min(capacity_bytes // SLABS_AT_LEAST, SLAB_BYTES_AT_MOST)
    if share >= HUGE_PAGE_BYTES:
        return share - share % HUGE_PAGE_BYTES
    return max(align_up(share, PAGE_BYTES), PAGE_BYTES)
