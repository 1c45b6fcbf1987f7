"""The lower tiers of one server, as its settings want them, and their life from start to stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from .coding import CodecMode
from .config import Settings
from .core import LOWER_TIERS, AdmissionMode, Tier, WriteMode
from .errors import SettingsError
from .lower import LowerTier
from .lower_options import LowerOptions
from .metrics import Metrics
from .tiers import compression
from .tiers.base import RecordStore
from .tiers.breaker import BreakerOptions
from .tiers.disk import DiskOptions, DiskStore
from .tiers.redis import RedisOptions, RedisStore

log = logging.getLogger("kvtier.lowers")

TICK_SECONDS = 0.25
DRAIN_POLL_SECONDS = 0.02
OFFERS_A_TURN = 16
"""Blocks that are offered to a tier at the end before the loop does something else."""
QUEUE_SHARE = 8
"""Blocks that wait to be written take the host tier's capacity ÷ this at most: they stay there."""


def configured(settings: Settings) -> list[Tier]:
    """Return which lower tiers the settings want, the faster first."""
    wanted = {Tier.DISK: settings.disk.path, Tier.REDIS: settings.redis.url}
    return [tier for tier in LOWER_TIERS if wanted[tier] is not None]


def lower_tiers(
    settings: Settings, metrics: Metrics, post: Callable[[Callable[[], None]], object]
) -> list[LowerTier]:
    """Return the tiers below the host tier, the faster first. Raises SettingsError."""
    makers = {Tier.DISK: _disk, Tier.REDIS: _redis}
    return [
        LowerTier(makers[tier](settings), options_of(tier, settings), metrics, time.monotonic, post)
        for tier in configured(settings)
    ]


def options_of(tier: Tier, settings: Settings) -> LowerOptions:
    """Return the options of a lower tier. Raises SettingsError."""
    section = settings.disk if tier is Tier.DISK else settings.redis
    slow, threads = settings.disk.slow_seconds, settings.disk.threads
    stuck = 2 * slow
    if tier is Tier.REDIS:
        slow, threads = settings.redis.timeout_seconds, settings.redis.connections
        stuck = 4 * slow
    return LowerOptions(
        capacity_bytes=section.capacity,
        policy=section.policy,
        write_mode=WriteMode(section.write_mode),
        admission=AdmissionMode(section.admission),
        write_rate=section.write_rate,
        codec=_codec(f"{tier}.codec", CodecMode(section.codec)),
        threads=threads,
        queue_bytes=settings.host.capacity // QUEUE_SHARE,
        stuck_seconds=stuck,
        breaker=BreakerOptions(failures=section.failures, slow=slow),
    )


def retune(tier: LowerTier, options: LowerOptions, settings: Settings) -> None:
    """Let a tier go by other settings from now on, and by the options that they make."""
    tier.retune(options)
    store = tier.store
    if isinstance(store, DiskStore):
        store.options = replace(store.options, free_floor_bytes=settings.disk.keep_free)
    if isinstance(store, RedisStore):
        store.options = replace(
            store.options,
            ttl_seconds=settings.redis.ttl_seconds,
            timeout_seconds=settings.redis.timeout_seconds,
        )


def _codec(key: str, mode: CodecMode) -> CodecMode:
    """Return the mode, or none where that is auto and can't be had. Raises SettingsError."""
    if mode is CodecMode.NONE:
        return mode
    try:
        compression.require()
    except compression.CodecMissing as missing:
        if mode is CodecMode.ALWAYS:
            raise SettingsError(
                f"{key} is always, but {missing}: install it, or write none."
            ) from None
        log.warning("%s is auto, and nothing is compressed: %s", key, missing)
        return CodecMode.NONE
    return mode


def _disk(settings: Settings) -> RecordStore:
    disk = settings.disk
    assert disk.path is not None, "there is a disk tier"
    return DiskStore(DiskOptions(disk.path, disk.keep_free))


def _redis(settings: Settings) -> RecordStore:
    redis = settings.redis
    assert redis.url is not None, "there is a Redis tier"
    return RedisStore(
        RedisOptions(
            url=redis.url,
            username=redis.username,
            password=settings.redis_password(),
            timeout_seconds=redis.timeout_seconds,
            ttl_seconds=redis.ttl_seconds,
            ca_file=redis.ca_file,
            cluster=redis.cluster,
            connections=redis.connections,
        )
    )


async def look_after(tiers: Sequence[LowerTier]) -> None:
    """Start the tiers, and probe and check them until cancelled."""
    for tier in tiers:
        tier.start()
    while True:
        await asyncio.sleep(TICK_SECONDS)
        for tier in tiers:
            tier.tick()


async def drain(tiers: Sequence[LowerTier], more: Iterator[LowerTier], seconds: float) -> None:
    """Wait until what is queued was written, `seconds` at most, and write more meanwhile.

    `more` yields a tier each time before it offers it a block.
    """
    end = time.monotonic() + seconds
    for offered, tier in enumerate(more, 1):
        while tier.health.up and 2 * tier.queued_write_bytes > tier.options.queue_bytes:
            if time.monotonic() > end:
                return
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        if not offered % OFFERS_A_TURN:
            await asyncio.sleep(0)
        if time.monotonic() > end:
            break
    while any(tier.queued_write_bytes for tier in tiers if tier.health.up):
        if time.monotonic() > end:
            return
        await asyncio.sleep(DRAIN_POLL_SECONDS)
