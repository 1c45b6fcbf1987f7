"""Fixtures that start kvtier as a user would."""

import subprocess
import sys

import pytest
from servers import Served, clean_environment, run_kvtier

CAPACITY = "64MiB"


@pytest.fixture
def serve(tmp_path):
    """Start servers; each ends with the test."""
    started = []

    def start(*arguments, socket=None, **environment):
        served_socket = socket or tmp_path / "kvtier.sock"
        stderr = tmp_path / f"stderr-{len(started)}"
        command = ["serve", "--socket", served_socket, "--port", "0"]
        if "--capacity" not in arguments:
            command += ["--capacity", CAPACITY]
        with stderr.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvtier", *map(str, [*command, *arguments])],
                stderr=sink,
                stdout=subprocess.DEVNULL,
                env=clean_environment(**environment),
            )
        started.append(process)
        return Served(process, served_socket, stderr)

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def kvtier():
    """Run a command to its end."""
    return run_kvtier
