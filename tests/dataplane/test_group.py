"""Who may connect: the server's user, and a group if the settings name one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from kvtier.dataplane import DataPlaneOptions
from plane import Plane

NOBODY, GROUP, OTHER = 65534, 54321, 54322
SYSTEM_PYTHON = "/usr/bin/python3"
KNOCK = """
import socket, sys
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(2)
    try:
        sock.connect(sys.argv[1])
        sock.sendall(b"\\0\\0")
        print("closed" if sock.recv(1) == b"" else "answered")
    except TimeoutError:
        print("open")
    except (PermissionError, BrokenPipeError, ConnectionResetError):
        print("closed")
"""
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
    pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason="no Python that all users may run"),
]


@pytest.fixture
def shared():
    """A folder that every user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def knock(path, groups):
    done = subprocess.run(
        [SYSTEM_PYTHON, "-c", KNOCK, str(path)],
        user=NOBODY, group=NOBODY, extra_groups=groups, capture_output=True, text=True,
        check=True, timeout=20, cwd="/",
    )  # fmt: skip
    return done.stdout.strip()


def test_a_member_of_the_allowed_group_may_connect_and_nobody_else(shared):
    plane = Plane(shared / "made" / "k.sock", 64, allow_group=GROUP)
    try:
        assert knock(plane.path, [GROUP]) == "open"
        assert knock(plane.path, [OTHER]) == "closed"
        assert knock(plane.path, []) == "closed"
    finally:
        plane.stop()


def test_without_a_group_another_user_is_refused_even_where_the_file_lets_it_in(shared):
    plane = Plane(shared / "k.sock", 64)
    plane.path.chmod(0o777)
    try:
        assert knock(plane.path, [GROUP]) == "closed"
        assert plane.closes("peer") == 1
    finally:
        plane.stop()


def test_no_group_is_allowed_unless_one_is_named():
    assert DataPlaneOptions(Path("k.sock")).allow_group is None
