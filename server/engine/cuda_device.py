"""A CUDA device as the paging needs it: torch's streams, vLLM's batched copies and pinning."""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

from .cuda import Batch


class TorchDevice:
    """One device, of the process that calls. Implements `cuda.Device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lowest, _ = torch.cuda.Stream.priority_range()

    def current(self) -> Any:
        """Return the stream that vLLM's thread has set: it changes when graphs are captured."""
        return torch.cuda.current_stream(self._device)

    def side(self) -> Any:
        """Return a stream of the lowest priority."""
        return torch.cuda.Stream(self._device, priority=self._lowest)

    def to_device(self, stream: Any, batch: Batch) -> None:
        """Copy shards to pages. The driver may read shards ahead of the stream's order: that is
        the faster way, and a shard has its bytes before it is loaded from."""
        with torch.cuda.stream(stream):
            ops.swap_blocks_batch(
                batch.shards, batch.pages, batch.sizes, is_src_access_order_any=True
            )

    def to_host(self, stream: Any, batch: Batch) -> None:
        """Copy pages to shards, in the stream's order."""
        with torch.cuda.stream(stream):
            ops.swap_blocks_batch(batch.pages, batch.shards, batch.sizes)

    def register(self, address: int, size: int) -> bool:
        """Pin memory for the context of the calling thread."""
        with torch.cuda.device(self._device):
            return bool(host_register(address, size))

    def unregister(self, address: int) -> None:
        """Unpin it."""
        with torch.cuda.device(self._device):
            host_unregister(address)
