"""Between vLLM's pages and a slot's shard: which bytes of a block lie where.

A block is one page a layer. Its shard is all pages one after the other, in the order of the
layers, raw bytes as vLLM has them. Layers whose pages lie at equal distances in one storage are
copied together, as one strided copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.v1.kv_cache_interface import group_kernel_blocks

from ..errors import EngineError

WORD_BYTES = 8
"""Copies go in words where sizes allow: fewer elements for the same bytes."""


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


class HostPaging:
    """Pages in host memory: every copy is done when the call returns."""

    def __init__(self, caches: Sequence[torch.Tensor], blocks: int) -> None:
        """`caches`: one tensor a layer, block first. Raises EngineError for an unknown layout."""
        views = [_page_view(group_kernel_blocks(cache, blocks)) for cache in _distinct(caches)]
        self.layers = len(views)
        self.layout = describe(caches)
        self.runs = _runs(views)
        self.shard_bytes = sum(run.bytes for run in self.runs)

    def load(self, block: int, shard: torch.Tensor) -> None:
        """Copy a shard (`shard_bytes` of uint8) into the pages of a block."""
        for run in self.runs:
            pages = run.pages[block]
            pages.copy_(_part(shard, run, pages))

    def store(self, block: int, shard: torch.Tensor) -> None:
        """Copy the pages of a block into a shard."""
        for run in self.runs:
            pages = run.pages[block]
            _part(shard, run, pages).copy_(pages)


def describe(caches: Sequence[torch.Tensor]) -> str:
    """Return the order of bytes in a page: dtype, shape and strides, and a digest over layers."""
    lines = [f"{str(t.dtype)[6:]}{list(t.shape[1:])}/{list(t.stride()[1:])}" for t in caches]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return f"{lines[0]} x{len(lines)} {digest}"


def _part(shard: torch.Tensor, run: Run, pages: torch.Tensor) -> torch.Tensor:
    return shard[run.offset : run.offset + run.bytes].view(pages.dtype).view(pages.shape)


def _distinct(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the caches without those that share another layer's memory."""
    return list({cache.data_ptr(): cache for cache in caches}.values())


def _page_view(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache as bytes [blocks, bytes a page]; its pages must be contiguous."""
    page = cache[0]
    if not _dense(page):
        raise EngineError(
            f"vLLM's KV cache has pages of shape {list(page.shape)} and strides "
            f"{list(page.stride())} with gaps, which kvtier does not know: choose another "
            f"attention backend"
        )
    item = cache.element_size()
    return torch.tensor([], dtype=torch.uint8, device=cache.device).set_(
        cache.untyped_storage(),
        cache.storage_offset() * item,
        (cache.shape[0], page.numel() * item),
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
