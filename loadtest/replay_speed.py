"""How fast `kvtier replay` goes, and what it needs for each block.

`python -m loadtest.replay_speed` prints block accesses a second under LRU on one core, and bytes
of process memory a resident block takes, its key and the trace included.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from kvtier.policies import POLICIES
from kvtier.replay.simulator import Hierarchy, Setup, replay
from kvtier.replay.trace import Trace

RUNS = 3
REQUESTS = 12_000
CHATS = 3_000
TURN_BLOCKS = 6
CAPACITY_SHARE = 0.1
RESIDENT_BLOCKS = 1_000_000
CHAIN = 64


def measure(policy: str = "lru") -> list[float]:
    """Return the block accesses a second of CPU time, of several runs in fresh processes."""
    return [float(line) for line in _fresh("speed", policy)]


def measure_bytes() -> list[float]:
    """Return the bytes that a resident block takes, of several runs in fresh processes."""
    return [float(line) for line in _fresh("bytes", "lru")]


def speed(policy: str) -> float:
    """Replay chats that grow turn by turn, in a cache of a tenth of their blocks."""
    random = Random(1)
    trace = Trace(Path("made"), "made", 16)
    turns = dict.fromkeys(range(CHATS), 0)
    for _ in range(REQUESTS):
        chat = min(int(random.expovariate(8 / CHATS)), CHATS - 1)
        turns[chat] += 1
        length = min(turns[chat], 12) * TURN_BLOCKS
        trace.add([(chat, at) for at in range(length)], length * 16)
    trace.finish()
    begin = time.process_time()
    replay(trace, Setup(policy, int(trace.distinct * CAPACITY_SHARE)))
    return trace.accesses / (time.process_time() - begin)


def bytes_per_block(policy: str) -> float:
    """Fill a trace and a cache with a million blocks; return the growth of memory for each."""
    gc.collect()
    before = _private_bytes()
    trace = Trace(Path("made"), "made", 16)
    for first in range(0, RESIDENT_BLOCKS, CHAIN):
        trace.add(range(first, first + CHAIN), CHAIN * 16)
    trace.finish()
    cache = Hierarchy(Setup(policy, RESIDENT_BLOCKS))
    for blocks in trace.requests():
        cache.serve([trace.keys[number] for number in blocks])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # What is free but not given back belongs to no block.
    return (_private_bytes() - before) / len(cache.host.policy)


def _private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kept = (line for line in lines if line.startswith(("Private_Dirty", "Private_Clean")))
    return sum(int(line.split()[1]) * 1024 for line in kept)


def _fresh(what: str, policy: str) -> list[str]:
    command = [sys.executable, "-m", "loadtest.replay_speed", what, policy]
    return [
        subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
        for _ in range(RUNS)
    ]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["speed", name]:
            print(f"{speed(name):.0f}")
        case ["bytes", name]:
            print(f"{bytes_per_block(name):.1f}")
        case _:
            for name in POLICIES:
                print(
                    f"{name:7} {speed(name):10,.0f} accesses/s {bytes_per_block(name):6.0f} bytes"
                )
