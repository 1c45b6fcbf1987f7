"""Slots and LMCache's buffers as addresses, and copies between them, without the GIL."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from logging import Logger

import xxhash

from ..client import Client
from ..core import BlockKey, Manifest, seal_seed, unpack_slot

COPIERS = min(4, os.cpu_count() or 1)
MADV_POPULATE_WRITE = 23
"""Linux 5.14; where it is unknown, pages are mapped as they are touched."""
ALONE_BYTES = 1 << 20
"""Batches below this are copied by the lane itself."""


_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One value of a batch: its place in the batch, its block key, and LMCache's buffer."""

    at: int
    key: BlockKey
    view: memoryview


class Mapped:
    """A slab, mapped for as long as anything refers to it, at once usable.

    A thread fills in its page tables, so that not all copies do.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        whole = mmap.mmap(descriptor, size)
        self._anchor = ctypes.c_char.from_buffer(whole)
        self.address = ctypes.addressof(self._anchor)
        threading.Thread(target=self._fill, args=[size], name="kvtier-fill", daemon=True).start()

    def _fill(self, size: int) -> None:
        where = (ctypes.c_void_p(self.address), ctypes.c_size_t(size))
        _LIBC.madvise(*where, MADV_POPULATE_WRITE)


@dataclass(frozen=True, slots=True)
class Place:
    """A slot's memory, which lies in `slab`."""

    slab: Mapped
    address: int


class Memory:
    """The slabs of one server, each mapped once for all lanes, and the threads that copy."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        # What the lock guards: whose slabs these are, and the slabs.
        self._server = ""
        self._slabs: dict[int, Mapped] = {}
        self._threads = ThreadPoolExecutor(COPIERS, "kvtier-copy")

    def place(self, client: Client, server: str, slot: int, slot_bytes: int) -> Place | None:
        """Return where a slot of `server` lies, or None if `client` can't get its slab."""
        ref = unpack_slot(slot)
        with self._lock:
            if server != self._server:
                self._server, self._slabs = server, {}
            slab = self._slabs.get(ref.slab) or self._map(client, ref.slab)
            if slab is None:
                return None
            self._slabs[ref.slab] = slab
        return Place(slab, slab.address + ref.index * slot_bytes)

    def all(self, copies: Sequence[Callable[[], bool]], size: int) -> list[bool]:
        """Make copies of `size` bytes each, several at a time. Returns what each says."""
        if len(copies) < 2 or size * len(copies) < ALONE_BYTES:
            return [copy() for copy in copies]
        under_way = [self._threads.submit(copy) for copy in copies]
        wait(under_way)  # All of them, whatever one says: the buffers are LMCache's afterwards.
        return [copy.result() for copy in under_way]

    def close(self) -> None:
        """End the threads and let go of all memory."""
        self._threads.shutdown()
        with self._lock:
            self._slabs = {}

    def _map(self, client: Client, number: int) -> Mapped | None:
        if (mapped := client.map_slab(number)) is None:
            return None
        descriptor, size = mapped
        try:
            return Mapped(descriptor, size)
        except OSError as error:
            self._log.warning("cannot map slab %d of %d bytes: %s", number, size, error)
            return None
        finally:
            os.close(descriptor)


def store(place: Place, value: Wanted, manifest: Manifest) -> bool:
    """Copy LMCache's buffer into a slot, and seal it if the namespace says so. Returns True."""
    ctypes.memmove(place.address, address(value.view), manifest.shard_bytes)
    if manifest.seal_bytes:
        seal = xxhash.xxh3_128_digest(value.view, seal_seed(value.key))
        ctypes.memmove(place.address + manifest.shard_bytes, seal, manifest.seal_bytes)
    return True


def load(place: Place, value: Wanted, manifest: Manifest) -> bool:
    """Copy a slot into LMCache's buffer. Returns whether what arrived is what was stored."""
    ctypes.memmove(address(value.view), place.address, manifest.shard_bytes)
    if not manifest.seal_bytes:
        return True
    seal = ctypes.string_at(place.address + manifest.shard_bytes, manifest.seal_bytes)
    return seal == xxhash.xxh3_128_digest(value.view, seal_seed(value.key))


def address(view: memoryview) -> int:
    """Return where a buffer begins. Raises TypeError if it is not writable and contiguous."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
