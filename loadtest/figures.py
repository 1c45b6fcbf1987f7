"""The measured figures, by name: each runs its benchmark and prints one JSON line last.

python -m loadtest.figures              lists them
python -m loadtest.figures NAME ...     measures these, one after the other
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from . import measures
from .model import ModelError
from .peers import PeerError
from .report import machine
from .rig import RigError
from .stack import StackError


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


FIGURES = {
    "demo_l1_gain": Figure("cold TTFT ÷ L1 TTFT in the demo", 5.0, None, measures.demo_l1_gain),
    "host_budget_ratio": Figure(
        "host memory as the kernel counts it ÷ host.capacity",
        0.98,
        1.02,
        measures.host_budget_ratio,
    ),
    "directory_bytes_per_block": Figure(
        "private memory of one directory entry among a million, in bytes",
        None,
        600.0,
        measures.directory_bytes_per_block,
    ),
    "l1_ttft_ratio": Figure(
        "TTFT of 3,000 tokens from L1 ÷ from L0", None, 1.08, measures.l1_ttft_ratio, Judged.MEDIAN
    ),
    "l1_load_limit_ratio": Figure(
        "TTFT from L1 less that from L0 ÷ time in which one thread copies as much",
        0.0,  # A load takes time: less is the noise of a busy machine, and no measurement.
        1.5,
        measures.l1_load_limit_ratio,
    ),
    "cold_ttft_ratio": Figure(
        "TTFT of new prompts with kvtier ÷ without",
        None,
        1.01,
        measures.cold_ttft_ratio,
        Judged.MEDIAN,
    ),
    "unique_throughput_ratio": Figure(
        "output tokens/s on new prompts with kvtier ÷ without",
        0.99,
        None,
        measures.unique_throughput_ratio,
        Judged.MEDIAN,
    ),
    "page_copy_ratio": Figure(
        "bytes/s of pages to and from slots ÷ of one plain copy",
        0.8,
        None,
        measures.page_copy_ratio,
    ),
    "lookup_ratio": Figure(
        "lookup of 640 blocks ÷ echo of its bytes", None, 4.0, measures.lookup_ratio, Judged.MEDIAN
    ),
    "replay_blocks_per_second": Figure(
        "block accesses a second of CPU time in replay, LRU",
        300_000.0,
        None,
        measures.replay_blocks_per_second,
    ),
    "auto_gap_points": Figure(
        "points of hit ratio that auto is behind the best policy",
        None,
        2.0,
        measures.auto_gap_points,
    ),
    "policy_swap_points": Figure(
        "points of hit ratio that a swap to the same policy changes",
        None,
        0.3,
        measures.policy_swap_points,
    ),
    "learned_write_ratio": Figure(
        "blocks written under learned ÷ always, documents read once",
        None,
        0.05,
        measures.learned_write_ratio,
    ),
    "policy_cpu_share": Figure(
        "CPU time of the default policy ÷ of the loaded server",
        None,
        0.1,
        measures.policy_cpu_share,
        Judged.MEDIAN,
    ),
    "swap_keep_ratio": Figure(
        "hit ratio after a live change of policy and back ÷ before",
        0.99,
        None,
        measures.swap_keep_ratio,
        Judged.MEDIAN,
    ),
    "scrape_loop_ms": Figure(
        "loop time of a scrape with a million blocks and 200 tenants, in ms",
        None,
        50.0,
        measures.scrape_loop_ms,
    ),
    "disk_read_ratio": Figure(
        "bytes/s of reads from disk into slots ÷ fio's",
        0.9,
        None,
        measures.disk_read_ratio,
        Judged.MEDIAN,
    ),
    "disk_write_ratio": Figure(
        "bytes/s of writes from slots to disk ÷ fio's",
        0.9,
        None,
        measures.disk_write_ratio,
        Judged.MEDIAN,
    ),
    "scan_ratio": Figure(
        "scan of 100,000 files ÷ find", None, 3.0, measures.scan_ratio, Judged.MEDIAN
    ),
    "redis_read_ratio": Figure(
        "bytes/s of reads from Redis ÷ a bare client's",
        0.8,
        None,
        measures.redis_read_ratio,
        Judged.MEDIAN,
    ),
    "redis_write_ratio": Figure(
        "bytes/s of writes to Redis ÷ a bare client's",
        0.8,
        None,
        measures.redis_write_ratio,
        Judged.MEDIAN,
    ),
    "disk_load_limit_ratio": Figure(
        "TTFT from disk less that from L0 ÷ time in which fio reads as much",
        0.0,  # As for L1.
        1.25,
        measures.disk_load_limit_ratio,
        Judged.MEDIAN,
    ),
    "redis_load_limit_ratio": Figure(
        "TTFT from Redis less that from L0 ÷ time in which a bare client reads as much",
        0.0,
        1.5,
        measures.redis_load_limit_ratio,
        Judged.MEDIAN,
    ),
    "l2_cold_ttft_ratio": Figure(
        "TTFT of new prompts with kvtier, disk and Redis ÷ without",
        None,
        1.02,
        measures.l2_cold_ttft_ratio,
        Judged.MEDIAN,
    ),
    "frozen_redis_ttft_ratio": Figure(
        "p95 of TTFT with a Redis that does not answer ÷ without a Redis tier",
        None,
        1.05,
        measures.frozen_redis_ttft_ratio,
        Judged.MEDIAN,
    ),
    "loop_lag_ms": Figure(
        "the longest that work for lower tiers holds the server's loop, in ms",
        None,
        5.0,
        measures.loop_lag_ms,
        Judged.MEDIAN,
    ),
    # Of the two values one is for LMCache's default chunk, and one for its smallest.
    "lmcache_l1_ttft_ratio": Figure(
        "TTFT from L1 ÷ LMCache's from its L1",
        None,
        0.9,
        partial(measures.lmcache_hit_ratios, "host"),
    ),
    "lmcache_disk_ttft_ratio": Figure(
        "TTFT from disk ÷ LMCache's from disk",
        None,
        0.9,
        partial(measures.lmcache_hit_ratios, "disk"),
    ),
    "lmcache_redis_ttft_ratio": Figure(
        "TTFT from Redis ÷ LMCache's from Redis",
        None,
        0.9,
        partial(measures.lmcache_hit_ratios, "redis"),
    ),
    "lmcache_cold_ttft_ratio": Figure(
        "TTFT of new prompts ÷ LMCache's",
        None,
        1.0,
        measures.lmcache_cold_ttft_ratio,
        Judged.MEDIAN,
    ),
    "directory_scale_ratio": Figure(
        "a lookup of 640 blocks with a million blocks there ÷ with a thousand",
        None,
        1.3,
        measures.directory_scale_ratio,
        Judged.MEDIAN,
    ),
    "engine_scale_ratio": Figure(
        "lookups a second of 16 engines that pause 5 ms ÷ of one",
        3.0,
        None,
        measures.engine_scale_ratio,
        Judged.MEDIAN,
    ),
    "lmcache_bench_load_ratio": Figure(
        "LMCache's loads via kvtier ÷ via Redis ÷ 1.5, or ÷ its files ÷ 0.5: the smaller",
        1.0,
        None,
        measures.lmcache_bench_load_ratio,
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
