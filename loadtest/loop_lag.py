"""How long the server's event loop is held while it works for lower tiers.

    python -m loadtest.loop_lag

A real `kvtier serve` with a disk and a Redis tier, and simulated engines that store and look up
through `kvtier.client`, but compute and copy nothing: what they store is whatever lies in the
slots. They store more than the host tier holds, so that blocks leave it, and look for long prefixes
that have left, so that hundreds of blocks are promoted at once. They begin while the server scans
the files that a directory has from before. The figure is of `kvtier_loop_hold_seconds`, the CPU
time of each frame and of each call that lower tiers hand to the loop: what else runs on the machine
does not lengthen it. Beside it stands how late the loop ran a timer, `kvtier_loop_lag_seconds`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvtier import protocol as wire
from kvtier.codec import HEADER_PAGE_BYTES
from kvtier.core import Manifest

from .disk_speed import fill
from .engines import MANIFEST, connect, unanswered
from .redis_speed import redis_server
from .report import Row, show
from .rig import RigError, counter
from .stack import Part, start_server

ENGINES = 8
BLOCK_BYTES = (409_600, 1_474_560)
"""Of every other engine."""
CHAIN_BLOCKS = 192
PIECE_BLOCKS = 24
"""Stored at once."""
PIECE_SECONDS = 0.6
"""From one piece of an engine to its next."""
ROUND_SECONDS = 0.005
SECONDS = 100.0
FILES_BEFORE = 20_000
PROMOTED_AT_LEAST = 500
LAG_METRIC = "kvtier_loop_lag_seconds"
HOLD_METRIC = "kvtier_loop_hold_seconds"
BEYOND = 0.001
"""Share of the samples that may lie above the value, and one in any case."""
SETTINGS = """
host: {{capacity: 2GiB}}
disk: {{path: {disk}, capacity: 8GiB}}
redis: {{url: "{redis}", capacity: 2GiB}}
log: {{level: info}}
"""
MAXMEMORY = ("--maxmemory", "2500mb", "--maxmemory-policy", "allkeys-lru")


def measure() -> list[float]:
    """Return the milliseconds below which all samples are but one in a thousand, or but one."""
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-lag-")))
        redis = ends.enter_context(redis_server(*MAXMEMORY))
        fill(folder / "blocks", FILES_BEFORE, HEADER_PAGE_BYTES + BLOCK_BYTES[0])
        settings = folder / "kvtier.yaml"
        settings.write_text(SETTINGS.format(disk=folder / "blocks", redis=redis.url("unix")))
        server = start_server(folder, "--config", str(settings))
        ends.callback(server.stop)
        try:
            engines = [_Engine(server, number) for number in range(ENGINES)]
            for engine in engines:
                ends.callback(engine.client.close)
            _run(engines)
        except RigError as error:
            raise RigError(f"{error}\n{server.tail()}") from None
        return [_report(server, engines)]


@dataclass(slots=True)
class _Chain:
    """Blocks of one long prompt. Their keys are known from the start, and stored bit by bit."""

    keys: list[bytes]
    stored: int = 0


@dataclass(slots=True)
class _Waits:
    """A lookup whose answer may come later."""

    lease: int
    until: float


class _Engine:
    """An engine's scheduler side. It is given its turn again and again, and never waits long."""

    def __init__(self, server: Part, number: int) -> None:
        self.seconds: list[float] = []
        """What lookups took, those that waited among them."""
        manifest = _manifest(BLOCK_BYTES[number % len(BLOCK_BYTES)])
        self.client = connect(server.socket, f"lag-{number}", manifest)
        self._random = random.Random(number)
        self._chains: list[_Chain] = []
        self._next_piece = 0.0
        self._waits: _Waits | None = None
        self._began = 0.0

    def turn(self) -> None:
        """Store a piece if it is time for that, and go on with lookups. Raises RigError."""
        now = time.monotonic()
        if now >= self._next_piece:
            self._next_piece = now + PIECE_SECONDS * self._random.uniform(0.5, 1.5)
            self._store()
        if self._waits is not None:
            self._take_answer(self._waits)
        elif len(self._chains) > 1:
            self._look_up(self._random.choice(self._chains[:-1]))

    def _store(self) -> None:
        if not self._chains or self._chains[-1].stored >= CHAIN_BLOCKS:
            self._chains.append(_Chain([self._random.randbytes(32) for _ in range(CHAIN_BLOCKS)]))
        chain = self._chains[-1]
        above = [b"".join(chain.keys[: chain.stored])] if chain.stored else []
        need = min(PIECE_BLOCKS, CHAIN_BLOCKS - chain.stored)
        granted = self.client.step(wire.Step(0, need=need, above=above))
        if granted is None:
            raise unanswered(self.client, "a step")
        keys = chain.keys[chain.stored : chain.stored + len(granted.slots)]
        parent = chain.keys[chain.stored - 1] if chain.stored else b""
        chain.stored += len(keys)
        step = wire.Step(0, commits=[wire.Chain(parent, b"".join(keys), granted.slots)])
        self.client.send_step(step)

    def _look_up(self, chain: _Chain) -> None:
        self._began = time.monotonic()
        found = self.client.lookup(b"".join(chain.keys), 0)
        if found is None:
            raise unanswered(self.client, "a lookup")
        if found.within:
            self._waits = _Waits(found.seq, time.monotonic() + found.within + 1.0)
        else:
            self._end(found)

    def _take_answer(self, waits: _Waits) -> None:
        found = self.client.answer(waits.lease)
        if found is not None:
            self._waits = None
            self._end(found)
        elif time.monotonic() > waits.until:
            raise RigError("a lookup that waits was not answered in time.")

    def _end(self, found: wire.Found) -> None:
        self.seconds.append(time.monotonic() - self._began)
        self.client.send_step(wire.Step(0, releases=[found.seq]))


def _run(engines: list[_Engine]) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for engine in engines:
            engine.turn()
        time.sleep(ROUND_SECONDS)


def _report(server: Part, engines: list[_Engine]) -> float:
    """Print what happened. Returns the value in milliseconds. Raises RigError."""
    promoted = counter(server, "kvtier_promotions_total", outcome="promoted")
    if promoted < PROMOTED_AT_LEAST:
        raise RigError(f"only {promoted:.0f} blocks were promoted: that is no load.")
    lags, bounds = _buckets(server, LAG_METRIC), _buckets(server, HOLD_METRIC)
    samples = bounds[-1][1]
    counters = {
        "blocks promoted": promoted,
        "blocks evicted": counter(server, "kvtier_evictions_total"),
        "blocks written": counter(server, "kvtier_writes_total", outcome="written"),
        "writes that came too fast": counter(server, "kvtier_writes_total", outcome="queue_full"),
    }
    rows = [Row("lookups took", [each for one in engines for each in one.seconds], "ms", 1e3)]
    for what, found in (("lag", lags), ("hold", bounds)):
        rows += [Row(f"{what} of at most {bound * 1e3:g} ms", [count]) for bound, count in found]
    rows += [Row(what, [count]) for what, count in counters.items()]
    show(f"{ENGINES} engines, {SECONDS:g} s, {samples} samples", rows)
    most = samples - max(1, int(samples * BEYOND))
    return next(bound for bound, count in bounds if count >= most) * 1e3


def _buckets(server: Part, metric: str) -> list[tuple[float, float]]:
    """Return bounds in seconds, and how many samples of all labels lie below each."""
    found: Counter[float] = Counter()
    for line in server.get("/metrics").splitlines():
        if line.startswith(f"{metric}_bucket"):
            labels, count = line.rsplit(" ", 1)
            found[float(labels.split('le="')[1].split('"')[0])] += int(float(count))
    return sorted(found.items())


def _manifest(block_bytes: int) -> Manifest:
    weights = hashlib.sha256(b"%d" % block_bytes).hexdigest()
    return dataclasses.replace(MANIFEST, weights=weights, shard_bytes=block_bytes)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(*measure(), sep="\n", file=sys.stdout)
