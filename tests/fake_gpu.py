"""A device for tests of orders: queues, events and copies as on a GPU, over host memory.

What it is given is queued, and carried out piece by piece, in any order that the queues and the
events between them allow, chosen by a seed. So a missing wait shows as wrong bytes, in some seed.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from kvtier.engine.cuda import Batch

Work = Callable[[], object]


@dataclass(eq=False, slots=True)
class FakeEvent:
    stream: FakeStream
    passed: bool = False

    def query(self) -> bool:
        gpu = self.stream.gpu
        for _ in range(gpu.random.randrange(4)):
            gpu.work()
        return self.passed

    def synchronize(self) -> None:
        while not self.passed:
            assert self.stream.gpu.work(), "the device waits for what nobody gave it"

    def pass_by(self) -> None:
        self.passed = True


@dataclass(eq=False, slots=True)
class Wait:
    """In a queue: what follows comes after the event."""

    event: FakeEvent


@dataclass(eq=False, slots=True)
class FakeStream:
    gpu: FakeGpu
    name: str
    haste: float
    """How often its turn comes, beside the others."""
    todo: deque[Wait | list[Work]] = field(default_factory=deque)
    """Lists of work in any order, one after the other."""

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self)
        self.enqueue([event.pass_by])
        return event

    def wait_event(self, event: FakeEvent) -> None:
        pair = (self.name, event.stream.name)
        self.gpu.waits.add(pair)
        if pair not in self.gpu.deaf:
            self.todo.append(Wait(event))

    def enqueue(self, works: list[Work]) -> None:
        self.todo.append(works)

    def ready(self) -> bool:
        while self.todo and isinstance(head := self.todo[0], Wait) and head.event.passed:
            self.todo.popleft()
        return bool(self.todo) and not isinstance(self.todo[0], Wait)

    def work(self) -> None:
        """Do one piece of work of the head of the queue, which is ready."""
        works = self.todo[0]
        assert isinstance(works, list)
        works.pop(self.gpu.random.randrange(len(works)))()
        if not works:
            self.todo.popleft()


class FakeGpu:
    """Implements `cuda.Device`.

    `deaf`: pairs of streams; the first does not wait for events of the second. `pins`: whether the
    driver pins memory. Where it does not, copies are staged: what is loaded is read at once, and a
    store returns when it is over.
    """

    def __init__(
        self, seed: int, deaf: frozenset[tuple[str, str]] = frozenset(), pins: bool = True
    ) -> None:
        self.random = random.Random(seed)
        self.deaf = deaf
        self.pins = pins
        self.waits: set[tuple[str, str]] = set()
        """Pairs of streams of which the first was told to wait for the second."""
        self.batches: list[Batch] = []
        self.registered: dict[int, int] = {}
        self.streams: list[FakeStream] = []
        self.compute = self._stream("compute")
        self._names = iter(("loads", "stores"))

    def current(self) -> FakeStream:
        return self.compute

    def side(self) -> FakeStream:
        return self._stream(next(self._names))

    def to_device(self, stream: FakeStream, batch: Batch) -> None:
        self.batches.append(batch)
        works = []
        for page, shard, size in zip(*(each.tolist() for each in batch), strict=True):
            early = not self._pinned(shard, size) or self.random.random() < 0.5
            source = ctypes.string_at(shard, size) if early else shard
            works.append(_copy(page, source, size))
        stream.enqueue(works)

    def to_host(self, stream: FakeStream, batch: Batch) -> None:
        self.batches.append(batch)
        rows = list(zip(*(each.tolist() for each in batch), strict=True))
        stream.enqueue([_copy(shard, page, size) for page, shard, size in rows])
        if not all(self._pinned(shard, size) for _, shard, size in rows):
            stream.record_event().synchronize()

    def register(self, address: int, size: int) -> bool:
        if self.pins:
            self.registered[address] = size
        return self.pins

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def work(self) -> bool:
        """Do one piece of work. Returns whether there was any that may be done."""
        ready = [stream for stream in self.streams if stream.ready()]
        if ready:
            self.random.choices(ready, [stream.haste for stream in ready])[0].work()
        return bool(ready)

    def settle(self) -> None:
        """Do all work that is left."""
        while self.work():
            pass
        assert not any(stream.todo for stream in self.streams)

    def _stream(self, name: str) -> FakeStream:
        stream = FakeStream(self, name, 10 ** self.random.uniform(-2, 0))
        self.streams.append(stream)
        return stream

    def _pinned(self, address: int, size: int) -> bool:
        return any(
            start <= address and address + size <= start + length
            for start, length in self.registered.items()
        )


class FakeModel:
    """What the engine computes, as `loadtest.paging_stress` has it, on a fake GPU."""

    def __init__(self, gpu: FakeGpu, caches: list[torch.Tensor]) -> None:
        self.caches = caches
        self._gpu = gpu

    def write(self, block: int, values: list[int]) -> None:
        """Fill the block of each layer with its value."""
        for cache, value in zip(self.caches, values, strict=True):
            self._gpu.compute.enqueue([lambda page=cache[block], value=value: page.fill_(value)])

    def read(self, block: int) -> list[torch.Tensor]:
        """Return the block's layers as they will be when the device has come here."""
        copies = [torch.empty_like(cache[block]) for cache in self.caches]
        for copy, cache in zip(copies, self.caches, strict=True):
            self._gpu.compute.enqueue([lambda to=copy, page=cache[block]: to.copy_(page)])
        return copies

    def settle(self) -> None:
        self._gpu.settle()


def _copy(target: int, source: int | bytes, size: int) -> Work:
    return lambda: ctypes.memmove(target, source, size)
