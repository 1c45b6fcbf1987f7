"""How long an engine waits for a lookup, against a bare echo of as many bytes.

`python -m loadtest.lookup` prints one ratio a line: the median time of a lookup of 640 blocks that
are there, over the median time in which another process sends the same bytes back. The echo is a
blocking Python loop over a unix socket: what asking another process costs at the least. The server
is `kvtier serve`, and lookups and echoes come in turn. stderr has the times themselves, also of a
lookup right after another one, and of storing 640 blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier import protocol as wire
from kvtier.client import Client

from .engines import connect
from .stack import start_server

BLOCKS = 640
RUNS = 3
ROUNDS = 400
WARM_UP = 40
CAPACITY = "64MiB"

ECHO = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as sock:
    size = int(sys.argv[2])
    while True:
        data = b""
        while len(data) < size:
            more = sock.recv(1 << 18)
            if not more:
                sys.exit()
            data += more
        sock.sendall(data)
"""


def measure() -> list[float]:
    """Return the median lookup ÷ the median echo, once a run. Starts and ends its own processes."""
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder), "--capacity", CAPACITY)
        try:
            server.wait()
            with contextlib.closing(connect(server.socket, "loadtest")) as client:
                return [_run(client, run) for run in range(RUNS)]
        finally:
            server.stop()


def _run(client: Client, run: int) -> float:
    hashes = [hashlib.sha256(bytes([run, at % 256, at // 256])).digest() for at in range(BLOCKS)]
    keys = b"".join(hashes)
    stored = _store(client, keys)
    with _echoing(len(wire.encode(wire.Lookup(1, keys, 0)))) as echo:
        times = [(_lookup(client, keys), echo()) for _ in range(WARM_UP + ROUNDS)]
    first, again = zip(*(lookups for lookups, _ in times[WARM_UP:]), strict=True)
    echoes = [seconds for _, seconds in times[WARM_UP:]]
    lookup, second, bare = map(statistics.median, (first, again, echoes))
    print(
        f"lookup {lookup * 1e6:.0f} µs, right after another one {second * 1e6:.0f} µs, "
        f"echo {bare * 1e6:.0f} µs; commit {stored * 1e6:.0f} µs",
        file=sys.stderr,
    )
    return lookup / bare


def _store(client: Client, keys: bytes) -> float:
    """Store blocks. Returns how long the server took from the commit to its next answer."""
    granted = client.step(wire.Step(0, need=BLOCKS))
    assert granted is not None, "the server answers"
    step = wire.Step(0, commits=[wire.Chain(b"", keys, granted.slots)], need=1)
    began = time.perf_counter()
    more = client.step(step)
    seconds = time.perf_counter() - began
    assert more is not None, "the server answers"
    client.step(wire.Step(0, aborts=more.slots))
    return seconds


def _lookup(client: Client, keys: bytes) -> tuple[float, float]:
    """Look the blocks up twice in a row, and give them back. Returns both times."""
    times, leases = [], []
    for _ in range(2):
        began = time.perf_counter()
        found = client.lookup(keys, 0)
        times.append(time.perf_counter() - began)
        assert found is not None, "the server answers"
        assert len(found.slots) == BLOCKS, "the blocks are there"
        leases.append(found.seq)
    client.step(wire.Step(0, releases=leases))
    return times[0], times[1]


@contextlib.contextmanager
def _echoing(size: int) -> Iterator[Callable[[], float]]:
    """Run a process that sends everything back. Gives what takes the time of `size` bytes."""
    near, far = socket.socketpair()
    command = [sys.executable, "-c", ECHO, str(far.fileno()), str(size)]
    process = subprocess.Popen(command, pass_fds=[far.fileno()])
    far.close()
    data = bytes(size)

    def echo() -> float:
        began = time.perf_counter()
        near.sendall(data)
        back = 0
        while back < size:
            back += len(near.recv(1 << 18))
        return time.perf_counter() - began

    try:
        yield echo
    finally:
        near.close()
        process.wait()


if __name__ == "__main__":
    print(*measure(), sep="\n")
