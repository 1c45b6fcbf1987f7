"""Bytes of process memory that one directory entry costs, the policy's bookkeeping included.

`python -m loadtest.directory_memory [--blocks N] [--policy NAME] [--turnover T]` fills a hierarchy
with N blocks of the smallest slot size, which engines ask for before they store them, T times over,
so that a policy has its shadows and ghosts. It prints the growth of this process's private memory ÷
the blocks that are there in the end. The policy is the default one unless another is named.
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
from kvtier.sections import HostSettings
from kvtier.tiers import host
from kvtier.tiers.slab import Slab

CHAIN = 64
"""Blocks of one prompt."""


def private_bytes() -> int:
    """Return the memory of this process that no other one shares."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kept = (line for line in lines if line.startswith(("Private_Dirty", "Private_Clean")))
    return sum(int(line.split()[1]) * 1024 for line in kept)


def bytes_per_block(blocks: int, policy: str, turnover: float) -> float:
    """Return the private memory that one of `blocks` entries takes, each stored and evicted."""
    # The entries are real; the slabs behind them need no memory, because nothing is copied here.
    host.make_slab = lambda number, size, _: Slab(number, os.memfd_create("empty"), size, False)
    options = host.HostOptions((blocks + blocks // 20) * PAGE_BYTES, policy)
    tier = host.HostTier(options, Metrics())
    asyncio.run(tier.allocate())
    cache = Hierarchy(tier, Metrics(), lambda: 0.0)
    one_page = Manifest(
        "m", "w", "", "", "", 16, 1, "", PAGE_BYTES, 1, "sha256_cbor", "0"
    )  # fmt: skip
    session = cache.open_session(Role.SCHEDULER, "e", 0, 1, one_page)
    gc.collect()
    before = private_bytes()
    for number in range(int(blocks * turnover) // CHAIN):
        keys = [os.urandom(32) for _ in range(CHAIN)]
        cache.lookup(session, number, keys, 0)
        cache.commit(session, b"", keys, cache.reserve(session, CHAIN, 0))
    gc.collect()
    return (private_bytes() - before) / len(cache.directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--policy", default=HostSettings().policy)
    parser.add_argument("--turnover", type=float, default=1.0)
    given = parser.parse_args()
    print(f"{bytes_per_block(given.blocks, given.policy, given.turnover):.0f}")
