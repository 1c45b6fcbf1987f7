"""Faults put into a `LocalEngine` on purpose: loads that fail or bring wrong bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from harness import LocalEngine

ALL = "slice(None)"
FIRST, MIDDLE, LAST = "slice(0, 1)", "slice(4, 5)", "slice(-1, None)"
"""Which blocks of a load, in Python."""

FAULTS = """
import torch

worker = worker_side()
find_shard, load = worker._slabs.shard, worker.load

def chosen(plan, which):
    return [move.slot for each in plan.loads for move in each.moves[which]]

def lose(plan, which):
    lost = chosen(plan, which)
    worker._slabs.shard = lambda slot: None if slot in lost else find_shard(slot)
    load(plan)
    worker._slabs.shard = find_shard

def corrupt(plan, which):
    for slot in chosen(plan, which):
        find_shard(slot).view(torch.float32).neg_()
    load(plan)

def meet(fault, which, times):
    global met
    met = 0
    def faulty(plan):
        global met
        if plan.loads and met < times:
            met += 1
            fault(plan, which)
        else:
            load(plan)
    worker.load = faulty

def mend():
    worker.load = load
"""


@dataclass
class Met:
    """What came of a fault once the block is over. `steps`: those in which it happened."""

    steps: int = 0


@contextlib.contextmanager
def losing(engine: LocalEngine, which: str = ALL, times: int = 1_000) -> Iterator[Met]:
    """Let the given blocks of each load be unreadable, in `times` steps at most."""
    with _meeting(engine, "lose", which, times) as met:
        yield met


@contextlib.contextmanager
def corrupting(engine: LocalEngine, which: str) -> Iterator[Met]:
    """Give the given blocks of each load other bytes than were stored."""
    with _meeting(engine, "corrupt", which, 1_000) as met:
        yield met


@contextlib.contextmanager
def _meeting(engine: LocalEngine, fault: str, which: str, times: int) -> Iterator[Met]:
    engine.run(f"if 'mend' not in globals(): exec({FAULTS!r}, globals())\nresult = None")
    engine.run(f"meet({fault}, {which}, {times})")
    found = Met()
    try:
        yield found
    finally:
        engine.run("mend()")
    found.steps = engine.run("result = met")
    engine.run("result = None")
    assert found.steps, "no load met the fault"
