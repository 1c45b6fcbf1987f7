"""Makes `tests/support.py` and `tests/servers.py` importable, and starts real servers."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from plane import Plane
from servers import Served, clean_environment

CAPACITY = "64MiB"
LONG = ("test_peers", "test_up", "test_lmcache", "test_lower_redis_faults", "test_arrangements")
"""Files of tests that take minutes: they begin first, so that none is left alone at the end."""

# What runs in the background of a shell, or under nohup, ignores these, and so would what the tests
# start. A handler is not inherited: the tests themselves go on as before.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


def pytest_collection_modifyitems(items):
    """Put the long files first, in their order, and leave the others as they are."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


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
def planes(tmp_path):
    """A factory of planes; each is stopped, with its integrity checked, at the end."""
    started = []

    def start(slots=64, name="k.sock", **options):
        started.append(Plane(tmp_path / name, slots, **options))
        return started[-1]

    yield start
    for plane in started:
        plane.stop()


@pytest.fixture
def plane(planes):
    return planes()
