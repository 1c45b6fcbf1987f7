"""Makes the contract suite and its helpers importable, and the stores of the disk tests."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from contract import space_of
from disks import mount, store_at


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(path):
    return store_at(path)


@pytest.fixture
def space():
    return space_of()


@pytest.fixture
def small(tmp_path):
    """A file system of 16 MiB of its own."""
    top = tmp_path / "small"
    top.mkdir()
    mount("-t", "tmpfs", "-o", "size=16m", "kvtier-test", top)
    yield top
    subprocess.run(["umount", top], check=False, stderr=subprocess.DEVNULL)
