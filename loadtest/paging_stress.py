"""Random loads, stores and reuse of blocks beside a model that computes, with all bytes checked.

It plays the part of the connector on one rank, by the contract of `kvtier.engine.paging.Paging`:
a block is written again, or loaded into, only after a fence on the stores that still read it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from kvtier.engine.paging import Copy, Paging, Transfer

SETTLE_EVERY = 16
"""Steps after which what the model has read is checked."""
MOST_POLLS = 100
"""Calls of `done`, after the device has nothing left to do, until all transfers must be over."""
VALUES_A_BLOCK = 256
"""More than there are layers: a value is one layer's of one block's content."""


class Model(Protocol):
    """What the engine computes. Calls return at once; the work is done in the order of the calls.

    `caches`: one tensor a layer, [blocks, ...], int32.
    """

    caches: list[torch.Tensor]

    def write(self, block: int, values: list[int]) -> None:
        """Fill the block of each layer with its value."""
        ...

    def read(self, block: int) -> list[torch.Tensor]:
        """Copy the block of each layer. The copies hold their bytes after `settle`."""
        ...

    def settle(self) -> None:
        """Wait for all work."""
        ...


@dataclass(slots=True)
class Under:
    """A transfer on its way: (block, slot, content) each."""

    transfer: Transfer
    moves: list[tuple[int, int, int]]


@dataclass(slots=True)
class Stress:
    """One run. `shards` are the slots. Contents are numbered from 1; 0 is none."""

    paging: Paging
    model: Model
    shards: Sequence[torch.Tensor]
    seed: int
    wrong: list[str] = field(default_factory=list)
    """What had other bytes than it should have, as sentences."""
    counts: Counter[str] = field(default_factory=Counter)
    _random: random.Random = field(init=False)
    _blocks: dict[int, int] = field(init=False)
    """Block → its content, for those that no load is writing."""
    _slots: dict[int, int] = field(default_factory=dict)
    """Slot → its content, for those that can be loaded."""
    _free: set[int] = field(init=False)
    _loads: list[Under] = field(default_factory=list)
    _stores: list[Under] = field(default_factory=list)
    _fenced: list[Under] = field(default_factory=list)
    """Loads that the model waits for: their blocks are in use, and their slots are still read."""
    _readings: list[tuple[int, list[torch.Tensor]]] = field(default_factory=list)
    _contents: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._blocks = dict.fromkeys(range(self.model.caches[0].shape[0]), 0)
        self._free = set(range(len(self.shards)))

    def run(self, steps: int) -> None:
        """Run steps, and check what they left."""
        for step in range(1, steps + 1):
            self._step()
            if step % SETTLE_EVERY == 0:
                self._check_readings()
        self.paging.begin_step()
        self.model.settle()
        for _ in range(MOST_POLLS):
            self._poll()
        assert [*self._loads, *self._stores, *self._fenced] == [], "all transfers end"
        for block in self._blocks:
            self._read(block)
        self._check_readings()

    def _step(self) -> None:
        written, early, late = self._choose()
        self.paging.begin_step()
        self._fence({*written, *(block for block, _, _ in [*early, *late])})
        if early:
            transfer = self._load(early)
            self.paging.fence([transfer])
            self._fenced.append(Under(transfer, early))
            self._blocks |= {block: content for block, _, content in early}
        for block in written:
            self._write(block)
        for block in self._sample(self._blocks, 3):
            self._read(block)
        if late:
            self._loads.append(Under(self._load(late), late))
        self._store()
        self._poll()
        self._forget()

    def _choose(self) -> tuple[list[int], list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Return blocks to compute, and what to load before and after that."""
        blocks = self._sample(self._blocks, 8)
        slots = self._sample(self._slots, self._random.randint(0, 4))
        moves = [
            (block, slot, self._slots[slot]) for block, slot in zip(blocks, slots, strict=False)
        ]
        first = self._random.randint(0, len(moves))
        for block, _, _ in moves:
            del self._blocks[block]
        return blocks[len(moves) :], moves[:first], moves[first:]

    def _fence(self, blocks: set[int]) -> None:
        self.paging.fence(
            under.transfer
            for under in self._stores
            if any(block in blocks for block, _, _ in under.moves)
        )

    def _load(self, moves: list[tuple[int, int, int]]) -> Transfer:
        self.counts["loads"] += len(moves)
        return self.paging.load([Copy(block, self.shards[slot]) for block, slot, _ in moves])

    def _write(self, block: int) -> None:
        self._contents += 1
        self._blocks[block] = self._contents
        self.model.write(block, self._values(self._contents))

    def _read(self, block: int) -> None:
        if self._blocks[block]:
            self._readings.append((self._blocks[block], self.model.read(block)))

    def _store(self) -> None:
        blocks = self._sample([block for block, held in self._blocks.items() if held], 4)
        slots = self._sample(self._free, len(blocks))
        moves = [
            (block, slot, self._blocks[block]) for block, slot in zip(blocks, slots, strict=False)
        ]
        self._free -= set(slots)
        self.counts["stores"] += len(moves)
        copies = [Copy(block, self.shards[slot]) for block, slot, _ in moves]
        self._stores.append(Under(self.paging.store(copies), moves))

    def _poll(self) -> None:
        for under in [each for each in self._stores if each.transfer.done()]:
            self._stores.remove(under)
            for _, slot, content in under.moves:
                self._slots[slot] = content
                self._check(f"slot {slot}", content, self.shards[slot].view(torch.int32))
        for under in [each for each in self._loads if each.transfer.done()]:
            self._loads.remove(under)
            for block, _, content in under.moves:
                self._blocks[block] = content
                self._read(block)
        self._fenced = [each for each in self._fenced if not each.transfer.done()]

    def _forget(self) -> None:
        """Give up slots that nothing is loaded from, so that there are free ones."""
        loading = {slot for under in [*self._loads, *self._fenced] for _, slot, _ in under.moves}
        for slot in self._sample(self._slots.keys() - loading, 4 - len(self._free)):
            del self._slots[slot]
            self._free.add(slot)

    def _check_readings(self) -> None:
        self.model.settle()
        for content, layers in self._readings:
            whole = torch.cat([layer.flatten() for layer in layers]).cpu()
            self._check("a block", content, whole)
        self._readings.clear()

    def _check(self, what: str, content: int, found: torch.Tensor) -> None:
        self.counts["checks"] += 1
        values = torch.tensor(self._values(content), dtype=torch.int32)
        layers = found.view(len(values), -1)
        if not bool((layers == values[:, None]).all()):
            odd = int(layers[layers != values[:, None]][0])
            self.wrong.append(
                f"{what} should hold content {content}, and has bytes of {odd // VALUES_A_BLOCK}"
            )

    def _values(self, content: int) -> list[int]:
        return [content * VALUES_A_BLOCK + layer for layer in range(len(self.model.caches))]

    def _sample(self, things: Sequence[int] | set[int] | dict[int, int], count: int) -> list[int]:
        ordered = sorted(things)
        return self._random.sample(ordered, max(0, min(count, len(ordered))))
