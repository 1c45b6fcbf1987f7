"""Fixtures for simulated engines."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent)]  # for simulated.py


@pytest.fixture
def engines(plane):
    """Start simulated engines; at the end nothing of theirs may be left on the server."""
    from kvtier.core import SlotState
    from simulated import Engine
    from support import until

    started = []

    def start(name="engine", ranks=1, **options):
        started.append(Engine(plane, name, ranks, **options))
        return started[-1]

    yield start
    for engine in started:
        engine.close()
    if not plane.thread.is_alive():
        return
    until(lambda: not plane.do(plane.readings.sessions), "the end of all sessions")
    slots = plane.do(plane.readings.tiers)[0].host.slots
    assert slots[SlotState.RESERVED] == slots[SlotState.LIMBO] == 0
    assert not any(
        block.leases
        for space in plane.cache.directory.namespaces.values()
        for block in space.blocks.values()
    )
