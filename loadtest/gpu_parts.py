"""The parts of `gpu_check` that copy: bandwidth, and bytes under load, on a card.

A card is a real one, or a fake one in a test of these parts.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from kvtier.engine.cuda import Batch, CudaPaging, Device, Event, Stream
from kvtier.engine.paging import Copy

from .page_copy import make_slab
from .paging_stress import Model, Stress

ROUNDS = 7
LOG = logging.getLogger("gpu_check")


@dataclass(frozen=True, slots=True)
class Shape:
    """How a model's pages lie. `order` is which of layers and blocks is the outer dimension."""

    name: str
    order: str
    layers: int
    page_bytes: int


SHAPES = (
    Shape("8B, layer first", "LB", 32, 64 << 10),
    Shape("8B, block first", "BL", 32, 64 << 10),
    Shape("70B, a rank of 8", "LB", 80, 8 << 10),
)
STRESS_SHAPES = (Shape("layer first", "LB", 8, 16 << 10), Shape("block first", "BL", 8, 16 << 10))


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: bytes a copy and of a slab; the stress's seeds and what it is of."""

    bytes: int = 512 << 20
    slab: int = 1 << 30
    seeds: int = 6
    steps: int = 300
    blocks: int = 96
    slots: int = 64


@dataclass(slots=True)
class Report:
    """Whether all is right, and values by name. Rows are printed as they come."""

    ok: bool = True
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, what: str, value: str, remark: str = "") -> None:
        """Print a row."""
        print(f"{what:48} {value:>12}  {remark}", flush=True)

    def put(self, group: str, name: str, value: float) -> None:
        """Keep a value."""
        self.values.setdefault(group, {})[name] = round(value, 3)


class Card(Protocol):
    """Where the checks run."""

    where: str
    """Torch's name of the device."""

    def device(self) -> Device:
        """Return the device as the paging needs it."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Return pinned host memory, uint8 [size]."""
        ...

    def model(self, caches: list[torch.Tensor]) -> Model:
        """Return what computes beside the copies."""
        ...

    def settle(self) -> None:
        """Wait for all that the device was given."""
        ...


# Bandwidth.


def check_bandwidth(report: Report, card: Card, sizes: Sizes) -> None:
    """Measure loads and stores beside the card's own copies of pinned memory."""
    own = _own_bandwidth(card, sizes.bytes)
    for direction, speed in own.items():
        report.add(f"pinned copy, {direction}", f"{speed / 1e9:.1f} GB/s")
        report.put("pinned_bytes_per_second", direction, speed)
    for shape in SHAPES:
        found = _measure(report, shape, card, sizes)
        for direction, speed in found.items():
            name, ratio = f"{shape.name}, {direction}", speed / own[direction]
            report.add(name, f"{speed / 1e9:.1f} GB/s", f"{ratio:.2f} of a pinned copy")
            report.put("ratio", name, ratio)


def check_unpinned(report: Report, card: Card, sizes: Sizes) -> None:
    """Check and measure memory that the driver did not pin."""
    unpinned = UnpinnedCard(card)
    for shape in STRESS_SHAPES:
        _check_bytes(report, f"{shape.name}, unpinned", shape, unpinned, sizes)
    shape = SHAPES[0]
    for direction, speed in _measure(report, shape, unpinned, sizes).items():
        report.add(f"{shape.name}, unpinned, {direction}", f"{speed / 1e9:.1f} GB/s")
        report.put("unpinned_bytes_per_second", direction, speed)


def _measure(report: Report, shape: Shape, card: Card, sizes: Sizes) -> dict[str, float]:
    """Return bytes a second of loads and stores."""
    blocks = max(1, sizes.bytes // (shape.layers * shape.page_bytes))
    paging = _paging(make_caches(shape, blocks, card.where), blocks, card.device())
    slab = make_slab(max(sizes.slab, blocks * paging.shard_bytes))
    took = _seconds(lambda: paging.attach(slab))
    report.add(f"{shape.name}, attaching {slab.numel() >> 20} MiB", f"{took * 1e3:.0f} ms")
    shards = list(slab[: blocks * paging.shard_bytes].view(blocks, -1))
    copies = list(map(Copy, random.Random(3).sample(range(blocks), blocks), shards))

    def store() -> None:
        paging.store(copies)
        paging.begin_step()

    works = {"load": lambda: paging.load(copies), "store": store}
    size = blocks * paging.shard_bytes
    speeds = {name: _bandwidth(work, card, size) for name, work in works.items()}
    took = _seconds(works["load"])
    report.add(f"{shape.name}, handing over {blocks} blocks", f"{took * 1e3:.2f} ms")
    paging.close()
    return speeds


def _own_bandwidth(card: Card, size: int) -> dict[str, float]:
    pinned = card.pinned(size)
    inside = torch.empty(size, dtype=torch.uint8, device=card.where)
    works = {
        "load": lambda: inside.copy_(pinned, non_blocking=True),
        "store": lambda: pinned.copy_(inside, non_blocking=True),
    }
    return {name: _bandwidth(work, card, size) for name, work in works.items()}


def _bandwidth(work: Callable[[], object], card: Card, size: int) -> float:
    """Return the median of bytes a second at which `work` moves `size` bytes."""

    def whole() -> None:
        work()
        card.settle()

    card.settle()
    return size / statistics.median(_seconds(whole) for _ in range(ROUNDS))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# Right bytes.


def check_bytes(report: Report, card: Card, sizes: Sizes) -> None:
    """Run the stress with all waits, and without, to see that it can fail."""
    for shape in STRESS_SHAPES:
        _check_bytes(report, f"{shape.name}, pinned", shape, card, sizes)
    found = [_stress(STRESS_SHAPES[0], DeafCard(card), sizes, seed) for seed in range(3)]
    wrong = sum(len(stress.wrong) for stress in found)
    report.add("bytes under load, no waits at all", f"{wrong} wrong", "none would prove nothing")
    report.put("wrong", "no waits at all", wrong)
    report.ok = report.ok and wrong > 0


def _check_bytes(report: Report, name: str, shape: Shape, card: Card, sizes: Sizes) -> None:
    found = [_stress(shape, card, sizes, seed) for seed in range(sizes.seeds)]
    wrong = [line for stress in found for line in stress.wrong]
    checks = sum(stress.counts["checks"] for stress in found)
    remark = f"of {checks} checks" + (f"; {wrong[0]}" if wrong else "")
    report.add(f"bytes under load, {name}", f"{len(wrong)} wrong", remark)
    report.put("wrong", name, len(wrong))
    report.ok = report.ok and not wrong


def _stress(shape: Shape, card: Card, sizes: Sizes, seed: int) -> Stress:
    caches = make_caches(shape, sizes.blocks, card.where)
    paging = _paging(caches, sizes.blocks, card.device())
    slab = make_slab(sizes.slots * paging.shard_bytes)
    paging.attach(slab)
    stress = Stress(paging, card.model(caches), list(slab.view(sizes.slots, -1)), seed)
    stress.run(sizes.steps)
    paging.close()
    return stress


def make_caches(shape: Shape, blocks: int, where: str) -> list[torch.Tensor]:
    """Return zeroed caches [blocks, int32 words], one a layer, in one storage."""
    words = shape.page_bytes // 4
    if shape.order == "LB":
        return list(torch.zeros(shape.layers, blocks, words, dtype=torch.int32, device=where))
    whole = torch.zeros(blocks, shape.layers, words, dtype=torch.int32, device=where)
    return [whole[:, layer] for layer in range(shape.layers)]


def _paging(caches: list[torch.Tensor], blocks: int, device: Device) -> CudaPaging:
    LOG.setLevel(logging.ERROR)  # Memory is left unpinned on purpose here.
    return CudaPaging(caches, blocks, device, LOG)


# Cards and devices.


class CudaCard:
    """A real card, and the calling thread's stream as the model's."""

    def __init__(self, device: Device, where: str) -> None:
        self.where = where
        self._device = device

    def device(self) -> Device:
        """Return the device."""
        return self._device

    def pinned(self, size: int) -> torch.Tensor:
        """Return memory of torch's own pinning."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def model(self, caches: list[torch.Tensor]) -> Model:
        """Return a model that keeps the device behind the host."""
        return CudaModel(caches)

    def settle(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()


class CudaModel:
    """Work of the calling thread's stream. Before each write stands a matrix product, so that the
    device is behind the host, as it is in an engine."""

    def __init__(self, caches: list[torch.Tensor]) -> None:
        self.caches = caches
        self._busy = torch.ones(2048, 2048, device=caches[0].device)

    def write(self, block: int, values: list[int]) -> None:
        """Fill the block of each layer with its value."""
        torch.mm(self._busy, self._busy)
        for cache, value in zip(self.caches, values, strict=True):
            cache[block].fill_(value)

    def read(self, block: int) -> list[torch.Tensor]:
        """Copy the block of each layer."""
        return [cache[block].clone() for cache in self.caches]

    def settle(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()


class Wrapped:
    """A device that passes everything on."""

    def __init__(self, inner: Device) -> None:
        self._inner = inner

    def current(self) -> Stream:
        """Return the model's stream."""
        return self._inner.current()

    def side(self) -> Stream:
        """Return a new stream."""
        return self._inner.side()

    def to_device(self, stream: Stream, batch: Batch) -> None:
        """Copy shards to pages."""
        self._inner.to_device(stream, batch)

    def to_host(self, stream: Stream, batch: Batch) -> None:
        """Copy pages to shards."""
        self._inner.to_host(stream, batch)

    def register(self, address: int, size: int) -> bool:
        """Pin host memory."""
        return self._inner.register(address, size)

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._inner.unregister(address)


class Unpinned(Wrapped):
    """A device whose driver pins nothing."""

    def register(self, address: int, size: int) -> bool:  # noqa: ARG002
        """Refuse."""
        return False


class Deaf(Wrapped):
    """A device whose streams wait for no event."""

    def current(self) -> Stream:
        """Return the model's stream."""
        return DeafStream(self._inner.current())

    def side(self) -> Stream:
        """Return a new stream."""
        return DeafStream(self._inner.side())

    def to_device(self, stream: Stream, batch: Batch) -> None:
        """Copy shards to pages."""
        assert isinstance(stream, DeafStream)
        self._inner.to_device(stream.inner, batch)

    def to_host(self, stream: Stream, batch: Batch) -> None:
        """Copy pages to shards."""
        assert isinstance(stream, DeafStream)
        self._inner.to_host(stream.inner, batch)


@dataclass(frozen=True, slots=True)
class DeafStream:
    """A stream that waits for no event."""

    inner: Stream

    def record_event(self) -> Event:
        """Return the point behind all that it was given."""
        return self.inner.record_event()

    def wait_event(self, event: Event) -> None:
        """Do nothing."""


class UnpinnedCard:
    """A card whose driver pins nothing."""

    wrap: type[Wrapped] = Unpinned

    def __init__(self, inner: Card) -> None:
        self.where = inner.where
        self.pinned, self.model, self.settle = inner.pinned, inner.model, inner.settle
        self._inner = inner

    def device(self) -> Device:
        """Return the device, wrapped."""
        return self.wrap(self._inner.device())


class DeafCard(UnpinnedCard):
    """A card whose streams wait for no event."""

    wrap = Deaf
