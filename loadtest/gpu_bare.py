"""What kvtier needs of a CUDA device, without vLLM: for machines that have torch and a GPU only.

Copies are one call of the driver's `cuMemcpyBatchAsync` (CUDA 12.8), as vLLM's are, or a loop of
`cuMemcpyAsync` where the driver does not have it.
"""

from __future__ import annotations

import ctypes

import torch
from kvtier.engine.cuda import Batch

BATCH_VERSION = 12080
"""The CUDA version whose signature of the batched copy is called here."""
IN_STREAM_ORDER, IN_ANY_ORDER = 1, 3
"""When a batch's sources may be read, as the driver numbers it."""


class DriverError(Exception):
    """The CUDA driver refused a call. The message names both."""


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class BareDevice:
    """Implements `kvtier.engine.cuda.Device` over torch and the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lowest, _ = torch.cuda.Stream.priority_range()
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._batched = _entry_point(self._driver)

    @property
    def batched(self) -> bool:
        """Whether a batch is one call."""
        return self._batched is not None

    def current(self) -> torch.cuda.Stream:
        """Return the stream that the calling thread has set."""
        return torch.cuda.current_stream(self._device)

    def side(self) -> torch.cuda.Stream:
        """Return a stream of the lowest priority."""
        return torch.cuda.Stream(self._device, priority=self._lowest)

    def to_device(self, stream: torch.cuda.Stream, batch: Batch) -> None:
        """Copy shards to pages."""
        self._copy(stream, batch.pages, batch.shards, batch.sizes, IN_ANY_ORDER)

    def to_host(self, stream: torch.cuda.Stream, batch: Batch) -> None:
        """Copy pages to shards."""
        self._copy(stream, batch.shards, batch.pages, batch.sizes, IN_STREAM_ORDER)

    def register(self, address: int, size: int) -> bool:
        """Pin memory."""
        return int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0

    def unregister(self, address: int) -> None:
        """Unpin it."""
        _check("cudaHostUnregister", int(torch.cuda.cudart().cudaHostUnregister(address)))

    def _copy(
        self,
        stream: torch.cuda.Stream,
        targets: torch.Tensor,
        sources: torch.Tensor,
        sizes: torch.Tensor,
        order: int,
    ) -> None:
        queue = ctypes.c_void_p(stream.cuda_stream)
        if self._batched is None:
            rows = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
            for target, source, size in rows:
                _check("cuMemcpyAsync", self._copy_one(target, source, size, queue))
            return
        addresses = [ctypes.c_void_p(each.data_ptr()) for each in (targets, sources, sizes)]
        attributes = _Attributes(source_order=order)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        result = self._batched(
            *addresses,
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            queue,
        )
        _check("cuMemcpyBatchAsync", result)

    def _copy_one(self, target: int, source: int, size: int, queue: ctypes.c_void_p) -> int:
        return int(
            self._driver.cuMemcpyAsync(
                ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), queue
            )
        )


def _entry_point(driver: ctypes.CDLL) -> ctypes._CFuncPtr | None:
    """Return the driver's batched copy, or None where it has none."""
    address, found = ctypes.c_void_p(), ctypes.c_int()
    result = driver.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync",
        ctypes.byref(address),
        ctypes.c_int(BATCH_VERSION),
        ctypes.c_uint64(0),
        ctypes.byref(found),
    )
    if result != 0 or not address.value:
        return None
    return ctypes.CFUNCTYPE(ctypes.c_int)(address.value)


def _check(call: str, result: int) -> None:
    if result != 0:
        raise DriverError(f"{call} ended with CUDA error {result}")
