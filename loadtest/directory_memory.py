"""Bytes of process memory that one directory entry costs, the policy's bookkeeping included.

`python -m loadtest.directory_memory [--blocks N]` fills a hierarchy with N blocks of the smallest
slot size and prints the growth of this process's private memory ÷ N.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
from pathlib import Path

from kvtier.core import PAGE_BYTES, Manifest, Role
from kvtier.hierarchy import Hierarchy
from kvtier.metrics import Metrics
from kvtier.tiers import host
from kvtier.tiers.slab import Slab

CHAIN = 64
"""Blocks of one prompt."""


def private_bytes() -> int:
    """Return the memory of this process that no other one shares."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kept = (line for line in lines if line.startswith(("Private_Dirty", "Private_Clean")))
    return sum(int(line.split()[1]) * 1024 for line in kept)


def bytes_per_block(blocks: int) -> float:
    """Return the private memory that one of `blocks` entries takes."""
    # The entries are real; the slabs behind them need no memory, because nothing is copied here.
    host.make_slab = lambda number, size, _: Slab(number, os.memfd_create("empty"), size, False)
    tier = host.HostTier(host.HostOptions((blocks + blocks // 20) * PAGE_BYTES), Metrics())
    asyncio.run(tier.allocate())
    cache = Hierarchy(tier, Metrics(), lambda: 0.0)
    one_page = Manifest(
        "m", "w", "", "", "", 16, 1, "", PAGE_BYTES, 1, "sha256_cbor", "0"
    )  # fmt: skip
    session = cache.open_session(Role.SCHEDULER, "e", 0, 1, one_page)
    gc.collect()
    before = private_bytes()
    for _ in range(blocks // CHAIN):
        keys = [os.urandom(32) for _ in range(CHAIN)]
        cache.commit(session, b"", keys, cache.reserve(session, CHAIN, 0))
    gc.collect()
    return (private_bytes() - before) / len(cache.directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    print(f"{bytes_per_block(parser.parse_args().blocks):.0f}")
