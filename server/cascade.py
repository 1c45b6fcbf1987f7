"""The cascade: which blocks of the host tier are written to which lower tier, and when.

By a tier's write mode: when a block is committed, when it is used again, or when it leaves the host
tier for room. A block that is being written is leased by the cascade, and its slot stays what it
is. A tier that can't keep up is not waited for: what comes is dropped, and counted. Runs on the
event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from .core import EvictReason, Tier, WriteMode, WriteOutcome
from .directory import Block, Namespace
from .eviction import Evictor
from .lower import LowerTier

USES = 2
"""A block that was used so often is written by a tier that writes `on_reuse`."""


class Cascade:
    """All writes of blocks to lower tiers."""

    def __init__(self, evictor: Evictor, lowers: Sequence[LowerTier]) -> None:
        self.writing: set[tuple[Tier, Block]] = set()
        """Blocks that are being written to a tier: each is leased for that."""
        self._evictor = evictor
        self._lowers = lowers
        self._leaving: set[Block] = set()
        """Go from the host tier as soon as they are written."""
        if lowers:
            evictor.demote = self.demote

    def committed(self, space: Namespace, blocks: Iterable[Block]) -> None:
        """Blocks became visible in the host tier."""
        for lower in self._in_mode(WriteMode.THROUGH):
            for block in blocks:
                self._write(lower, space, block)

    def used(self, space: Namespace, blocks: Iterable[Block]) -> None:
        """Blocks of the host tier were used again."""
        writers = self._in_mode(WriteMode.ON_REUSE)
        if writers:
            for block in blocks:
                block.uses += 1
                for lower in writers if block.uses >= USES else ():
                    self._write(lower, space, block)

    def demote(self, space: Namespace, block: Block) -> bool:
        """Keep a block that is to leave the host tier until it was written.

        Returns False where no tier wants it: it may go at once.
        """
        begun = [self._write(lower, space, block) for lower in self._in_mode(WriteMode.ON_EVICT)]
        if any(begun):
            self._leaving.add(block)
            space.leaving += 1
        return any(begun)

    def _in_mode(self, mode: WriteMode) -> list[LowerTier]:
        return [lower for lower in self._lowers if lower.write_mode is mode]

    def _write(self, lower: LowerTier, space: Namespace, block: Block) -> bool:
        """Begin to write a block. Returns whether it was begun.

        One that is not visible any more has no slot: its use may be told late.
        """
        one = (lower.tier, block)
        if space.blocks.get(block.key) is not block:
            return False
        if one in self.writing or lower.holds(space.records, block.key):
            return False
        parent = block.parent.key if block.parent is not None else b""
        payload = self._evictor.host.memory(block.slot, space.pool)
        done = partial(self._written, space, one)
        if lower.write(space.records, block.key, parent, payload, done) is not None:
            return False
        block.leases += 1
        self.writing.add(one)
        return True

    def _written(self, space: Namespace, one: tuple[Tier, Block], _: WriteOutcome) -> None:
        self.writing.discard(one)
        block = one[1]
        self._evictor.unlease(space, [block])
        elsewhere = any((lower.tier, block) in self.writing for lower in self._lowers)
        if block in self._leaving and not elsewhere:
            self._leaving.discard(block)
            space.leaving -= 1
            unwanted = not block.leases and not space.continued(block)
            if unwanted and space.blocks.get(block.key) is block:
                self._evictor.drop(space, block, EvictReason.CAPACITY)
