"""The directory: which block lies where, and who its parent is.

One index a namespace, from block key to `Block`. An entry takes a few hundred bytes, the policy's
bookkeeping included (`make figure NAME=directory_bytes_per_block`). Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from .accounts import Account, Accounts, Orders
from .changes import KEYS_AT_ONCE, ChangeLog, Placed
from .core import SLOT_INDEX_BITS, SLOT_INDEX_MASK, BlockKey, Manifest, Tier
from .policies import EvictionPolicy
from .tiers.base import Space
from .tiers.host import Pool

NO_SLOT = -1


class Block:
    """One committed block in the host tier.

    `parent` is None at the head of a chain. Otherwise it may have been dropped, or, with `NO_SLOT`,
    not have been there at all: see `Namespace.anchors`. An anchor's owner means nothing.
    """

    __slots__ = ("children", "key", "leases", "next", "owner", "parent", "slot")

    def __init__(self, key: BlockKey, parent: Block | None, slot: int, owner: Account) -> None:
        self.key = key
        self.parent = parent
        self.slot = slot
        self.owner = owner
        self.leases = 0
        self.next: Block | None = None
        """The visible block that came last of those that continue this one, as far as is known."""
        self.children = 0
        """Visible blocks that continue this one, as far as they are counted here."""


_NOWHERE = Block(b"", None, NO_SLOT, Accounts().nobody)
"""What the head of a chain follows."""


class Namespace:
    """The blocks of engines that may share, and the pool that holds their bytes."""

    __slots__ = (
        "anchors", "block_seconds", "blocks", "by_slab", "changes", "digest", "doomed", "leaving",
        "manifest", "orders", "pool", "records", "sessions", "uses",
    )  # fmt: skip

    def __init__(self, manifest: Manifest, pool: Pool) -> None:
        self.digest = manifest.digest()
        self.manifest = manifest
        self.pool = pool
        self.blocks: dict[BlockKey, Block] = {}
        self.anchors: dict[BlockKey, Block] = {}
        """Parents that are not visible, or were not when visible blocks came to continue them.

        The children of one key are counted in one place: here while it has an anchor, even after
        it became visible again, and otherwise in the visible block.
        """
        self.by_slab: dict[int, list[Block | None]] = {}
        """What lies in each slot of each slab, so that one slab can be emptied."""
        self.doomed: set[Block] = set()
        """Dropped while leased: invisible to lookups, and gone with the last lease."""
        self.leaving = 0
        """Visible blocks that go as soon as a lower tier has them."""
        self.records = Space(
            self.digest, manifest.slot_bytes, manifest.readable(), manifest.element_bytes
        )
        self.sessions = 0
        self.uses: dict[BlockKey, int] = {}
        """How many lookups began with each head of a chain, since it came."""
        self.block_seconds: float | None = None
        """What computing a block took lately; None if that is not measured yet."""
        self.changes = ChangeLog(self._pieces)
        self.orders = Orders()
        pool.policy.follow(self)

    @property
    def policy(self) -> EvictionPolicy:
        """The pool's, which knows the visible blocks."""
        return self.pool.policy

    def owner_of(self, key: BlockKey) -> Account | None:
        """Return whom a block is charged to, or None if it is not visible."""
        block = self.blocks.get(key)
        return None if block is None else block.owner

    @property
    def torn(self) -> bool:
        """Whether visible blocks continue one that is not visible, or was not when they came."""
        return bool(self.anchors)

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        """Return the parent of a visible block, if it has one."""
        block = self.blocks.get(key)
        return None if block is None or block.parent is None else block.parent.key

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Record one request's use of a chain."""
        self.pool.policy.touch(chain)
        if self.orders:
            self.orders.touch(chain, self.owner_of)

    def prefix(self, keys: Sequence[BlockKey], start: int) -> list[Block]:
        """Return the blocks of the longest contiguous run of `keys` from `start` on.

        What was stored one after the other lies near each other in memory, and is found through the
        block before it: among a million blocks the index would cost a cache miss for each.
        """
        found: list[Block] = []
        append, blocks = found.append, self.blocks
        block = _NOWHERE
        try:
            for key in islice(keys, start, None):
                after = block.next
                block = after if after is not None and after.key == key else blocks[key]
                append(block)
        except KeyError:
            pass
        return found

    def add(self, key: BlockKey, parent: BlockKey, slot: int, owner: Account) -> Block:
        """Make a block visible, and charge it to its owner."""
        above = None
        if parent:
            above = self.anchors.get(parent) or self.blocks.get(parent)
            if above is None:
                above = self.anchors[parent] = Block(parent, None, NO_SLOT, owner)
            above.children += 1
        block = self.blocks[key] = Block(key, above, slot, owner)
        if above is not None:
            above.next = block
        self._place(slot, block)
        owner.charge(Tier.HOST, self.pool.slot_bytes)
        self.orders.add(owner, key, self.pool.slot_bytes, parent or None)
        if self.changes.watchers:
            self.changes.note(key, parent)
        return block

    def remove(self, block: Block) -> None:
        """Make a block invisible; its slot is the caller's to give back."""
        del self.blocks[block.key]
        self._place(block.slot, None)
        block.owner.charge(Tier.HOST, -self.pool.slot_bytes)
        self.orders.remove(block.owner, block.key)
        if block.children:
            self.anchors[block.key] = block
        self.uses.pop(block.key, None)
        if (above := block.parent) is not None:
            above.children -= 1
            if above.next is block:
                above.next = None
            if not above.children and self.anchors.get(above.key) is above:
                del self.anchors[above.key]
        if self.changes.watchers:
            self.changes.note(block.key, None)

    def move(self, block: Block, slot: int) -> None:
        """Note that a visible block lies in another slot now."""
        self._place(block.slot, None)
        block.slot = slot
        self._place(slot, block)

    def continued(self, block: Block) -> bool:
        """Return whether a visible block continues this one: it is not evicted before those."""
        return block.children > 0 or block.key in self.anchors

    def in_slab(self, number: int) -> list[Block]:
        """Return the visible blocks that lie in a slab."""
        return [block for block in self.by_slab.get(number, ()) if block is not None]

    def leave_slab(self, number: int) -> None:
        """Forget an empty slab that moves to another pool."""
        self.by_slab.pop(number, None)

    def _place(self, slot: int, block: Block | None) -> None:
        number = slot >> SLOT_INDEX_BITS
        row = self.by_slab.get(number)
        if row is None:
            row = self.by_slab[number] = [None] * self.pool.slabs[number].slots
        row[slot & SLOT_INDEX_MASK] = block

    def _pieces(self) -> Iterator[list[Placed]]:
        """Walk over the visible blocks in the order of their slots; see `ChangeLog`."""
        for row in list(self.by_slab.values()):
            for at in range(0, len(row), KEYS_AT_ONCE):
                yield [
                    (block.key, block.parent.key if block.parent is not None else b"")
                    for block in row[at : at + KEYS_AT_ONCE]
                    if block is not None
                ]


class Directory:
    """All namespaces, by digest."""

    def __init__(self) -> None:
        self.namespaces: dict[str, Namespace] = {}
        self.accounts = Accounts()

    def __len__(self) -> int:
        return sum(len(space.blocks) for space in self.namespaces.values())

    def sizes(self, like: Manifest) -> list[int]:
        """Return the shard sizes of namespaces whose manifests are otherwise equal to `like`."""
        found = [space.manifest for space in self.namespaces.values()]
        return sorted(
            one.shard_bytes for one in found if replace(one, shard_bytes=like.shard_bytes) == like
        )
