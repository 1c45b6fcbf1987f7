"""Fixtures for tests of LMCache's adapter."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fleet import Member
from servers import Served, clean_environment


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A real server for all tests of a module: their labels differ."""
    folder = tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "kvtier", "serve", "--socket", str(folder / "k.sock")]
    command += ["--port", "0", "--capacity", "128MiB"]
    with (folder / "stderr").open("wb") as sink:
        process = subprocess.Popen(command, stderr=sink, env=clean_environment())
    yield Served(process, folder / "k.sock", folder / "stderr").ready()
    process.kill()
    process.wait()


@pytest.fixture
def join(request):
    """A factory of adapters at a socket; each is closed with the test."""
    members = []

    def start(socket, **parameters):
        given = {"label": request.node.name[:100]} | parameters
        members.append(Member(socket, **given))
        return members[-1]

    yield start
    for member in members:
        member.adapter.close()
