"""Figures of policies and admission, by replay: how near `auto` is to the best policy, what a swap
costs, and how much of what nobody reads again is written.

    python -m loadtest.replay_ratios

The real traces lie beside the repository, in shared/traces, or where KVTIER_TRACES says; without
them their figures can't be had.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kvtier.core import AdmissionMode, BlockKey, Tier, WriteMode
from kvtier.policies import POLICIES
from kvtier.replay.readers import read_trace
from kvtier.replay.simulator import Hierarchy, LowerSetup, Outcome, Setup, replay
from kvtier.replay.trace import Trace

from .report import Row, show
from .rig import RigError

TRACES = Path(os.environ.get("KVTIER_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
SIZES = (1, 5, 10, 25)
"""Of the host tier, in % of a trace's distinct blocks."""
SWAP_AFTER = 2000
"""Requests before a swap, and after it."""
SWAP_SIZE = 10
DOCUMENTS = 4000
DOCUMENT_BLOCKS = 50
SYSTEM_BLOCKS = 8
SYSTEMS = 5
HOST_BLOCKS, DISK_BLOCKS = 4000, 16_000


def auto_gaps() -> list[float]:
    """Return by how many points of token hit ratio `auto` is behind the best fixed policy.

    One value a trace and size. Raises RigError.
    """
    rows, gaps = [], []
    for trace in _traces():
        for size in SIZES:
            capacity = trace.distinct * size // 100
            ratios = {
                policy: 100 * replay(trace, Setup(policy, capacity)).hit_ratio(trace)
                for policy in POLICIES
            }
            auto = ratios.pop("auto")
            best = max(ratios, key=lambda policy: ratios[policy])
            gaps.append(ratios[best] - auto)
            where = f"{trace.file.name.split('.')[0]} at {size} %"
            rows.append(Row(f"{where}: {best} less auto ({auto:.1f} %)", [gaps[-1]]))
            rows.append(Row(f"{where}: lru less auto", [ratios["lru"] - auto]))
    show("points of token hit ratio", rows)
    return gaps


def swap_losses() -> list[float]:
    """Return how many points of hit ratio a swap to the same policy costs, policy by policy.

    Over the requests after the swap, beside the same requests without one. Raises RigError.
    """
    rows, losses = [], []
    for trace in _traces():
        if len(trace) < 2 * SWAP_AFTER:
            continue
        for policy in POLICIES:
            kept = _hits_after_swap(trace, policy, swapped=False)
            swapped = _hits_after_swap(trace, policy, swapped=True)
            losses.append(abs(kept - swapped) * 100)
            name = trace.file.name.split(".")[0]
            rows.append(Row(f"{name}: {policy} ({100 * kept:.1f} %)", [losses[-1]]))
    show(f"points of hit ratio that a swap changes, over {SWAP_AFTER} requests", rows)
    return losses


def _hits_after_swap(trace: Trace, policy: str, *, swapped: bool) -> float:
    cache = Hierarchy(Setup(policy, trace.distinct * SWAP_SIZE // 100))
    hits = asked = 0
    for number, blocks in enumerate(trace.requests()):
        if number == SWAP_AFTER and swapped:
            successor = POLICIES[policy]()
            successor.adopt(cache.host.policy.export())
            cache.host.policy = successor
        if number == 2 * SWAP_AFTER:
            break
        found = cache.serve([trace.keys[block] for block in blocks])
        if number >= SWAP_AFTER:
            hits, asked = hits + found, asked + len(blocks)
    return hits / asked


@dataclass(frozen=True, slots=True)
class Written:
    """What one admission made of the documents."""

    hits: int
    blocks: int
    ratio: float


def documents(seed: int, admission: AdmissionMode) -> Written:
    """Serve documents that are read once, each behind one of a few system prompts."""
    lower = LowerSetup(Tier.DISK, DISK_BLOCKS, "lru", WriteMode.THROUGH, admission)
    cache = Hierarchy(Setup("lru", HOST_BLOCKS, (lower,)))
    asked = 0
    for chain in _documents(seed):
        cache.serve(chain)
        asked += len(chain)
    outcome: Outcome = cache.outcome()
    return Written(outcome.hit_blocks, outcome.tiers[1].written_blocks, outcome.hit_blocks / asked)


def learned_writes() -> list[float]:
    """Return blocks written under `learned` ÷ under `always`. Raises RigError if a hit is lost."""
    ratios, rows = [], []
    for seed in range(3):
        found = {mode: documents(seed, mode) for mode in AdmissionMode if mode != "cost"}
        always, learned = found[AdmissionMode.ALWAYS], found[AdmissionMode.LEARNED]
        if learned.hits < always.hits:
            raise RigError(f"{always.hits - learned.hits} of {always.hits} hits were lost.")
        ratios.append(learned.blocks / always.blocks)
        rows += [Row(f"{mode}: blocks written", [one.blocks]) for mode, one in found.items()]
        rows += [Row(f"{mode}: hit ratio", [one.ratio]) for mode, one in found.items()]
    show("documents that are read once", rows)
    return ratios


def _documents(seed: int) -> Iterator[list[BlockKey]]:
    made = Random(seed)
    systems = [[made.randbytes(8) for _ in range(SYSTEM_BLOCKS)] for _ in range(SYSTEMS)]
    for _ in range(DOCUMENTS):
        own = made.randint(DOCUMENT_BLOCKS // 2, DOCUMENT_BLOCKS * 3 // 2)
        yield [*made.choice(systems), *(made.randbytes(8) for _ in range(own))]


def _traces() -> list[Trace]:
    files = sorted(TRACES.glob("*.jsonl.gz"))
    if not files:
        raise RigError(f"there are no traces in {TRACES}: set KVTIER_TRACES")
    return [read_trace(file) for file in files]


if __name__ == "__main__":
    for measure in (learned_writes, swap_losses, auto_gaps):
        print(*measure(), file=sys.stdout)
