"""A data plane in a thread of its own, with its hierarchy at hand."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop
from kvtier.client import Client, ClientOptions
from kvtier.core import PAGE_BYTES, Role
from kvtier.dataplane import DataPlane, DataPlaneOptions
from kvtier.hierarchy import Hierarchy
from kvtier.integrity import check_integrity
from kvtier.lower import LowerTier
from kvtier.lower_options import LowerOptions
from kvtier.metrics import Metrics
from kvtier.protocol import PROTOCOL_VERSION, Hello
from kvtier.readings import Readings
from kvtier.tiers.base import RecordStore
from kvtier.tiers.host import HostOptions, HostTier
from kvtier.tiers.slab import HugePages
from support import MANIFEST, until

LOG = logging.getLogger("test.client")


class Plane:
    """A running data plane over `slots` slots of one page, and lower tiers over `stores`.

    `lower` are options of every lower tier.
    """

    def __init__(
        self,
        path: Path,
        slots: int,
        stores: Sequence[RecordStore] = (),
        lower: Mapping[str, object] | None = None,
        **options: object,
    ) -> None:
        self.path = path
        self.metrics = Metrics()
        self.host = HostTier(
            HostOptions(slots * PAGE_BYTES, huge_pages=HugePages.NEVER), self.metrics
        )
        self.loop = uvloop.new_event_loop()
        settings = LowerOptions(**({"capacity_bytes": 1 << 30} | dict(lower or {})))
        post = self.loop.call_soon_threadsafe
        self.lowers = [
            LowerTier(store, settings, self.metrics, time.monotonic, post) for store in stores
        ]
        later = self.loop.call_later
        self.cache = Hierarchy(self.host, self.metrics, time.monotonic, self.lowers, later)
        self.readings = Readings(self.cache)
        self.plane = DataPlane(self.cache, self.metrics, DataPlaneOptions(path, **options))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        try:
            self.await_(self.host.allocate())
            self.await_(self.plane.start())
            for tier in self.lowers:
                self.do(tier.start)
            until(lambda: all(tier.scanned for tier in self.lowers), "the first look")
        except BaseException:
            self._end()
            raise

    def _run(self):
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def await_(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def do(self, function, *arguments):
        """Run a function on the loop, which owns all state."""

        async def call():
            return function(*arguments)

        return self.await_(call())

    def closes(self, reason: str) -> float:
        return self.do(self.metrics.session_closes.labels(reason)._value.get)

    def hello(self, role=Role.SCHEDULER, engine="engine", rank=0, manifest=MANIFEST, events=False):
        return Hello(PROTOCOL_VERSION, role, engine, rank, manifest, events)

    def client(
        self, role=Role.SCHEDULER, engine="engine", manifest=MANIFEST, events=False, **options
    ):
        hello = self.hello(role, engine, manifest=manifest, events=events)
        client = Client(ClientOptions(self.path, **options), hello, LOG)
        client.start()
        return client

    def stop(self):
        if self.thread.is_alive():
            self.do(check_integrity, self.cache)
            self.await_(self.plane.stop())
            self.do(check_integrity, self.cache)
            self._end()

    def _end(self):
        for lower in self.lowers:
            self.do(lower.close)
        self.do(self.host.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(20)
