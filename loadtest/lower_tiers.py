"""TTFT with tiers below the host tier: hits on disk and in Redis, cold prompts, a frozen Redis.

    python -m loadtest.lower_tiers disk|redis|cold|frozen

prints what `loadtest.figures` makes figures of. Times are a client's, as in `loadtest.ttft`. The
disk is the one that temporary files lie on; Redis is a redis-server of this program, asked over its
unix socket.

A hit from a lower tier is one because other prompts have pushed its blocks out of a small host tier
since it was asked for last. What it takes longer than the L0 hit right after it stands beside what
its bytes take: fio reading the files of all prompts with as many jobs as the tier has threads, or
the bare client of `loadtest.redis_speed`, both measured between the pairs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .disk_speed import FioReads
from .redis_speed import bare_reads, redis_server
from .report import Row, show
from .rig import BLOCK_TOKENS, WITH, WITHOUT, Engine, Rig, RigError, counter, prompt, rig
from .ttft import PROMPT_BLOCKS, PROMPT_TOKENS, Pairs, cold_pairs, hit, more

HOST_CAPACITY = "300MiB"
"""Two prompts fill it."""
PROMPTS = 4
PIECE_BLOCKS = 23
"""Stored at once: what waits to be written is an eighth of the host tier at most."""
PAIRS_AT_LEAST = 3 * PROMPTS
PAIRS_AT_MOST = 20 * PROMPTS
PAIRS_SECONDS = 120.0
"""After the least number of pairs, more are asked for only so long."""
DISK_THREADS = 4
"""The default of disk.threads."""
SETTINGS = """
host: {policy: lru}
disk: {admission: always}
redis: {timeout_seconds: 5}
"""
"""What is asked for in turn leaves the host tier in turn. All is written, and a busy machine must
not cost blocks: each is written once."""
DISK, REDIS, HOST, DEVICE = "disk", "redis", "host", "device"
LOAD_SECONDS_METRIC = "kvtier_engine_load_seconds_total"
WAIT_SECONDS_METRIC = "kvtier_wait_seconds_sum"

SHARED_BLOCKS = 2
"""Of each prompt while Redis is frozen: in L1. A third block is new, and the rest is no block."""
TAIL_TOKENS = range(BLOCK_TOKENS + 20, BLOCK_TOKENS + 40)
FROZEN_PAIRS_AT_LEAST = 40
FROZEN_PAIRS_AT_MOST = 400
FROZEN_SECONDS = 200.0
OPENING_SECONDS = 60.0
SHARING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Loads:
    """TTFTs in seconds, pair by pair, and where the time went."""

    lower: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """From the server's first answer to its second: reads into slots."""
    copies: list[float] = field(default_factory=list)
    """From slots to the engine's KV cache."""
    speeds: list[float] = field(default_factory=list)
    """Bytes a second of the program that stands for the medium's limit, in between."""
    sizes: list[float] = field(default_factory=list)
    """Bytes that the server read for one hit."""

    @property
    def extra(self) -> list[float]:
        """What a hit from the lower tier takes longer, pair by pair."""
        return [lower - device for lower, device in zip(self.lower, self.device, strict=True)]

    @property
    def limit(self) -> list[float]:
        """Seconds that the other program takes for as many bytes."""
        return [size / speed for size, speed in zip(self.sizes, self.speeds, strict=True)]

    @property
    def limit_ratio(self) -> float:
        """What a hit takes longer than an L0 hit ÷ what its bytes take."""
        size, speed = statistics.median(self.sizes), statistics.median(self.speeds)
        return statistics.median(self.extra) / (size / speed)


def disk() -> Loads:
    """Measure hits from the disk tier. Takes about four minutes."""
    with tempfile.TemporaryDirectory(prefix="kvtier-disk-") as folder:
        blocks = Path(folder) / "blocks"
        settings = Path(folder) / "kvtier.yaml"
        settings.write_text(SETTINGS)
        lower = ("--disk", str(blocks), "--config", str(settings))
        with rig(WITH, capacity=HOST_CAPACITY, lower=lower) as running:
            prompts = _prompts(running, DISK)
            fio = FioReads(sorted(blocks.rglob("*.kv")), Path(folder) / "links", DISK_THREADS)
            loads = _measure(running, DISK, prompts, fio.speed)
    _show(loads, DISK, f"fio with {DISK_THREADS} jobs")
    return loads


def redis() -> Loads:
    """Measure hits from the Redis tier. Takes about four minutes."""
    with contextlib.ExitStack() as ends:
        server = ends.enter_context(redis_server())
        bare = ends.enter_context(bare_reads(server, "unix"))
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-redis-"))
        settings = Path(folder) / "kvtier.yaml"
        settings.write_text(SETTINGS)
        lower = ("--redis", server.url("unix"), "--config", str(settings))
        running = ends.enter_context(rig(WITH, capacity=HOST_CAPACITY, lower=lower))
        loads = _measure(running, REDIS, _prompts(running, REDIS), bare)
    _show(loads, "Redis over its unix socket", "a bare client")
    return loads


def cold() -> Pairs:
    """Measure prompts that nobody has seen, written to disk and Redis. Takes four minutes."""
    with _disk_and_redis() as lower, rig(WITH, WITHOUT, lower=lower) as running:
        pairs = cold_pairs(running, ", with disk and Redis below")
        for tier in (DISK, REDIS):
            running.wait_written(tier, running.stored())
    return pairs


def frozen() -> float:
    """Return p95 of TTFT with a Redis that does not answer ÷ p95 without a Redis tier.

    Takes about five minutes.
    """
    with contextlib.ExitStack() as ends:
        server = ends.enter_context(redis_server())
        below = ends.enter_context(rig(WITH, lower=("--redis", server.url("unix"))))
        without = ends.enter_context(rig(WITH))
        shared = prompt("shared", SHARED_BLOCKS * BLOCK_TOKENS)
        for each in (below, without):
            _share(each, [*shared, *prompt("first", 8)])
        os.kill(server.pid, signal.SIGSTOP)
        _wait_until_left_alone(below)
        times: tuple[list[float], list[float]] = ([], [])
        sides = list(zip((below, without), times, strict=True))
        for number in more(FROZEN_PAIRS_AT_LEAST, FROZEN_PAIRS_AT_MOST, FROZEN_SECONDS):
            tail = prompt(f"frozen-{number}", TAIL_TOKENS[number % len(TAIL_TOKENS)])
            for running, found in sides if number % 2 == 0 else reversed(sides):
                found.append(_partly_cached(running[WITH], [*shared, *tail]))
        if _up(below):
            raise RigError("the Redis tier was asked although Redis does not answer.")
    late = [statistics.quantiles(each, n=20, method="inclusive")[-1] for each in times]
    rows = [
        Row("TTFT, Redis frozen", times[0], "ms", 1e3),
        Row("TTFT, no Redis tier", times[1], "ms", 1e3),
        Row("p95, Redis frozen", late[:1], "ms", 1e3),
        Row("p95, no Redis tier", late[1:], "ms", 1e3),
        Row("p95 ÷ p95", [late[0] / late[1]]),
    ]
    show(f"prompts of {SHARED_BLOCKS} blocks from L1 and a new one", rows)
    return late[0] / late[1]


def _prompts(running: Rig, tier: str) -> list[list[int]]:
    """Return prompts whose blocks are all in the lower tier."""
    prompts = [prompt(f"{tier}-{number}", PROMPT_TOKENS) for number in range(PROMPTS)]
    rest = PROMPT_TOKENS - PROMPT_BLOCKS * BLOCK_TOKENS
    written = 0
    for each in prompts:
        for blocks in range(PIECE_BLOCKS, PROMPT_BLOCKS + 1, PIECE_BLOCKS):
            running[WITH].ask(each[: blocks * BLOCK_TOKENS + rest])
            written += PIECE_BLOCKS
            running.wait_written(tier, written)
    return prompts


def _measure(
    running: Rig, tier: str, prompts: Sequence[list[int]], speed: Callable[[], float]
) -> Loads:
    """Ask for the prompts in turn, from the lower tier and from L0. Raises RigError."""
    for each in prompts:
        _pair(running, tier, each, Loads(), speed)
    before = _tokens_hit(running)
    loads = Loads()
    for number in more(PAIRS_AT_LEAST, PAIRS_AT_MOST, PAIRS_SECONDS):
        _pair(running, tier, prompts[number % PROMPTS], loads, speed)
    after = _tokens_hit(running)
    found = {each: after[each] - before[each] for each in (DEVICE, HOST, tier)}
    tokens = len(loads.lower) * PROMPT_BLOCKS * BLOCK_TOKENS
    if found != {DEVICE: tokens, HOST: 0, tier: tokens}:
        raise RigError(f"{tokens} tokens were to come from {tier} and from L0 each: {found}.")
    return loads


def _pair(
    running: Rig, tier: str, tokens: list[int], loads: Loads, speed: Callable[[], float]
) -> None:
    engine = running[WITH]
    engine.forget()
    engine.wake()
    before = _spent(running, tier)
    loads.lower.append(hit(engine, tokens))
    loads.device.append(hit(engine, tokens))
    engine.ask(prompt("last", 8))  # vLLM counts a step's copies when the next step is over.
    spent = [now - then for now, then in zip(_spent(running, tier), before, strict=True)]
    for to, seconds in zip((loads.waits, loads.copies, loads.sizes), spent, strict=True):
        to.append(seconds)
    loads.speeds.append(speed())


def _spent(running: Rig, tier: str) -> tuple[float, float, float]:
    """Return seconds that lookups waited and that loads copied, and bytes read, in all so far."""
    return (
        counter(running.server, WAIT_SECONDS_METRIC),
        running[WITH].counter(LOAD_SECONDS_METRIC),
        counter(running.server, "kvtier_read_bytes_total", tier=tier),
    )


def _tokens_hit(running: Rig) -> dict[str, int]:
    traffic = json.loads(running.server.get("/v1/stats"))["traffic"]
    return {each["tier"]: each["tokens_hit"] for each in traffic}


@contextlib.contextmanager
def _disk_and_redis() -> Iterator[tuple[str, ...]]:
    """Give the options of a server that has both."""
    with tempfile.TemporaryDirectory(prefix="kvtier-disk-") as folder, redis_server() as server:
        yield "--disk", f"{folder}/blocks", "--redis", server.url("unix")


def _up(running: Rig) -> bool:
    return counter(running.server, "kvtier_tier_up", tier=REDIS) == 1


def _wait_until_left_alone(running: Rig) -> None:
    """Ask until the server has noticed that Redis does not answer. Raises RigError."""
    end = time.monotonic() + OPENING_SECONDS
    while _up(running):
        if time.monotonic() > end:
            raise RigError(f"after {OPENING_SECONDS:.0f} s a frozen Redis is asked all the same.")
        running[WITH].ask(prompt(f"opening-{time.monotonic()}", 2 * BLOCK_TOKENS + 1))


def _share(running: Rig, tokens: list[int]) -> None:
    """Ask until the server has the prompt's whole blocks. Raises RigError."""
    end = time.monotonic() + OPENING_SECONDS
    while running.stored() < SHARED_BLOCKS:
        if time.monotonic() > end:
            raise RigError("the beginning that all prompts share was not stored.")
        running[WITH].forget()
        running[WITH].ask(tokens)
        time.sleep(SHARING_SECONDS)


def _partly_cached(engine: Engine, tokens: list[int]) -> float:
    engine.forget()
    asked = engine.ask(tokens)
    if asked.cached != SHARED_BLOCKS * BLOCK_TOKENS:
        raise RigError(f"{asked.cached} tokens were cached, not {SHARED_BLOCKS} blocks.")
    return asked.ttft


def _show(loads: Loads, what: str, limit: str) -> None:
    rows = [
        Row(f"TTFT from {what}", loads.lower, "ms", 1e3),
        Row("TTFT from L0", loads.device, "ms", 1e3),
        Row("the first less the second", loads.extra, "ms", 1e3),
        Row("of that: the server reads", loads.waits, "ms", 1e3),
        Row("of that: the engine copies", loads.copies, "ms", 1e3),
        Row(f"{limit} reads as much", loads.limit, "ms", 1e3),
        Row(f"bandwidth of {limit}", loads.speeds, "GB/s", 1e-9),
        Row("what it takes longer ÷ limit", [loads.limit_ratio]),
    ]
    size = statistics.median(loads.sizes) / 1e6
    show(f"prompts of {PROMPT_TOKENS} tokens, {size:.0f} MB from {what}", rows)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    {"disk": disk, "redis": redis, "cold": cold, "frozen": frozen}[sys.argv[1]]()
