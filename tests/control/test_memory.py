"""Case B49: the memory that a size setting takes is the size that it says, in total."""

import contextlib
import logging
import mmap
import os
import re
from pathlib import Path

import pytest
from kvtier import protocol as wire
from kvtier.client import Client, ClientOptions
from kvtier.core import Role
from support import manifest

pytestmark = pytest.mark.slow

GIB = 1 << 30


def slab_bytes(pid):
    """Bytes that the kernel has given to the process's memfds."""
    total = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # Closed since it was listed.
            if "memfd:" in str(link.readlink()):
                total += link.stat().st_blocks * 512
    return total


def private_bytes(pid):
    """Bytes that only this process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


def gauge(server):
    text = server.get("/metrics")[1]
    return float(re.search(r'^kvtier_capacity_bytes{tier="host"} (\S+)', text, re.MULTILINE)[1])


def connect(server, rank, workers):
    """Connect a worker, map all slabs as it does, and touch them."""
    sharded = manifest(shard_bytes=1 << 20, shards=workers)
    hello = wire.Hello(wire.PROTOCOL_VERSION, Role.WORKER, "engine", rank, sharded)
    client = Client(ClientOptions(server.socket, deadline=5.0), hello, logging.getLogger("test"))
    client.start()
    assert client.meet() is not None
    return client


@pytest.mark.parametrize(("size", "expected"), [("1GiB", GIB), ("1GB", 10**9)])
def test_the_memory_taken_is_the_setting_in_its_unit_and_so_is_the_gauge(serve, size, expected):
    server = serve("--capacity", size).ready()
    pid = server.process.pid
    assert gauge(server) == expected
    assert slab_bytes(pid) == pytest.approx(expected, rel=0.02)
    assert slab_bytes(pid) <= expected
    assert slab_bytes(pid) + private_bytes(pid) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_share_the_capacity_and_take_no_more_of_it(serve, workers):
    server = serve("--capacity", "256MiB").ready()
    clients = [connect(server, rank, workers) for rank in range(workers)]
    mapped = []
    for client in clients:
        number = 0
        while (slab := client.map_slab(number)) is not None:
            descriptor, size = slab
            mapped.append(mmap.mmap(descriptor, size))
            os.close(descriptor)
            mapped[-1][::4096] = bytes(len(range(0, size, 4096)))
            number += 1
    assert sum(map(len, mapped)) == pytest.approx(workers * (256 << 20), rel=0.02)
    assert slab_bytes(server.process.pid) == pytest.approx(256 << 20, rel=0.02)
    assert gauge(server) == 256 << 20
    for client in clients:
        client.close()
    for memory in mapped:
        memory.close()
