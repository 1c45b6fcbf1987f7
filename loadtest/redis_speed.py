"""How fast records go to and from Redis, beside a bare client on the same server.

A record is one block of 1,474,560 bytes, of which there are some dozens; each side has as many
threads, with a connection each, as a server has by default, and both receive into the same memory.
The bare client knows all lengths beforehand and takes a whole reply with one call; it has no
deadline, no checksum and no pool. Both sides are measured in turn, and a ratio is of neighbours in
time.

    python -m loadtest.redis_speed
"""

from __future__ import annotations

import contextlib
import mmap
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvtier.core import KEY_BYTES, ReadOutcome
from kvtier.endpoints import free_port
from kvtier.sections import RedisSettings
from kvtier.tiers.base import Space
from kvtier.tiers.redis import RedisOptions, RedisStore

from .report import Row, show
from .rig import RigError

BLOCK_BYTES = 1_474_560
"""A block of the model that the demo runs: 16 tokens, 24 layers."""
RECORDS = 48
THREADS = RedisSettings().connections
PAIRS = 61
START_SECONDS = 10
ROADS = ("unix", "tcp")
END = b"\r\n"
FIND_KEYS = 400


@dataclass(frozen=True, slots=True)
class Server:
    """A redis-server of this program."""

    path: Path
    port: int
    pid: int

    def url(self, road: str) -> str:
        """Return the server's URL: over its unix socket or over loopback TCP."""
        return f"unix://{self.path}" if road == "unix" else f"redis://127.0.0.1:{self.port}"

    def connect(self, road: str) -> socket.socket:
        """Return a socket that is connected."""
        if road == "tcp":
            sock = socket.create_connection(("127.0.0.1", self.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(self.path))
        return sock


class Blocks:
    """Keys, and slots of touched memory with other bytes each."""

    def __init__(self) -> None:
        made = random.Random(11)
        self.keys = [made.randbytes(KEY_BYTES) for _ in range(RECORDS)]
        self.memory = memoryview(mmap.mmap(-1, RECORDS * BLOCK_BYTES))
        for slot in self.slots():
            slot[:] = made.randbytes(BLOCK_BYTES)
        self.space = Space(made.randbytes(KEY_BYTES).hex(), BLOCK_BYTES, "{}")

    def slots(self) -> list[memoryview]:
        """Return the slots, in the order of the keys."""
        return [
            self.memory[at : at + BLOCK_BYTES] for at in range(0, len(self.memory), BLOCK_BYTES)
        ]


class Ours:
    """The store as the server has it."""

    def __init__(self, server: Server, road: str, blocks: Blocks) -> None:
        self.store = RedisStore(
            RedisOptions(server.url(road), timeout_seconds=10, connections=THREADS)
        )
        self._blocks = blocks

    def write(self, thread: int) -> None:
        """Write a thread's share of the blocks."""
        for key, slot in _share(self._blocks, thread):
            self.store.write(self._blocks.space, key, b"", slot)

    def read(self, thread: int) -> None:
        """Read and verify a thread's share of the blocks."""
        for key, slot in _share(self._blocks, thread):
            outcome = self.store.read(self._blocks.space, key, slot)
            assert outcome is ReadOutcome.READ, outcome

    def close(self) -> None:
        """Close the connections."""
        self.store.close()


class Bare:
    """The least that moves the same bytes."""

    def __init__(self, server: Server, road: str, blocks: Blocks) -> None:
        self._sockets = [server.connect(road) for _ in range(THREADS)]
        self._blocks = blocks

    def write(self, thread: int) -> None:
        """Write a thread's share of the blocks."""
        for key, slot in _share(self._blocks, thread):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(slot))
            waiting = [memoryview(head), slot, memoryview(END)]
            while waiting:
                sent = self._sockets[thread].sendmsg(waiting)
                while waiting and sent >= len(waiting[0]):
                    sent -= len(waiting.pop(0))
                if waiting:
                    waiting[0] = waiting[0][sent:]
            assert self._sockets[thread].recv(100) == b"+OK\r\n"

    def read(self, thread: int) -> None:
        """Read a thread's share of the blocks."""
        for key, slot in _share(self._blocks, thread):
            self._sockets[thread].sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
            head = bytearray(b"$%d\r\n" % len(slot))
            reply = [head, slot, bytearray(END)]
            got = self._sockets[thread].recvmsg_into(reply, 0, socket.MSG_WAITALL)[0]
            assert got == sum(map(len, reply)), "one call takes a whole reply"
            assert head == b"$%d\r\n" % len(slot), head

    def close(self) -> None:
        """Close the connections."""
        for each in self._sockets:
            each.close()


class Plain:
    """redis-py with its parser in C, as one would use it: no header and no checksum."""

    def __init__(self, server: Server, road: str, blocks: Blocks) -> None:
        import redis

        self._clients = [redis.Redis.from_url(server.url(road), protocol=2) for _ in range(THREADS)]
        self._blocks = blocks

    def write(self, thread: int) -> None:
        """Write a thread's share of the blocks."""
        for key, slot in _share(self._blocks, thread):
            self._clients[thread].set(key, slot)

    def read(self, thread: int) -> None:
        """Read a thread's share of the blocks, and copy it to its slot."""
        for key, slot in _share(self._blocks, thread):
            slot[:] = self._clients[thread].get(key)

    def close(self) -> None:
        """Close the connections."""
        for each in self._clients:
            each.close()


@dataclass(frozen=True, slots=True)
class Pairs:
    """One direction over one road: bytes a second of both sides, pair by pair."""

    ours: list[float]
    other: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours ÷ the other's."""
        return [ours / other for ours, other in zip(self.ours, self.other, strict=True)]


def read_ratios() -> list[float]:
    """Return our bandwidth of reads ÷ the bare client's, pair by pair, over a unix socket."""
    with redis_server() as server:
        pairs = compare(server, "unix", "read", Bare)
    _show("read", pairs)
    return pairs.ratios


def write_ratios() -> list[float]:
    """Return our bandwidth of writes ÷ the bare client's, pair by pair, over a unix socket."""
    with redis_server() as server:
        pairs = compare(server, "unix", "write", Bare)
    _show("write", pairs)
    return pairs.ratios


def find_milliseconds() -> list[float]:
    """Return how long it takes to look for `FIND_KEYS` blocks that are all there, over TCP."""
    with redis_server() as server, contextlib.ExitStack() as stack:
        store = RedisStore(RedisOptions(server.url("tcp"), timeout_seconds=10))
        stack.callback(store.close)
        made = random.Random(12)
        space = Space(made.randbytes(KEY_BYTES).hex(), 4096, "{}")
        keys = [made.randbytes(KEY_BYTES) for _ in range(FIND_KEYS)]
        for key in keys:
            store.write(space, key, b"", memoryview(bytes(4096)))
        found = []
        for _ in range(PAIRS * 10):
            began = time.perf_counter()
            assert store.find(space, keys) == FIND_KEYS
            found.append((time.perf_counter() - began) * 1000)
        return found


def compare(server: Server, road: str, direction: str, other: type[Bare | Plain]) -> Pairs:
    """Measure one direction over one road, side by side. The server has the records of both."""
    blocks = Blocks()
    sides = [Ours(server, road, blocks), other(server, road, blocks)]
    with ThreadPoolExecutor(THREADS) as pool, contextlib.ExitStack() as stack:
        for side in sides:
            stack.callback(side.close)
            _bandwidth(pool, side.write)  # Connects, and makes what reads need.
        found = [
            [_bandwidth(pool, getattr(side, direction)) for side in sides] for _ in range(PAIRS)
        ]
    ours, others = zip(*found, strict=True)
    return Pairs(list(ours), list(others))


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[Server]:
    """Run a redis-server that keeps nothing on disk. It may be stopped at the end: SIGSTOP.

    Raises RigError.
    """
    with tempfile.TemporaryDirectory(prefix="kvtier-redis-") as folder:
        path, port = Path(folder) / "redis.sock", free_port("127.0.0.1")
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", str(path), "--dir", folder, "--save", "", *options]
        try:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        except FileNotFoundError:
            raise RigError("redis-server is not installed") from None
        try:
            server = Server(path, port, process.pid)
            _wait_for(server)
            yield server
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait()


@contextlib.contextmanager
def bare_reads(server: Server, road: str) -> Iterator[Callable[[], float]]:
    """Write records of the bare client's. Gives what reads them and returns bytes a second."""
    with ThreadPoolExecutor(THREADS) as pool:
        bare = Bare(server, road, Blocks())
        try:
            _bandwidth(pool, bare.write)
            yield lambda: _bandwidth(pool, bare.read)
        finally:
            bare.close()


def main() -> int:
    """Print all pairs and the time of a look-up."""
    others = {"bare": Bare, "redis-py": Plain}
    print(f"{'road':5} {'':6} {'other':9} {'GB/s':>6} {'other':>6} {'ratio':>6}")
    with redis_server() as server:
        for road in ROADS:
            for name, other in others.items():
                for direction in ("read", "write"):
                    pairs = compare(server, road, direction, other)
                    ours, theirs = (
                        statistics.median(each) / 1e9 for each in (pairs.ours, pairs.other)
                    )
                    print(
                        f"{road:5} {direction:6} {name:9} {ours:6.2f} {theirs:6.2f} "
                        f"{statistics.median(pairs.ratios):6.2f}",
                        flush=True,
                    )
    print(f"find of {FIND_KEYS} keys: {statistics.median(find_milliseconds()):.2f} ms over TCP")
    return 0


def _show(direction: str, pairs: Pairs) -> None:
    rows = [
        Row("kvtier", pairs.ours, "GB/s", 1e-9),
        Row("a bare client", pairs.other, "GB/s", 1e-9),
        Row("kvtier ÷ bare client", pairs.ratios),
    ]
    show(f"Redis over its unix socket: {direction} of {BLOCK_BYTES / 1e6:.2f} MB", rows)


def _share(blocks: Blocks, thread: int) -> list[tuple[bytes, memoryview]]:
    return list(zip(blocks.keys, blocks.slots(), strict=True))[thread::THREADS]


def _bandwidth(pool: ThreadPoolExecutor, work: Callable[[int], None]) -> float:
    began = time.perf_counter()
    list(pool.map(work, range(THREADS)))
    return RECORDS * BLOCK_BYTES / (time.perf_counter() - began)


def _wait_for(server: Server) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            server.connect("unix").close()
        except OSError:
            if time.monotonic() > end:
                raise RigError("redis-server did not start") from None
            time.sleep(0.01)
        else:
            return


if __name__ == "__main__":
    sys.exit(main())
