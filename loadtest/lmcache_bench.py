"""LMCache's own benchmark of L2 adapters, through kvtier and through two of its own, in turn.

`lmcache bench l2` stores batches, loads them into cleared buffers and compares every byte. Through
kvtier all loads are L1 hits: a copy from a slot. Beside it LMCache's client of Redis talks to a
redis-server on loopback, and its native file adapter reads files from the page cache. All run in
LMCache's environment (`make venv-lmcache`), in turn on one machine, and a ratio is of neighbours
in time.

    python -m loadtest.lmcache_bench [--rounds 5] [--pairs 5]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .peers.lmcache import ENTRY, PYTHON, LMCacheHost
from .report import Row, show
from .rig import RigError
from .stack import Part, Redis, start_redis, start_server

CAPACITY = "3GiB"
"""More than all runs store: every load is a hit."""
VALUE_KIB = 5760
"""A chunk of 256 tokens of SmolLM2-135M in bf16: 23,040 bytes a token."""
KEYS_AT_ONCE = 8
WARMUP_ROUNDS = 2
ROUNDS = 5
PAIRS = 5
RUN_SECONDS = 300.0
RESP_BOUND = 1.5
FILE_BOUND = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """Load bandwidths in MB/s, run by run, each of all three after one another."""

    kvtier: list[float]
    resp: list[float]
    files: list[float]

    def over_resp(self) -> list[float]:
        """Return kvtier ÷ LMCache's client of Redis, run by run."""
        return [ours / its for ours, its in zip(self.kvtier, self.resp, strict=True)]

    def over_files(self) -> list[float]:
        """Return kvtier ÷ LMCache's files, run by run."""
        return [ours / its for ours, its in zip(self.kvtier, self.files, strict=True)]


def ratio(pairs: int = PAIRS, rounds: int = ROUNDS) -> list[float]:
    """Return, run by run, the smaller of both ratios ÷ its bound: 1 or more keeps both bounds.

    The ratios themselves are in the table on stderr. kvtier is to load at least `RESP_BOUND` times
    as fast as through Redis, and `FILE_BOUND` times as fast as files from the page cache.
    """
    found = measure(pairs, rounds)
    rows = [
        Row("load through kvtier", found.kvtier, "MB/s"),
        Row("load through resp", found.resp, "MB/s"),
        Row("load through fs_native", found.files, "MB/s"),
        Row(f"kvtier ÷ resp (to be ≥ {RESP_BOUND})", found.over_resp()),
        Row(f"kvtier ÷ fs_native (to be ≥ {FILE_BOUND})", found.over_files()),
    ]
    show(f"lmcache bench l2, {KEYS_AT_ONCE} values of {VALUE_KIB} KiB", rows)
    both = zip(found.over_resp(), found.over_files(), strict=True)
    return [min(resp / RESP_BOUND, files / FILE_BOUND) for resp, files in both]


def measure(pairs: int, rounds: int) -> Measured:
    """Run LMCache's benchmark for each adapter, `pairs` times in turn. Raises RigError."""
    found = Measured([], [], [])
    with tempfile.TemporaryDirectory(prefix="kvtier-lmcache-") as name:
        folder = Path(name)
        with _server(folder) as server, _redis(folder) as redis:
            for run in range(pairs):
                # Other keys each time: what an earlier run stored is there already.
                found.kvtier.append(load_speed(kvtier_adapter(server, f"run {run}"), rounds))
                found.resp.append(load_speed(_resp_adapter(redis), rounds))
                found.files.append(load_speed(_file_adapter(folder / f"files{run}"), rounds))
    return found


def load_speed(adapter: Mapping[str, object], rounds: int) -> float:
    """Run LMCache's benchmark with verification; return MB/s of loads. Raises RigError."""
    if not PYTHON.exists():
        raise RigError("LMCache is not installed: run `make venv-lmcache`.")
    command = [
        str(PYTHON), "-c", ENTRY, "bench", "l2", "--l2-adapter", json.dumps(adapter),
        "--num-keys", str(KEYS_AT_ONCE), "--data-size-kb", str(VALUE_KIB),
        "--rounds", str(rounds), "--warmup-rounds", str(WARMUP_ROUNDS),
        "--lookup-max-hit-rate", "0.5", "--no-skip-verify", "--format", "json",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [*command, "--output", str(report)],
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
            env=dict(os.environ) | LMCacheHost.environment,
        )
        if done.returncode or not report.is_file() or "verified OK" not in done.stdout:
            end = (done.stdout + done.stderr)[-2000:]
            raise RigError(f"lmcache bench l2 failed with {adapter['type']}: {end}")
        sections = json.loads(report.read_text())["metrics"].values()
    by_name = {one["operation"]: one for one in sections if "operation" in one}
    for one in by_name.values():
        wanted = one["total_keys"] // (2 if one["operation"] == "Lookup" else 1)
        if one["total_success"] != wanted or one["rounds_timed_out"]:
            raise RigError(f"lmcache bench l2 lost values with {adapter['type']}: {one}.")
    return float(by_name["Load"]["throughput_avg_mbps"])


def kvtier_adapter(server: Part, label: str) -> dict[str, object]:
    """Return what LMCache's `--l2-adapter` says for a server of kvtier."""
    return {
        "type": "native_plugin",
        "module_path": "kvtier.lmcache_adapter",
        "class_name": "KVTierAdapter",
        "adapter_params": {"label": label, "socket": str(server.socket)},
    }


def _resp_adapter(redis: Redis) -> dict[str, object]:
    host, _, port = redis.url.removeprefix("redis://").partition(":")
    return {"type": "resp", "host": host, "port": int(port)}


def _file_adapter(folder: Path) -> dict[str, object]:
    return {"type": "fs_native", "base_path": str(folder)}


@contextmanager
def _server(folder: Path) -> Iterator[Part]:
    server = start_server(folder, "--capacity", CAPACITY)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@contextmanager
def _redis(folder: Path) -> Iterator[Redis]:
    redis = start_redis(folder)
    try:
        yield redis
    finally:
        redis.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    options = parser.parse_args()
    print(ratio(options.pairs, options.rounds))
