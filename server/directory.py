"""The directory: which block lies where, and who its parent is.

One index a namespace, from block key to `Block`. An entry takes a few hundred bytes, the policy's
bookkeeping included (`make figure NAME=directory_bytes_per_block`). Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from .core import BlockKey, Manifest, unpack_slot
from .tiers.host import Pool


class Block:
    """One committed block in the host tier."""

    __slots__ = ("children", "key", "leases", "parent", "slot")

    def __init__(self, key: BlockKey, parent: Block | None, slot: int) -> None:
        self.key = key
        self.parent = parent
        self.slot = slot
        self.leases = 0
        self.children = 0
        """Resident blocks that continue this one. A block with children is not evicted."""


class Namespace:
    """The blocks of engines that may share, and the pool that holds their bytes."""

    __slots__ = ("blocks", "by_slab", "digest", "doomed", "manifest", "pool", "sessions")

    def __init__(self, manifest: Manifest, pool: Pool) -> None:
        self.digest = manifest.digest()
        self.manifest = manifest
        self.pool = pool
        self.blocks: dict[BlockKey, Block] = {}
        self.by_slab: dict[int, list[Block | None]] = {}
        """What lies in each slot of each slab, so that one slab can be emptied."""
        self.doomed: set[Block] = set()
        """Dropped while leased: invisible to lookups, and gone with the last lease."""
        self.sessions = 0

    def prefix(self, keys: Sequence[BlockKey], start: int) -> list[Block]:
        """Return the blocks of the longest contiguous run of `keys` from `start` on."""
        blocks = self.blocks
        found = []
        for position in range(start, len(keys)):
            block = blocks.get(keys[position])
            if block is None:
                break
            found.append(block)
        return found

    def add(self, key: BlockKey, parent: BlockKey, slot: int) -> Block:
        """Make a block visible."""
        above = self.blocks.get(parent)
        block = Block(key, above, slot)
        if above is not None:
            above.children += 1
        self.blocks[key] = block
        self._place(slot, block)
        return block

    def remove(self, block: Block) -> None:
        """Make a block invisible; its slot is the caller's to give back."""
        del self.blocks[block.key]
        self._place(block.slot, None)
        if block.parent is not None:
            block.parent.children -= 1

    def in_slab(self, number: int) -> list[Block]:
        """Return the visible blocks that lie in a slab."""
        return [block for block in self.by_slab.get(number, ()) if block is not None]

    def leave_slab(self, number: int) -> None:
        """Forget an empty slab that moves to another pool."""
        self.by_slab.pop(number, None)

    def _place(self, slot: int, block: Block | None) -> None:
        ref = unpack_slot(slot)
        row = self.by_slab.get(ref.slab)
        if row is None:
            row = self.by_slab[ref.slab] = [None] * self.pool.slabs[ref.slab].slots
        row[ref.index] = block


class Directory:
    """All namespaces, by digest."""

    def __init__(self) -> None:
        self.namespaces: dict[str, Namespace] = {}

    def __len__(self) -> int:
        return sum(len(space.blocks) for space in self.namespaces.values())
