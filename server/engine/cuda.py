"""Pages on a CUDA device: transfers go on beside the model, in streams of their own.

Loads and stores have a stream each. Nothing here waits on the host but `detach` and `close`; what
has to come after what is said to the device with events:

    a load comes after all that the device had been given when the step began
    a store comes after all that it had been given when the store was called
    what the model computes, and loads, comes after the stores and loads of a fence before it

A store is handed to the device when the next step begins, so that the tokens that the step sampled
are not queued behind it on their way to the host. A batch is one call to the driver, and pages
that lie side by side in a block are one copy of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .paging import DONE, Copy, Paging, Run, Transfer, count_layers, describe, find_runs

PINNING_FIX = (
    "the CUDA driver would not pin %d MiB of kvtier's memory, so that copies between it and the "
    "device go through a buffer of the driver's, several times slower, and the engine waits for "
    "stores: raise the limit on locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity, or "
    "--ulimit memlock=-1 for a container)"
)


class Batch(NamedTuple):
    """Pieces of memory to copy. Each is int64 [pieces]: addresses on both sides, and bytes."""

    pages: torch.Tensor
    shards: torch.Tensor
    sizes: torch.Tensor


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Return whether the device has come past it."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


class Stream(Protocol):
    """A queue of the device's work."""

    def record_event(self) -> Event:
        """Return the point behind all that it was given."""
        ...

    def wait_event(self, event: Event) -> None:
        """Let what it is given from now on wait for the event."""
        ...


class Device(Protocol):
    """What the paging needs of a device."""

    def current(self) -> Stream:
        """Return the stream that the model's work goes to now."""
        ...

    def side(self) -> Stream:
        """Return a new stream that gives way to the model's."""
        ...

    def to_device(self, stream: Stream, batch: Batch) -> None:
        """Hand over copies from shards to pages. Shards may be read at any time from now on."""
        ...

    def to_host(self, stream: Stream, batch: Batch) -> None:
        """Hand over copies from pages to shards. Pages are read when the stream has come to it."""
        ...

    def register(self, address: int, size: int) -> bool:
        """Pin host memory. Returns whether the driver did."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        ...


@dataclass(slots=True, eq=False)
class DeviceTransfer:
    """Copies on their way. Keeps their memory mapped until they are done."""

    copies: Sequence[Copy]
    after: Event
    batch: Batch | None = None
    """What was handed to the device; None while it is put off."""
    end: Event | None = None

    def done(self) -> bool:
        """Return whether the device has come past the last copy."""
        return self.end is not None and self.end.query()


class CudaPaging(Paging):
    """Copies between a CUDA device's pages and shards."""

    asynchronous = True

    def __init__(
        self, caches: Sequence[torch.Tensor], blocks: int, device: Device, log: logging.Logger
    ) -> None:
        """`caches`: one tensor a layer, block first. Raises EngineError for an unknown layout."""
        runs = find_runs(caches, blocks)
        self.layers = count_layers(caches)
        self.layout = describe(caches)
        self.shard_bytes = sum(run.bytes for run in runs)
        self.pieces = Pieces(runs)
        self._caches = list(caches)  # The pieces are addresses in them.
        self._device = device
        self._log = log
        self._loads = device.side()
        self._stores = device.side()
        self._step: Event | None = None
        """Behind all that the device was given before this step."""
        self._put_off: list[DeviceTransfer] = []
        self._started: list[DeviceTransfer] = []
        self._pinned: dict[int, bool] = {}
        """Address of each slab → whether it is pinned."""

    def attach(self, slab: torch.Tensor) -> None:
        """Pin a slab, all in one piece, so that no shard lies across two. Slow: GB/s."""
        address, size = slab.data_ptr(), slab.numel()
        assert address not in self._pinned, "a slab is attached once"
        pinned = self._device.register(address, size)
        if not pinned and all(self._pinned.values()):
            self._log.warning(PINNING_FIX, size >> 20)
        self._pinned[address] = pinned

    def detach(self, slab: torch.Tensor) -> None:
        """Wait for all transfers, those put off too, and unpin the slab, if `close` did not."""
        self._start_put_off()
        self._wait()
        self._unpin(slab.data_ptr())

    def begin_step(self) -> None:
        """Start the stores put off, and take note of what the device was given until now."""
        self._step = self._device.current().record_event()
        self._start_put_off()
        self._started = [transfer for transfer in self._started if not transfer.done()]

    def load(self, copies: Sequence[Copy]) -> Transfer:
        """Start copying shards into pages."""
        if not copies:
            return DONE
        transfer = DeviceTransfer(copies, self._step or self._device.current().record_event())
        transfer.batch = self.pieces.batch(copies)
        self._loads.wait_event(transfer.after)
        self._device.to_device(self._loads, transfer.batch)
        transfer.end = self._loads.record_event()
        self._started.append(transfer)
        return transfer

    def store(self, copies: Sequence[Copy]) -> Transfer:
        """Copy pages as they are after what the device has been given until now."""
        if not copies:
            return DONE
        transfer = DeviceTransfer(copies, self._device.current().record_event())
        self._put_off.append(transfer)
        return transfer

    def fence(self, transfers: Iterable[Transfer]) -> None:
        """Let the model's stream and the loads' wait for transfers. The host waits for none."""
        compute = self._device.current()
        for transfer in transfers:
            if not isinstance(transfer, DeviceTransfer):
                continue
            if transfer.end is None:
                self._put_off.remove(transfer)
                self._start(transfer)
            assert transfer.end is not None
            compute.wait_event(transfer.end)
            self._loads.wait_event(transfer.end)

    def close(self) -> None:
        """Wait for what has begun and unpin all slabs. Stores put off are dropped: nobody is left
        to hear of them, and the engine's pages may be gone."""
        self._put_off.clear()
        try:
            self._wait()
        finally:
            for address in list(self._pinned):
                self._unpin(address)
            self._caches.clear()

    def _start_put_off(self) -> None:
        for transfer in self._put_off:
            self._start(transfer)
        self._put_off.clear()

    def _start(self, store: DeviceTransfer) -> None:
        store.batch = self.pieces.batch(store.copies)
        self._stores.wait_event(store.after)
        self._device.to_host(self._stores, store.batch)
        store.end = self._stores.record_event()
        self._started.append(store)

    def _wait(self) -> None:
        for transfer in self._started:
            assert transfer.end is not None
            transfer.end.synchronize()
        self._started.clear()

    def _unpin(self, address: int) -> None:
        if self._pinned.pop(address, False):
            self._device.unregister(address)


class Pieces:
    """How a block lies in memory: `count` pieces, each contiguous on both sides."""

    def __init__(self, runs: Sequence[Run]) -> None:
        pieces = _merged([piece for run in runs for piece in _pieces(run)])
        self.count = len(pieces)
        self._origins, self._strides, self._offsets, self._sizes = (
            torch.tensor(column, dtype=torch.int64) for column in zip(*pieces, strict=True)
        )

    def batch(self, copies: Sequence[Copy]) -> Batch:
        """Return the addresses of all pieces of copies, block by block."""
        blocks = torch.tensor([copy.block for copy in copies], dtype=torch.int64)
        shards = torch.tensor([copy.shard.data_ptr() for copy in copies], dtype=torch.int64)
        return Batch(
            (self._origins + blocks[:, None] * self._strides).flatten(),
            (self._offsets + shards[:, None]).flatten(),
            self._sizes.repeat(len(copies)),
        )


class _Piece(NamedTuple):
    origin: int
    """Address in block 0."""
    stride: int
    """Bytes from a block to the next."""
    offset: int
    """Bytes of the shard before it."""
    size: int


def _pieces(run: Run) -> list[_Piece]:
    item = run.pages.element_size()
    stride, step = (each * item for each in run.pages.stride()[:2])
    size = run.pages.shape[2] * item
    return [
        _Piece(run.pages.data_ptr() + at * step, stride, run.offset + at * size, size)
        for at in range(run.pages.shape[1])
    ]


def _merged(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Return the pieces with those that lie side by side in a block made one."""
    merged: list[_Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if last and last.stride == piece.stride and last.origin + last.size == piece.origin:
            merged[-1] = last._replace(size=last.size + piece.size)
        else:
            merged.append(piece)
    return merged
