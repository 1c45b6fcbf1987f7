"""Between vLLM's pages and a slot's shard: which bytes of a block lie where, and who copies them.

A block is one page a layer. Its shard is all pages one after the other, in the order of the
layers, raw bytes as vLLM has them. Layers whose pages lie at equal distances in one storage are
one run. Everything here is called in the worker's one thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import torch

from ..errors import EngineError

WORD_BYTES = 8
"""Copies go in words where sizes allow: fewer elements for the same bytes."""
MOST_THREADS = 2
"""Two copy 1.4 times as fast as one where the memory allows it."""
SHARED_BYTES = 4 << 20
"""A batch of fewer bytes is copied before a second thread would have come to it."""


class Copy(NamedTuple):
    """One block and its shard: uint8 [shard_bytes], contiguous, inside an attached slab."""

    block: int
    shard: torch.Tensor


class Transfer(Protocol):
    """Copies on their way."""

    def done(self) -> bool:
        """Return whether all bytes are in place. Never blocks."""
        ...


class Paging(ABC):
    """Copies between the pages of one rank's KV caches and shards.

    A store copies the bytes that its blocks have after all that the engine's device had been given
    when it was called. A load comes after all that the device had been given at the last
    `begin_step`, so its blocks must be of no use to the step itself. Between a call and its end,
    the blocks of a load and the shards of a store have no certain bytes, and nobody may write what
    is being read: either the transfer is done, or a fence has put it in order.
    """

    asynchronous: ClassVar[bool]
    """False: transfers are done when the call returns. True: they go on beside the model."""
    layers: int
    layout: str
    """The order of bytes in a page, as text: equal for engines that can share blocks."""
    shard_bytes: int

    @abstractmethod
    def attach(self, slab: torch.Tensor) -> None:
        """Make a slab ready, uint8 [bytes], all of it, once, before shards of it are used."""

    @abstractmethod
    def detach(self, slab: torch.Tensor) -> None:
        """Let go of a slab before it is unmapped. Waits for the transfers that use it."""

    @abstractmethod
    def begin_step(self) -> None:
        """Start the stores put off. Called in every step before what it computes is enqueued."""

    @abstractmethod
    def load(self, copies: Sequence[Copy]) -> Transfer:
        """Copy shards into the pages of their blocks. A block is named once at most.

        The shards hold their bytes already: a load is not ordered after a store of the same shard.
        """

    @abstractmethod
    def store(self, copies: Sequence[Copy]) -> Transfer:
        """Copy the pages of blocks into their shards. A shard is named once at most."""

    @abstractmethod
    def fence(self, transfers: Iterable[Transfer]) -> None:
        """Put what the engine computes, and what is loaded, from now on after these transfers."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the transfers that have begun and let go of all slabs."""


class _Done:
    def done(self) -> bool:
        return True


DONE: Transfer = _Done()
"""A transfer without anything left to do."""


@dataclass(frozen=True, slots=True)
class Run:
    """Layers at equal distances. `pages`: words [blocks, layers, words a page], strided."""

    pages: torch.Tensor
    offset: int
    """Bytes of the shard before this run."""

    @property
    def bytes(self) -> int:
        """Bytes of one block in this run."""
        return self.pages[0].numel() * self.pages.element_size()


class HostPaging(Paging):
    """Pages in host memory: every copy is done when the call returns.

    The worker's thread copies, and where the process has a second core to run on, a thread of its
    own takes blocks from the same queue. The copies are numpy's: one call a block and run, without
    the interpreter's lock, and without torch's threads, which all wait for the slowest when
    another process needs a core.
    """

    asynchronous = False

    def __init__(
        self, caches: Sequence[torch.Tensor], blocks: int, cores: frozenset[int] | None = None
    ) -> None:
        """`caches`: one tensor a layer, block first. Raises EngineError for an unknown layout.

        `cores`: where its threads may run; by default where the process may.
        """
        self.runs = find_runs(caches, blocks)
        self.layers = count_layers(caches)
        self.layout = describe(caches)
        self.shard_bytes = sum(run.bytes for run in self.runs)
        self._pages = [(run.pages.numpy(), run.offset, run.offset + run.bytes) for run in self.runs]
        cores = process_cores() if cores is None else cores
        self.threads = min(len(cores), MOST_THREADS)
        self._second = (
            ThreadPoolExecutor(1, "kvtier-copy", _bind, (cores,)) if self.threads > 1 else None
        )

    def attach(self, slab: torch.Tensor) -> None:
        """Host memory is ready as it is."""

    def detach(self, slab: torch.Tensor) -> None:
        """Nothing is on its way."""

    def begin_step(self) -> None:
        """Nothing is put off."""

    def load(self, copies: Sequence[Copy]) -> Transfer:
        """Copy shards into pages; done on return."""
        self._share(copies, self._load)
        return DONE

    def store(self, copies: Sequence[Copy]) -> Transfer:
        """Copy pages into shards; done on return."""
        self._share(copies, self._store)
        return DONE

    def fence(self, transfers: Iterable[Transfer]) -> None:
        """Everything comes after these already."""

    def close(self) -> None:
        """End the second thread."""
        if self._second is not None:
            self._second.shutdown()

    def _share(self, copies: Sequence[Copy], work: Callable[[Iterable[Copy]], None]) -> None:
        """Let both threads take from one iterator, so that neither waits for the other's half."""
        todo = iter(copies)
        if self._second is None or len(copies) * self.shard_bytes < SHARED_BYTES:
            work(todo)
            return
        other = self._second.submit(work, todo)
        try:
            work(todo)
        finally:
            if not other.cancel():
                other.result()

    def _load(self, copies: Iterable[Copy]) -> None:
        for block, shard in copies:
            flat = shard.numpy()
            for pages, start, end in self._pages:
                into = pages[block]
                into[...] = flat[start:end].view(into.dtype).reshape(into.shape)

    def _store(self, copies: Iterable[Copy]) -> None:
        for block, shard in copies:
            flat = shard.numpy()
            for pages, start, end in self._pages:
                source = pages[block]
                flat[start:end].view(source.dtype).reshape(source.shape)[...] = source


def find_runs(caches: Sequence[torch.Tensor], blocks: int) -> list[Run]:
    """Return the runs of caches, in the order of the layers; memory that two layers share once.

    Raises EngineError for a layout whose blocks can't be copied.
    """
    views = (_byte_views(_grouped(cache, blocks)) for cache in _distinct(caches))
    return _runs([view for layer in views for view in layer])


def count_layers(caches: Sequence[torch.Tensor]) -> int:
    """Return how many layers have memory of their own."""
    return len(_distinct(caches))


def describe(caches: Sequence[torch.Tensor]) -> str:
    """Return the order of bytes in a shard: dtype, shape and strides of the first layer's page,
    and a digest over all layers. Strides are those in the shard, where heads lie together."""
    lines = [f"{str(t.dtype)[6:]}{list(t.shape[1:])}/{_strides(t[0])}" for t in caches]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return f"{lines[0]} x{len(lines)} {digest}"


def _strides(page: torch.Tensor) -> list[int]:
    strides = page.stride() if _dense(page) else (page[0].numel(), *page[0].stride())
    return [stride if size > 1 else 0 for stride, size in zip(strides, page.shape, strict=True)]


def process_cores() -> frozenset[int]:
    """Return the cores that some thread of this process may run on.

    vLLM may have bound its threads to a core each, and a thread's children are bound as it is.
    """
    cores: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # A thread that has just ended.
            cores |= os.sched_getaffinity(int(task.name))
    return frozenset(cores)


def _bind(cores: frozenset[int]) -> None:
    with contextlib.suppress(OSError):  # The process was moved meanwhile: anywhere will do.
        os.sched_setaffinity(0, cores)


def _distinct(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the caches without those that share another layer's memory."""
    return list({cache.data_ptr(): cache for cache in caches}.values())


def _grouped(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return a cache with vLLM's blocks first: an attention kernel may take each as several."""
    if cache.shape[0] == blocks:
        return cache
    if cache.shape[0] % blocks:
        raise EngineError(
            f"vLLM's KV cache of shape {list(cache.shape)} does not start with {blocks} blocks, "
            f"and kvtier knows no other layout: choose another attention backend"
        )
    return cache.unflatten(0, (blocks, -1))


def _byte_views(cache: torch.Tensor) -> list[torch.Tensor]:
    """Return a layer's cache as bytes [blocks, bytes]: one view, or one a head if heads lie apart.

    vLLM's layouts order a cache's layers, blocks, heads and tokens; only a head's tokens always lie
    together.
    """
    page = cache[0]
    if _dense(page):
        return [_byte_view(cache)]
    if page.dim() == 3 and _dense(page[0]):
        return [_byte_view(cache[:, head]) for head in range(page.shape[0])]
    raise EngineError(
        f"vLLM's KV cache has pages of shape {list(page.shape)} and strides "
        f"{list(page.stride())} with gaps, which kvtier does not know: choose another "
        f"attention backend, or set VLLM_KV_CACHE_LAYOUT to LBNHC or LBHNC"
    )


def _byte_view(cache: torch.Tensor) -> torch.Tensor:
    """Return a tensor [blocks, ...] with dense pages as bytes [blocks, bytes a page]."""
    item = cache.element_size()
    return torch.tensor([], dtype=torch.uint8, device=cache.device).set_(
        cache.untyped_storage(),
        cache.storage_offset() * item,
        (cache.shape[0], cache[0].numel() * item),
        (cache.stride(0) * item, 1),
    )


def _dense(page: torch.Tensor) -> bool:
    """Return whether the page's elements fill one range of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(page.stride(), page.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _runs(views: Sequence[torch.Tensor]) -> list[Run]:
    runs: list[Run] = []
    offset = at = 0
    while at < len(views):
        count = _equal_steps(views[at:])
        run = Run(_strided(views[at : at + count]), offset)
        runs.append(run)
        offset += run.bytes
        at += count
    return runs


def _equal_steps(views: Sequence[torch.Tensor]) -> int:
    """Return how many layers from the first on lie at equal distances in one storage."""
    first = views[0]
    count = 1
    while count < len(views):
        view, before = views[count], views[count - 1]
        step = view.storage_offset() - before.storage_offset()
        alike = view.shape == first.shape and view.stride() == first.stride()
        shared = view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (alike and shared and step > 0):
            break
        if count > 1 and step != views[1].storage_offset() - first.storage_offset():
            break
        count += 1
    return count


def _strided(views: Sequence[torch.Tensor]) -> torch.Tensor:
    first = views[0]
    step = views[1].storage_offset() - first.storage_offset() if len(views) > 1 else 0
    shape = (first.shape[0], len(views), first.shape[1])
    stride = (first.stride(0), step, 1)
    whole = first.as_strided(shape, stride, first.storage_offset())
    sizes = (first.storage_offset(), first.stride(0), step, first.shape[1])
    return whole.view(torch.int64) if all(size % WORD_BYTES == 0 for size in sizes) else whole
