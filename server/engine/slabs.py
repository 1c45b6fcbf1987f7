"""The slabs that one worker has mapped.

Slabs that hold blocks when the worker connects are mapped with all their page tables, so that no
hit waits for that. One that comes into use later is usable at once, and a thread fills in its page
tables meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from logging import Logger

import torch

from ..client import Client
from ..core import Manifest, unpack_slot
from .paging import Paging

MADV_POPULATE_WRITE = 23
"""Linux 5.14; where it is unknown, pages are mapped as they are touched."""


class Slabs:
    """Slab number → memory. `shard` is this rank's number among the shards of a slot."""

    def __init__(
        self, client: Client, paging: Paging, manifest: Manifest, shard: int, log: Logger
    ) -> None:
        self._client = client
        self._paging = paging
        self._manifest = manifest
        self._offset = shard * manifest.shard_stride
        self._log = log
        self._slabs: dict[int, torch.Tensor] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)

    def shard(self, slot: int) -> torch.Tensor | None:
        """Return the bytes of a shard and its seal, or None if its slab can't be had."""
        ref = unpack_slot(slot)
        slab = self._slabs.get(ref.slab)
        if slab is None:
            slab = self.map(ref.slab, mmap.MAP_SHARED)
            if slab is None:
                return None
            self._populate(slab)
        start = ref.index * self._manifest.slot_bytes + self._offset
        return slab[start : start + self._manifest.shard_bytes + self._manifest.seal_bytes]

    def map(
        self, number: int, flags: int = mmap.MAP_SHARED | mmap.MAP_POPULATE
    ) -> torch.Tensor | None:
        """Map a slab. None, with a reason in the log, if that failed."""
        mapped = self._client.map_slab(number)
        if mapped is None:
            return None
        descriptor, size = mapped
        try:
            memory = mmap.mmap(descriptor, size, flags)
        except OSError as error:
            self._log.warning("cannot map slab %d of %d bytes: %s", number, size, error)
            return None
        finally:
            os.close(descriptor)
        slab = torch.frombuffer(memory, dtype=torch.uint8)
        self._paging.attach(slab)
        self._slabs[number] = slab
        return slab

    def clear(self) -> None:
        """Let go of all memory."""
        for slab in self._slabs.values():
            self._paging.detach(slab)
        self._slabs.clear()

    def _populate(self, slab: torch.Tensor) -> None:
        where = (ctypes.c_void_p(slab.data_ptr()), ctypes.c_size_t(slab.numel()))

        def fill() -> None:
            self._libc.madvise(*where, MADV_POPULATE_WRITE)
            del kept[:]

        kept = [slab]  # Mapped until the thread is through.
        threading.Thread(target=fill, name="kvtier-populate", daemon=True).start()
