"""The measured figures, by name: each runs its benchmark and prints one JSON line last.

python -m loadtest.figures              lists them
python -m loadtest.figures NAME ...     measures these, one after the other
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from .model import ModelError
from .peers import PeerError
from .report import machine
from .rig import RigError
from .stack import StackError, start_server

RUNS = 3


class Judged(Enum):
    """Which of a figure's values must keep the bounds; the value of the figure is their median."""

    EVERY = "every"
    MEDIAN = "median"
    """Single values are noisy: pairs on a machine that others share."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured, the bounds that its value must keep, and how to get one value a run."""

    about: str
    low: float | None
    high: float | None
    measure: Callable[[], Sequence[float]]
    judged: Judged = Judged.EVERY

    def bound(self) -> str:
        """Return the bounds as text."""
        parts = [f">= {self.low:g}" if self.low is not None else ""]
        parts.append(f"<= {self.high:g}" if self.high is not None else "")
        return " and ".join(filter(None, parts))

    def keeps(self, value: float) -> bool:
        """Return whether a value is inside the bounds."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def passes(self, values: Sequence[float]) -> bool:
        """Return whether the values that count are inside the bounds."""
        judged = values if self.judged is Judged.EVERY else [statistics.median(values)]
        return all(map(self.keeps, judged))


def demo_l1_gain() -> list[float]:
    """Run the demo, and return cold TTFT ÷ TTFT for each step that is served from L1."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "demo.json"
        _python("-m", "loadtest.demo", "--json", str(file))
        steps = json.loads(file.read_text())["steps"]
    return [steps[0]["ttft"] / step["ttft"] for step in steps if step["source"] == "host"]


def host_budget_ratio() -> list[float]:
    """Start servers, and return what the kernel has given to their slabs ÷ the setting."""
    return [_slab_bytes(f"{mib}MiB") / (mib << 20) for mib in (100, 1000, 4000)]


def directory_bytes_per_block() -> list[float]:
    """Fill directories of a million blocks, and return the private memory of one entry."""
    command = ("-m", "loadtest.directory_memory", "--blocks", "1000000")
    return [float(_python(*command, capture=True)) for _ in range(RUNS)]


def l1_ttft_ratio() -> list[float]:
    """Return TTFT from L1 ÷ TTFT from L0, pair by pair."""
    from . import ttft

    return ttft.l1().ratios


def l1_load_limit_ratio() -> list[float]:
    """Return what an L1 hit takes longer than an L0 hit ÷ what copying its bytes takes."""
    from . import ttft

    return [ttft.l1().limit_ratio]


def cold_ttft_ratio() -> list[float]:
    """Return TTFT of a new prompt with kvtier ÷ without, pair by pair."""
    from . import ttft

    return ttft.cold().ratios


def unique_throughput_ratio() -> list[float]:
    """Return output tokens a second on new prompts with kvtier ÷ without, pair by pair."""
    from . import throughput

    return throughput.unique().ratios


def page_copy_ratio() -> Sequence[float]:
    """Return the speed of copies of pages ÷ that of one plain copy, for each kind of page."""
    from . import page_copy

    return page_copy.measure()


def lookup_ratio() -> Sequence[float]:
    """Return the time of a lookup ÷ that of an echo of as many bytes, run by run."""
    from . import lookup

    return lookup.measure()


def replay_blocks_per_second() -> list[float]:
    """Replay requests made up for it, and return accesses ÷ CPU seconds of each run."""
    from . import replay_speed

    return replay_speed.measure()


def auto_gap_points() -> list[float]:
    """Return how far `auto` is behind the best fixed policy, trace by trace and size by size."""
    from . import replay_ratios

    return replay_ratios.auto_gaps()


def policy_swap_points() -> list[float]:
    """Return what a swap to the same policy changes, policy by policy."""
    from . import replay_ratios

    return replay_ratios.swap_losses()


def learned_write_ratio() -> list[float]:
    """Return blocks written under `learned` ÷ under `always`, of documents that are read once."""
    from . import replay_ratios

    return replay_ratios.learned_writes()


def policy_cpu_share() -> list[float]:
    """Return the default policy's share of a loaded server's CPU time, run by run."""
    from . import policy_share

    return policy_share.measure()


def swap_keep_ratio() -> list[float]:
    """Return the hit ratio after a change of policy and back ÷ before, swap by swap."""
    from . import swap_keep

    return swap_keep.measure()


def scrape_loop_ms() -> list[float]:
    """Return how long a scrape of a million blocks holds the loop, scrape by scrape."""
    from . import scrape

    return scrape.measure()


def disk_read_ratio() -> list[float]:
    """Return bytes/s of the disk tier's reads ÷ fio's, pair by pair."""
    from . import disk_speed

    return disk_speed.disk_read_ratio()


def disk_write_ratio() -> list[float]:
    """Return bytes/s of the disk tier's writes ÷ fio's, pair by pair."""
    from . import disk_speed

    return disk_speed.disk_write_ratio()


def scan_ratio() -> list[float]:
    """Return the time of a scan of the disk tier ÷ that of find, pair by pair."""
    from . import disk_speed

    return disk_speed.scan_ratio()


def redis_read_ratio() -> list[float]:
    """Return bytes/s of the Redis tier's reads ÷ a bare client's, pair by pair."""
    from . import redis_speed

    return redis_speed.read_ratios()


def redis_write_ratio() -> list[float]:
    """Return bytes/s of the Redis tier's writes ÷ a bare client's, pair by pair."""
    from . import redis_speed

    return redis_speed.write_ratios()


def disk_load_limit_ratio() -> list[float]:
    """Return what a disk hit takes longer than an L0 hit ÷ what fio takes for its bytes."""
    from . import lower_tiers

    return [lower_tiers.disk().limit_ratio]


def redis_load_limit_ratio() -> list[float]:
    """Return what a Redis hit takes longer than an L0 hit ÷ what a bare client takes for it."""
    from . import lower_tiers

    return [lower_tiers.redis().limit_ratio]


def l2_cold_ttft_ratio() -> list[float]:
    """Return TTFT of a new prompt with kvtier, disk and Redis ÷ without kvtier, pair by pair."""
    from . import lower_tiers

    return lower_tiers.cold().ratios


def frozen_redis_ttft_ratio() -> list[float]:
    """Return p95 of TTFT beside a Redis that does not answer ÷ p95 without a Redis tier."""
    from . import lower_tiers

    return [lower_tiers.frozen()]


def loop_lag_ms() -> list[float]:
    """Return the milliseconds that work for lower tiers holds the server's loop at most."""
    from . import loop_lag

    return loop_lag.measure()


def lmcache_hit_ratios(tier: str) -> list[float]:
    """Return the median of kvtier's TTFT from a tier ÷ LMCache's, for each of its chunks."""
    from . import peer_ttft

    rounds = peer_ttft.hits(peer_ttft.Tiers(tier))
    return rounds.medians(peer_ttft.DEFAULT, peer_ttft.SMALLEST)


def lmcache_cold_ttft_ratio() -> list[float]:
    """Return kvtier's TTFT of a new prompt ÷ LMCache's, round by round."""
    from . import peer_ttft

    return peer_ttft.cold().ratios(peer_ttft.DEFAULT)


def directory_scale_ratio() -> list[float]:
    """Return the time of a lookup with a million blocks ÷ with a thousand, pair by pair."""
    from .dataplane import ratios

    return ratios.directory_scale()


def engine_scale_ratio() -> list[float]:
    """Return the requests a second of 16 engines ÷ of one, run by run."""
    from .dataplane import ratios

    return ratios.engine_scale()


def lmcache_bench_load_ratio() -> list[float]:
    """Return min(kvtier ÷ resp ÷ 1.5, kvtier ÷ fs_native ÷ 0.5) of LMCache's loads, run by run."""
    from . import lmcache_bench

    return lmcache_bench.ratio()


FIGURES = {
    "demo_l1_gain": Figure("cold TTFT ÷ L1 TTFT in the demo", 5.0, None, demo_l1_gain),
    "host_budget_ratio": Figure(
        "host memory as the kernel counts it ÷ host.capacity", 0.98, 1.02, host_budget_ratio
    ),
    "directory_bytes_per_block": Figure(
        "private memory of one directory entry among a million, in bytes",
        None,
        600.0,
        directory_bytes_per_block,
    ),
    "l1_ttft_ratio": Figure(
        "TTFT of 3,000 tokens from L1 ÷ from L0", None, 1.08, l1_ttft_ratio, Judged.MEDIAN
    ),
    "l1_load_limit_ratio": Figure(
        "TTFT from L1 less that from L0 ÷ time in which one thread copies as much",
        0.0,  # A load takes time: less is the noise of a busy machine, and no measurement.
        1.5,
        l1_load_limit_ratio,
    ),
    "cold_ttft_ratio": Figure(
        "TTFT of new prompts with kvtier ÷ without", None, 1.01, cold_ttft_ratio, Judged.MEDIAN
    ),
    "unique_throughput_ratio": Figure(
        "output tokens/s on new prompts with kvtier ÷ without",
        0.99,
        None,
        unique_throughput_ratio,
        Judged.MEDIAN,
    ),
    "page_copy_ratio": Figure(
        "bytes/s of pages to and from slots ÷ of one plain copy", 0.8, None, page_copy_ratio
    ),
    "lookup_ratio": Figure(
        "lookup of 640 blocks ÷ echo of its bytes", None, 4.0, lookup_ratio, Judged.MEDIAN
    ),
    "replay_blocks_per_second": Figure(
        "block accesses a second of CPU time in replay, LRU",
        300_000.0,
        None,
        replay_blocks_per_second,
    ),
    "auto_gap_points": Figure(
        "points of hit ratio that auto is behind the best policy", None, 2.0, auto_gap_points
    ),
    "policy_swap_points": Figure(
        "points of hit ratio that a swap to the same policy changes", None, 0.3, policy_swap_points
    ),
    "learned_write_ratio": Figure(
        "blocks written under learned ÷ always, documents read once",
        None,
        0.05,
        learned_write_ratio,
    ),
    "policy_cpu_share": Figure(
        "CPU time of the default policy ÷ of the loaded server",
        None,
        0.1,
        policy_cpu_share,
        Judged.MEDIAN,
    ),
    "swap_keep_ratio": Figure(
        "hit ratio after a live change of policy and back ÷ before",
        0.99,
        None,
        swap_keep_ratio,
        Judged.MEDIAN,
    ),
    "scrape_loop_ms": Figure(
        "loop time of a scrape with a million blocks and 200 tenants, in ms",
        None,
        50.0,
        scrape_loop_ms,
    ),
    "disk_read_ratio": Figure(
        "bytes/s of reads from disk into slots ÷ fio's", 0.9, None, disk_read_ratio, Judged.MEDIAN
    ),
    "disk_write_ratio": Figure(
        "bytes/s of writes from slots to disk ÷ fio's", 0.9, None, disk_write_ratio, Judged.MEDIAN
    ),
    "scan_ratio": Figure("scan of 100,000 files ÷ find", None, 3.0, scan_ratio, Judged.MEDIAN),
    "redis_read_ratio": Figure(
        "bytes/s of reads from Redis ÷ a bare client's", 0.8, None, redis_read_ratio, Judged.MEDIAN
    ),
    "redis_write_ratio": Figure(
        "bytes/s of writes to Redis ÷ a bare client's", 0.8, None, redis_write_ratio, Judged.MEDIAN
    ),
    "disk_load_limit_ratio": Figure(
        "TTFT from disk less that from L0 ÷ time in which fio reads as much",
        0.0,  # As for L1.
        1.25,
        disk_load_limit_ratio,
        Judged.MEDIAN,
    ),
    "redis_load_limit_ratio": Figure(
        "TTFT from Redis less that from L0 ÷ time in which a bare client reads as much",
        0.0,
        1.5,
        redis_load_limit_ratio,
        Judged.MEDIAN,
    ),
    "l2_cold_ttft_ratio": Figure(
        "TTFT of new prompts with kvtier, disk and Redis ÷ without",
        None,
        1.02,
        l2_cold_ttft_ratio,
        Judged.MEDIAN,
    ),
    "frozen_redis_ttft_ratio": Figure(
        "p95 of TTFT with a Redis that does not answer ÷ without a Redis tier",
        None,
        1.05,
        frozen_redis_ttft_ratio,
        Judged.MEDIAN,
    ),
    "loop_lag_ms": Figure(
        "the longest that work for lower tiers holds the server's loop, in ms",
        None,
        5.0,
        loop_lag_ms,
        Judged.MEDIAN,
    ),
    # Of the two values one is for LMCache's default chunk, and one for its smallest.
    "lmcache_l1_ttft_ratio": Figure(
        "TTFT from L1 ÷ LMCache's from its L1", None, 0.9, partial(lmcache_hit_ratios, "host")
    ),
    "lmcache_disk_ttft_ratio": Figure(
        "TTFT from disk ÷ LMCache's from disk", None, 0.9, partial(lmcache_hit_ratios, "disk")
    ),
    "lmcache_redis_ttft_ratio": Figure(
        "TTFT from Redis ÷ LMCache's from Redis", None, 0.9, partial(lmcache_hit_ratios, "redis")
    ),
    "lmcache_cold_ttft_ratio": Figure(
        "TTFT of new prompts ÷ LMCache's", None, 1.0, lmcache_cold_ttft_ratio, Judged.MEDIAN
    ),
    "directory_scale_ratio": Figure(
        "a lookup of 640 blocks with a million blocks there ÷ with a thousand",
        None,
        1.3,
        directory_scale_ratio,
        Judged.MEDIAN,
    ),
    "engine_scale_ratio": Figure(
        "lookups a second of 16 engines that pause 5 ms ÷ of one",
        3.0,
        None,
        engine_scale_ratio,
        Judged.MEDIAN,
    ),
    "lmcache_bench_load_ratio": Figure(
        "LMCache's loads via kvtier ÷ via Redis ÷ 1.5, or ÷ its files ÷ 0.5: the smaller",
        1.0,
        None,
        lmcache_bench_load_ratio,
        Judged.MEDIAN,
    ),
}


def main(arguments: Sequence[str]) -> int:
    """List the figures, or measure some. Returns 1 if one breaks its bound, 2 for a wrong name."""
    if not arguments:
        for name, figure in FIGURES.items():
            print(f"{name:28} {figure.bound():18} {figure.about}")
        return 0
    if unknown := [name for name in arguments if name not in FIGURES]:
        print(f"no figure {unknown[0]}: they are {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return max([_measure(name) for name in arguments])
    except (RigError, StackError, ModelError, PeerError) as error:
        print(f"figures: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("figures: stopped; nothing runs on", file=sys.stderr)
        return 130


def _measure(name: str) -> int:
    """Measure a figure and print its line. Returns 1 if it breaks its bound."""
    figure = FIGURES[name]
    busy = os.getloadavg()[0]
    values = figure.measure()
    ok = figure.passes(values)
    line = {
        "figure": name,
        "value": round(statistics.median(values), 4),
        "bound": figure.bound(),
        "ok": ok,
        "spread": [round(min(values), 4), round(max(values), 4)],
        "machine": machine(),
        "load_before": round(busy, 2),
    }
    print(json.dumps(line, ensure_ascii=False), flush=True)
    return 0 if ok else 1


def _slab_bytes(capacity: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder), "--capacity", capacity)
        try:
            server.wait()
            descriptors = Path(f"/proc/{server.child.pid}/fd")
            slabs = [
                each for each in descriptors.iterdir() if "memfd:kvtier" in str(each.readlink())
            ]
            return sum(each.stat().st_blocks * 512 for each in slabs)
        finally:
            server.stop()


def _python(*arguments: str, capture: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        check=True,
        text=True,
        stdout=subprocess.PIPE if capture else sys.stderr,
    )
    return done.stdout if capture else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
