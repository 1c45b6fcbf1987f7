"""How fast blocks go between vLLM's pages in host memory and slots, beside a plain memcpy.

Each cell is one size of block, one number of layers and one direction. Pages lie as vLLM's CPU
backend makes them: all layers in one storage, layer after layer. Slots lie in a slab as engines map
it. Blocks and slots are in random order, and a batch is much larger than the CPU's caches. The
memcpy is libc's, of one thread, between other memory that was touched before; it is measured in
turn with the copies.

    python -m loadtest.page_copy
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from kvtier.engine.paging import Copy, HostPaging, process_cores

BLOCK_BYTES = (400_000, 2_000_000, 6_000_000)
LAYERS = (30, 80)
POOL_BYTES = 640 << 20
"""Memory on each side."""
BATCH_BYTES = 192 << 20
"""What one measurement copies."""
ROUNDS = 9
KV_HEADS, TOKENS, FLOAT_BYTES = 2, 32, 4


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. Medians: of bytes a second, and of the ratio of neighbours in time."""

    block_bytes: int
    layers: int
    direction: str
    threads: int
    bandwidth: float
    memcpy: float
    ratio: float
    """Bandwidth of the copies ÷ bandwidth of the memcpy."""


def measure() -> list[float]:
    """Return the ratio of each cell, with as many threads as HostPaging takes here."""
    return [cell.ratio for cell in cells(process_cores())]


def cells(cores: frozenset[int]) -> Iterator[Cell]:
    """Measure all cells, with HostPaging's threads on `cores`."""
    for block_bytes, layers in product(BLOCK_BYTES, LAYERS):
        yield from _measure(block_bytes, layers, cores)


def make_caches(block_bytes: int, layers: int, blocks: int) -> list[torch.Tensor]:
    """Return touched caches as vLLM's CPU backend makes them, float32, LBHNC.

    `block_bytes` is rounded down to whole heads. One view a layer of one storage:
    [blocks, KV_HEADS, TOKENS, keys and values of a head].
    """
    content = block_bytes // (layers * KV_HEADS * TOKENS * FLOAT_BYTES)
    whole = torch.ones(layers, blocks, KV_HEADS, TOKENS, content, dtype=torch.float32)
    return list(whole)


def make_slab(size: int) -> torch.Tensor:
    """Return memory mapped as an engine maps a slab, uint8 [size]."""
    descriptor = os.memfd_create("page-copy", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, size)
        memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def main() -> int:
    """Print all cells, with one thread and with as many as HostPaging takes here."""
    print(
        f"{'block':>8} {'layers':>6} {'':6} {'threads':>7} {'GB/s':>6} {'memcpy':>6} {'ratio':>6}"
    )
    cores = process_cores()
    for some in (frozenset(sorted(cores)[:1]), cores):
        for cell in cells(some):
            print(
                f"{cell.block_bytes / 1e6:6.1f}MB {cell.layers:6} {cell.direction:6} "
                f"{cell.threads:7} {cell.bandwidth / 1e9:6.2f} {cell.memcpy / 1e9:6.2f} "
                f"{cell.ratio:6.2f}",
                flush=True,
            )
    return 0


def _measure(block_bytes: int, layers: int, cores: frozenset[int]) -> list[Cell]:
    blocks = POOL_BYTES // block_bytes
    caches = make_caches(block_bytes, layers, blocks)
    paging = HostPaging(caches, blocks, cores)
    size = paging.shard_bytes
    slab = make_slab(blocks * size)
    shards = list(slab.view(blocks, size))
    count = BATCH_BYTES // size
    choose = random.Random(7).sample
    copies = [
        Copy(block, shards[slot])
        for block, slot in zip(
            choose(range(blocks), count), choose(range(blocks), count), strict=True
        )
    ]
    sides = [torch.ones(count * size, dtype=torch.uint8) for _ in range(2)]
    addresses = [side.data_ptr() for side in sides]
    works = {
        "memcpy": lambda: ctypes.memmove(*addresses, count * size),
        "load": lambda: paging.load(copies),
        "store": lambda: paging.store(copies),
    }
    seconds = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            seconds[name].append(_seconds(work))
    paging.close()

    def cell(direction: str) -> Cell:
        ratios = (
            plain / ours for plain, ours in zip(seconds["memcpy"], seconds[direction], strict=True)
        )
        speeds = (count * size / statistics.median(seconds[name]) for name in (direction, "memcpy"))
        return Cell(size, layers, direction, paging.threads, *speeds, statistics.median(ratios))

    return [cell(direction) for direction in ("load", "store")]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
