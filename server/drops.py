"""Drops: an operator removes a namespace, or a block with all that continues it, from some tiers.

Work in pieces (`walking.py`). Leased blocks become invisible, and go with their last lease; pins
end before the first block that goes. Lower tiers know no children: there, a block goes with those
that the host tier knows to continue it, and what else does can't be reached without it. Runs on
the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from .block_readings import Gone
from .blocks import PAUSE_SECONDS, PAUSES_AT_MOST
from .core import BlockKey, EvictReason, Tier
from .directory import Block, Namespace
from .hierarchy import Hierarchy
from .walking import AT_ONCE, NEXT_TURN, Work, above, walk

_T = TypeVar("_T")
SHELVES_AT_ONCE = 4
"""Of 256 parts of a lower tier's index, counted in one turn of the loop."""


class Drop:
    """One drop. `gone` says how far it is: the work may be looked at from outside any time.

    `root` is the block that goes with all below it; None is for the whole namespace.
    """

    def __init__(
        self, cache: Hierarchy, space: Namespace, tiers: frozenset[Tier], root: BlockKey | None
    ) -> None:
        self._cache = cache
        self._space = space
        self._root = root
        self._late: set[tuple[Tier, BlockKey]] = set()
        """What threads were writing to a tier when it was forgotten there."""
        self._host = Gone(Tier.HOST) if Tier.HOST in tiers else None
        self._lowers = [(one, Gone(one.tier)) for one in cache.lowers if one.tier in tiers]
        lower = [gone for _, gone in self._lowers]
        self.gone = [self._host, *lower] if self._host is not None else lower

    def count(self) -> Work[None]:
        """Find out what would go, and drop nothing."""
        space, root = self._space, self._root
        if root is None:
            self._count_host(len(space.blocks))
            yield from self._count_shelves()
            return
        blocks = yield from self._below(root)
        self._count_host(root in space.blocks)
        self._count_lower([root])
        for part in _slices(blocks):
            self._count_host(sum(space.blocks.get(block.key) is block for block in part))
            self._count_lower([block.key for block in part])
            yield NEXT_TURN

    def run(self) -> Work[None]:
        """Drop it."""
        self._cache.record_use()
        if self._root is None:
            yield from self._run_all()
        else:
            yield from self._run_below(self._root)

    def _run_all(self) -> Work[None]:
        space = self._space
        yield from self._count_shelves()
        for lower, _ in self._lowers:
            lower.wipe(space.records)
        if self._host is None:
            return
        for pin in self._cache.pins.of(space):
            self._cache.pins.remove(pin.label)
            yield NEXT_TURN
        self._cache.promotions.discard(space)
        left = len(space.blocks)  # What engines store meanwhile may stay.
        while left > 0 and (gone := self._drop_coldest()):
            left -= gone
            yield NEXT_TURN

    def _drop_coldest(self) -> int:
        """Drop some blocks, those that the policy finds soonest. Returns how many."""
        space, gone = self._space, 0
        for key in islice(space.pool.policy.victims(), AT_ONCE):
            self._cache.evictor.drop(space, space.blocks[key], EvictReason.OPERATOR)
            gone += 1
        self._count_host(gone)
        return gone

    def _run_below(self, root: BlockKey) -> Work[None]:
        """Drop the root first: nothing below it is found or read any more while it is looked for.

        What a thread was writing meanwhile appears in its tier later, and goes then.
        """
        space = self._space
        head = space.blocks.get(root)
        if self._host is not None:
            self._refuse(root)
        self._drop([] if head is None else [head])
        self._forget([root])
        below = yield from self._below(root)
        below.reverse()
        while below:
            blocks = below[: -AT_ONCE - 1 : -1]
            del below[-AT_ONCE:]  # Freeing all of them at once would hold the loop too.
            self._drop(blocks)
            self._forget([block.key for block in blocks])
            yield NEXT_TURN
        yield from self._forget_late()

    def _below(self, root: BlockKey) -> Work[list[Block]]:
        """Return what continues a block, which need not be there: climbs from each chain's end.

        Some may not be visible any more. Tails come first: the policy has the least to do then.
        """
        space, found = self._space, list[Block]()
        forks: dict[Block, bool] = {}
        for blocks in walk(space):
            steps = 0
            for block in blocks:
                if space.blocks.get(block.key) is block and not space.continued(block):
                    steps += self._climb(block, root, forks, found)
                    if steps > AT_ONCE:
                        steps = 0
                        yield NEXT_TURN
            yield NEXT_TURN
        return found

    def _climb(
        self, end: Block, root: BlockKey, forks: dict[Block, bool], found: list[Block]
    ) -> int:
        """Add what leads to a chain's end from the root, if it comes by there. Returns the steps.

        `forks` remembers where chains part, and whether that is below the root.
        """
        path: list[Block] = []
        at: Block | None = end
        while at is not None and at.key != root and at not in forks:
            path.append(at)
            at = above(self._space, at)
        below = at is not None and (at.key == root or forks[at])
        anchors = self._space.anchors
        for block in path:
            if anchors.get(block.key, block).children > 1:
                forks[block] = below
        if below:
            found += path
        return len(path)

    def _continues(
        self, block: Block, root: BlockKey, inside: set[Block], outside: set[Block]
    ) -> bool:
        """Return whether a block is below the root; `inside` and `outside` remember who is."""
        path: list[Block] = []
        at: Block | None = block
        while at is not None and at.key != root and at not in inside and at not in outside:
            path.append(at)
            at = above(self._space, at)
        below = at is not None and at not in outside
        (inside if below else outside).update(path)
        return below

    def _drop(self, blocks: Sequence[Block]) -> None:
        """Drop those from the host tier that are there, if it is one of the tiers."""
        space, cache = self._space, self._cache
        if self._host is None:
            return
        here = [block for block in blocks if space.blocks.get(block.key) is block]
        cache.pins.cut(space, set(here))
        for block in here:
            cache.evictor.drop(space, block, EvictReason.OPERATOR)
        self._count_host(len(here))

    def _forget(self, keys: Sequence[BlockKey]) -> None:
        """Drop records from the lower tiers, also those that only the medium knows."""
        self._count_lower(keys)
        tiers = {lower.tier for lower, _ in self._lowers}
        gone = set(keys)
        self._late |= {one for one in self._written_now() if one[0] in tiers and one[1] in gone}
        for lower, _ in self._lowers:
            lower.drop(self._space.records, keys, EvictReason.OPERATOR)

    def _refuse(self, root: BlockKey) -> None:
        """Let nothing that is being read become visible, if it is the root or below it."""
        space, cache = self._space, self._cache
        cache.promotions.cut_off(space, root)
        cache.prefetches.cut_off(space, root)
        coming = {one.key: one for one in cache.promotions.incoming if one.space is space}
        below: dict[BlockKey, bool] = {}
        memory: tuple[set[Block], set[Block]] = set(), set()
        for one in coming.values():
            path, at = [one.key], one
            while at.key not in below and at.key != root and at.parent in coming:
                at = coming[at.parent]
                path.append(at.key)
            goes = below.get(at.key)
            if goes is None:
                goes = root in (at.key, at.parent) or self._is_below(at.parent, root, *memory)
            below |= dict.fromkeys(path, goes)
            one.discarded = one.discarded or goes

    def _is_below(
        self, key: BlockKey, root: BlockKey, inside: set[Block], outside: set[Block]
    ) -> bool:
        block = self._space.blocks.get(key) or self._space.anchors.get(key)
        return block is not None and self._continues(block, root, inside, outside)

    def _forget_late(self) -> Work[None]:
        """Forget what was being written when it was forgotten first, once that has ended."""
        for _ in range(PAUSES_AT_MOST):
            if self._late.isdisjoint(self._written_now()):
                break
            yield PAUSE_SECONDS
        for keys in _slices([key for _, key in self._late]):
            self._forget(keys)
            yield NEXT_TURN

    def _written_now(self) -> set[tuple[Tier, BlockKey]]:
        return {(tier, block.key) for tier, block in self._cache.cascade.writing}

    def _count_host(self, blocks: int) -> None:
        if self._host is not None:
            self._host.add(blocks, blocks * self._space.pool.slot_bytes)

    def _count_lower(self, keys: Sequence[BlockKey]) -> None:
        for lower, gone in self._lowers:
            sizes = [lower.index.size(self._space.digest, key) for key in keys]
            gone.add(sum(size > 0 for size in sizes), sum(sizes))

    def _count_shelves(self) -> Work[None]:
        for lower, gone in self._lowers:
            for number, (blocks, size) in enumerate(lower.index.shelves(self._space.digest)):
                gone.add(blocks, size)
                if not number % SHELVES_AT_ONCE:
                    yield NEXT_TURN


def _slices(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for at in range(0, len(items), AT_ONCE):
        yield items[at : at + AT_ONCE]
