"""What is measured for each figure: one function each, which returns one value a run.

A benchmark is imported when it is run: some need packages that others do without.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .stack import start_server

RUNS = 3


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
