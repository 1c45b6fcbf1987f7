"""How long a scrape of the metrics holds the server's loop, with many blocks and tenants.

`python -m loadtest.scrape` fills a hierarchy with a thousand blocks and with a million, has 200
tenants ask, and times what `/metrics` does on the loop: reading the gauges and writing all series
out. The entries are real; the slabs behind them need no memory, because nothing is copied here.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from kvtier.core import PAGE_BYTES, Role
from kvtier.hierarchy import Hierarchy
from kvtier.metrics import Metrics
from kvtier.protocol import Asked
from kvtier.readings import Readings
from kvtier.tiers import host
from kvtier.tiers.slab import Slab

from .engines import MANIFEST
from .report import Row, show

BLOCKS = (1_000, 1_000_000)
TENANTS = 200
SCRAPES = 15
CHAIN = 64


def filled(blocks: int) -> Hierarchy:
    """Return a cache of about so many blocks, and tenants that asked."""
    host.make_slab = lambda number, size, _: Slab(number, os.memfd_create("empty"), size, False)
    metrics = Metrics()
    tier = host.HostTier(host.HostOptions((blocks + blocks // 20) * PAGE_BYTES), metrics)
    asyncio.run(tier.allocate())
    cache = Hierarchy(tier, metrics, time.monotonic)
    session = cache.open_session(Role.SCHEDULER, "e", 0, 1, MANIFEST)
    for _ in range(blocks // CHAIN):
        keys = [os.urandom(32) for _ in range(CHAIN)]
        cache.commit(session, b"", keys, cache.reserve(session, CHAIN, 0))
    for number in range(TENANTS):
        cache.count(session, Asked(f"tenant-{number}", 10, 1, 5))
    return cache


def scrapes(blocks: int) -> list[float]:
    """Return the milliseconds that each scrape holds the loop."""
    cache = filled(blocks)
    readings = Readings(cache)
    found = []
    for _ in range(SCRAPES):
        began = time.thread_time()
        readings.refresh_metrics()
        text = cache.metrics.exposition()
        found.append((time.thread_time() - began) * 1000)
    assert text.count(b'tenant="tenant-') > TENANTS, "tenants have their series"
    cache.host.close()
    return found


def measure() -> list[float]:
    """Return the milliseconds of a scrape with a million blocks, scrape by scrape."""
    found = {blocks: scrapes(blocks) for blocks in BLOCKS}
    show(
        f"a scrape with {TENANTS} tenants",
        [Row(f"{blocks:,} blocks", times, "ms") for blocks, times in found.items()],
    )
    return found[BLOCKS[-1]]


if __name__ == "__main__":
    print(*measure(), file=sys.stdout)
