"""One simulated engine: a scheduler's and a worker's session, pages of its own, and real copies.

It does what the connector does for a request, call by call, without vLLM and torch: it looks a
prompt up, copies slots into its pages, ends the lease; it asks for slots, copies its pages there,
commits. It takes the time of each call, and looks at the bytes that it loaded.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

import numpy as np
from kvtier import protocol as wire
from kvtier.core import KEY_BYTES, SLOT_INDEX_BITS, SLOT_INDEX_MASK, Role

from ..engines import MANIFEST, connect, unanswered
from ..rig import RigError
from .prompts import Pages, Shape, check, check_ends, fill, keys_of


class Work(StrEnum):
    """What an engine does again and again."""

    LOOKUP = "lookup"
    """Ask for a prompt that is there, and end the lease: what a scheduler asks for a request."""
    LOAD = "load"
    """The same, and between the two copy the blocks into the engine's pages."""
    STORE = "store"
    """Ask for slots, copy pages there, and commit them."""


class Engine:
    """Asks the server at `socket` for prompts `prompt-0`, `prompt-1`, and so on."""

    def __init__(self, socket: Path, name: str, shape: Shape) -> None:
        """Connect both halves. Raises RigError."""
        manifest = dataclasses.replace(MANIFEST, shard_bytes=shape.block_bytes)
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        """What each call took, by its name."""
        self.name = name
        self._shape = shape
        self._scheduler = connect(socket, name, manifest)
        self._worker = connect(socket, name, manifest, Role.WORKER)
        self._slabs: dict[int, Pages] = {}
        self._pages = np.zeros((shape.prompt_blocks, shape.block_bytes), np.uint8)
        self._prompts: dict[str, bytes] = {}
        self._stored = 0
        welcome = self._worker.meet()
        for number in () if welcome is None else welcome.slabs:
            self._slab(number)  # As a worker does it: no copy waits for that.

    def close(self) -> None:
        """End both sessions, and let go of the server's memory."""
        self._scheduler.close()
        self._worker.close()
        self._slabs.clear()

    def turn(self, work: Work, prompt: str) -> int:
        """Do one piece of work; of stores each is new. Returns its blocks. Raises RigError."""
        match work:
            case Work.LOOKUP:
                return self._with_prompt(prompt, _nothing)
            case Work.LOAD:
                return self._with_prompt(prompt, self._load_and_check_ends)
            case Work.STORE:
                self._stored += 1
                name = f"{self.name}-{self._stored}"
                self.store(keys_of(name, self._shape.store_blocks))
                return self._shape.store_blocks

    def settle(self) -> None:
        """Wait until the server has done all that it was asked for. Raises RigError."""
        if self._scheduler.step(wire.Step(0)) is None:
            raise unanswered(self._scheduler, "a step")

    def add(self, prompt: str, blocks: int) -> None:
        """Store so many blocks of a prompt that others ask for. Raises RigError."""
        self.store(keys_of(prompt, blocks))

    def load_whole(self, prompt: str) -> None:
        """Load a prompt and compare all of its bytes. Raises RigError."""
        self._with_prompt(prompt, self._load_and_check)

    def store(self, keys: bytes) -> None:
        """Store blocks, all of them. Raises RigError."""
        blocks = len(keys) // KEY_BYTES
        fill(self._pages[:blocks], keys)
        began = time.perf_counter()
        granted = self._scheduler.step(wire.Step(0, need=blocks))
        self._took("reserve", began)
        if granted is None:
            raise unanswered(self._scheduler, "a step that needs slots")
        if len(granted.slots) != blocks:
            raise RigError(f"the server gave {len(granted.slots)} of {blocks} slots.")
        began = time.perf_counter()
        for slab, indices, rows in self._places(granted.slots):
            slab[indices] = self._pages[rows]
        self._took("copy_to_slots", began)
        began = time.perf_counter()
        chain = wire.Chain(b"", keys, granted.slots)
        if self._scheduler.step(wire.Step(0, commits=[chain])) is None:
            raise unanswered(self._scheduler, "a commit")
        self._took("commit", began)

    def _with_prompt(self, prompt: str, use: Callable[[bytes, Sequence[int]], None]) -> int:
        keys = self._keys(prompt)
        began = time.perf_counter()
        found = self._scheduler.lookup(keys, 0)
        self._took("lookup", began)
        if found is None:
            raise unanswered(self._scheduler, "a lookup")
        blocks = len(found.slots)
        if blocks != self._shape.prompt_blocks:
            raise RigError(
                f"{blocks} of {self._shape.prompt_blocks} blocks of {prompt} were there."
            )
        use(keys, found.slots)
        asked = wire.Asked("", blocks, 0, blocks)
        self._scheduler.send_step(wire.Step(0, releases=[found.seq], asked=[asked]))
        return blocks

    def _keys(self, prompt: str) -> bytes:
        if prompt not in self._prompts:
            self._prompts[prompt] = keys_of(prompt, self._shape.prompt_blocks)
        return self._prompts[prompt]

    def _load(self, slots: Sequence[int]) -> None:
        began = time.perf_counter()
        for slab, indices, rows in self._places(slots):
            np.take(slab, indices, axis=0, out=self._pages[rows], mode="clip")
        self._took("load", began)

    def _load_and_check(self, keys: bytes, slots: Sequence[int]) -> None:
        self._load(slots)
        check(self._pages, keys)

    def _load_and_check_ends(self, keys: bytes, slots: Sequence[int]) -> None:
        self._load(slots)
        check_ends(self._pages, keys)

    def _places(self, slots: Sequence[int]) -> list[tuple[Pages, np.ndarray, slice]]:
        """Return slabs, the slots in them, and the pages that belong there: runs of one slab."""
        packed = np.array(slots, np.int64)
        numbers = packed >> SLOT_INDEX_BITS
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(slots)]
        return [
            (self._slab(int(numbers[a])), packed[a:b] & SLOT_INDEX_MASK, slice(a, b))
            for a, b in itertools.pairwise(cuts)
        ]

    def _slab(self, number: int) -> Pages:
        """Return a slab's slots, mapped with all page tables as a worker does it."""
        if number not in self._slabs:
            mapped = self._worker.map_slab(number)
            if mapped is None:
                raise unanswered(self._worker, f"the map of slab {number}")
            descriptor, size = mapped
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            os.close(descriptor)
            whole = size - size % self._shape.block_bytes
            slots = np.frombuffer(memory, np.uint8, whole)
            self._slabs[number] = slots.reshape(-1, self._shape.block_bytes)
        return self._slabs[number]

    def _took(self, call: str, began: float) -> None:
        self.seconds[call].append(time.perf_counter() - began)


def _nothing(keys: bytes, slots: Sequence[int]) -> None:
    """The blocks are not wanted."""
