"""What several test folders need: small hierarchies, manifests and chains of keys."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable

from kvtier.changes import News
from kvtier.core import PAGE_BYTES, Manifest
from kvtier.hierarchy import Hierarchy
from kvtier.metrics import Metrics
from kvtier.tier_readings import TierTraffic
from kvtier.tiers.host import HostOptions, HostTier
from kvtier.tiers.slab import HugePages

MANIFEST = Manifest(
    model="test",
    weights="w",
    quantization="None",
    dtype="float32",
    kv_dtype="auto",
    block_tokens=16,
    layers=2,
    layout="flat",
    shard_bytes=PAGE_BYTES,
    shards=1,
    hash_algorithm="sha256_cbor",
    hash_seed="0",
)


def manifest(**fields: object) -> Manifest:
    """Return a manifest that differs from `MANIFEST` in the given fields."""
    return dataclasses.replace(MANIFEST, **fields)


def host_tier(slots: int, **options: object) -> HostTier:
    """Return an allocated host tier of so many slots of one page."""
    tier = HostTier(
        HostOptions(slots * PAGE_BYTES, huge_pages=HugePages.NEVER, **options), Metrics()
    )
    asyncio.run(tier.allocate())
    return tier


def hierarchy(slots: int, clock: Callable[[], float] = time.monotonic, **options: object):
    """Return a hierarchy over `host_tier`. Close its `host` after use."""
    tier = host_tier(slots, **options)
    return Hierarchy(tier, tier._metrics, clock)


class Mirror:
    """A peer that keeps what it is told: the visible blocks, with their parents."""

    def __init__(self) -> None:
        self.behind = False
        self.known: dict[bytes, bytes] = {}
        self.heard: list[News] = []

    def tell(self, news: News) -> None:
        """Take the news in."""
        assert not self.behind, "what does not read is told nothing"
        self.heard.append(news)
        if news.whole:
            self.known.clear()
        for key in news.removed:
            self.known.pop(key, None)
        for run in news.stored:
            self.known.update(zip(run[1:], run[:-1], strict=True))


def tokens(traffic: Iterable[TierTraffic]) -> dict[str, tuple[int, int]]:
    """Return by tier how many tokens were asked of it and served."""
    return {one.tier.value: (one.tokens_asked, one.tokens_hit) for one in traffic}


def chain(name: str, blocks: int) -> list[bytes]:
    """Return the keys of a chain: equal names give equal chains, of which a prefix is a prefix."""
    keys = []
    parent = hashlib.sha256(name.encode()).digest()
    for _ in range(blocks):
        parent = hashlib.sha256(parent).digest()
        keys.append(parent)
    return keys


def until(done: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll until `done`, or fail saying `what` did not come."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)
