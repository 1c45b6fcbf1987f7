"""Makes `loadtest` importable, and gives tests a server that answers as badly as they want."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import faults


@pytest.fixture
async def server():
    """A server of completions whose answers a test chooses; see `faults.py`."""
    async with faults.serving() as started:
        yield started
