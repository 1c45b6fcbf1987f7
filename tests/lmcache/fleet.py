"""One LMCache server as the adapter sees it: keys, buffers, a descriptor that is polled."""

from __future__ import annotations

import ctypes
import hashlib
import random
import select
import time

from kvtier.lmcache_adapter import KVTierAdapter

VALUE_BYTES = 20_000
SECONDS = 30.0
DEADLINE_MS = 5000
"""No server is so slow; a machine that runs other tests too may be."""


def key(name, model="model", rank=0, group=0, salt=""):
    """Return a key as LMCache writes it; equal names give equal hashes."""
    digest = hashlib.sha256(str(name).encode()).hexdigest()
    return f"{model}@{rank:08x}@{group:x}@{digest}" + (f"@{salt}" if salt else "")


def value(name, size=VALUE_BYTES):
    """Return bytes; equal names and sizes give equal bytes."""
    return random.Random(f"{name} {size}").randbytes(size)


def buffer(data):
    """Return a buffer of LMCache's kind with these bytes."""
    view = memoryview((ctypes.c_ubyte * len(data))())
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(view)), data, len(data))
    return view


class Member:
    """An adapter, and what LMCache does around it."""

    def __init__(self, socket, **parameters):
        given = {"deadline_ms": DEADLINE_MS} | parameters
        self.adapter = KVTierAdapter(socket=str(socket), **given)
        self.done = {}

    def wait(self, number):
        """Return the completion of a batch: ok, error, per key."""
        poll = select.poll()
        poll.register(self.adapter.event_fd(), select.POLLIN)
        end = time.monotonic() + SECONDS
        while number not in self.done:
            assert time.monotonic() < end, f"batch {number} was not completed"
            poll.poll(100)
            for one, *completion in self.adapter.drain_completions():
                assert one not in self.done, "a batch is completed once"
                self.done[one] = completion
        return self.done[number]

    def set(self, values):
        """Store values by key; return ok and error."""
        views = [buffer(data) for data in values.values()]
        ok, error, each = self.wait(self.adapter.submit_batch_set([*values], views))
        assert each is None
        return ok, error

    def get(self, keys, size=VALUE_BYTES):
        """Return the bytes of each key, or None where it missed."""
        views = [buffer(bytes(size)) for _ in keys]
        _, _, each = self.wait(self.adapter.submit_batch_get(keys, views))
        return [bytes(view) if there else None for view, there in zip(views, each, strict=True)]

    def exists(self, keys):
        return self.wait(self.adapter.submit_batch_exists(keys))[2]

    def delete(self, keys):
        return self.wait(self.adapter.submit_batch_delete(keys))[2]
