"""Which paging serves KV caches, by the device that they lie on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.logger import init_logger

from ..errors import EngineError
from .cuda import CudaPaging
from .cuda_device import TorchDevice
from .paging import HostPaging, Paging

log = init_logger("vllm.kvtier")


def page_caches(caches: Sequence[torch.Tensor], blocks: int) -> Paging:
    """Return the paging of caches, one tensor a layer. Raises EngineError for another device."""
    device = caches[0].device
    if device.type == "cpu":
        return HostPaging(caches, blocks)
    if device.type == "cuda":
        return CudaPaging(caches, blocks, TorchDevice(device), log)
    raise EngineError(
        f"kvtier copies from and to KV caches in host memory and on CUDA devices, and these are "
        f"on {device.type}: run vLLM on CPU or CUDA"
    )
