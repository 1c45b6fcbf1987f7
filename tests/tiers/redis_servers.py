"""Real Redis servers: alone, with TLS, or as a cluster. Each is ended by its process id."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvtier.tiers.resp import Deadline, Exchange, request
from support import until

START_SECONDS = 10
CLUSTER_SLOTS = 16384

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)


@dataclass
class RedisServer:
    """A running server on loopback and on a unix socket, that keeps nothing on disk."""

    folder: Path
    port: int
    options: tuple[str, ...]
    process: subprocess.Popen | None = None

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_url(self):
        return f"unix://{self.socket}"

    @property
    def socket(self):
        return self.folder / "redis.sock"

    def start(self):
        """Start, or start again with nothing in it; return when it answers."""
        command = ["redis-server", "--port", self.port, "--bind", "127.0.0.1"]
        command += ["--unixsocket", self.socket, "--dir", self.folder]
        command += ["--save", "", "--appendonly", "no", *self.options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)
        until(self._answers, "an answer of redis-server", START_SECONDS)
        return self

    def ask(self, *words):
        """Send one command over the unix socket, and return its reply. Raises Refusal."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.socket))
            exchange, deadline = Exchange(sock), Deadline(time.monotonic, 20)
            packed = [word if isinstance(word, bytes) else str(word).encode() for word in words]
            exchange.send(request(*packed), deadline)
            return exchange.reply(deadline)

    def kill(self):
        """End it at once."""
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def frozen(self):
        """Stop the process for a while: connections stay, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def _answers(self):
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            return self.ask("PING") == b"PONG"
        except (OSError, AssertionError):
            return False


def free_port():
    """Return a TCP port that nothing uses."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def redis_server(folder, *options):
    """Run a server."""
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisServer(folder, free_port(), options).start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def tls_redis(folder):
    """Run a server that also speaks TLS, with a certificate for `localhost`.

    Yields its URL and the file with the authority, which is the certificate itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key, certificate, port = folder / "key.pem", folder / "certificate.pem", free_port()
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", key, "-out", certificate, "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    options = ["--tls-port", port, "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", certificate, "--tls-key-file", key]
    with redis_server(folder, *map(str, options)) as server:
        yield server, f"rediss://localhost:{port}", certificate


@contextlib.contextmanager
def redis_cluster(folder, size=3):
    """Run a cluster of primaries, with as many slots each; yields the servers."""
    with contextlib.ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1500", "--cluster-port")
        buses = [free_port() for _ in range(size)]
        nodes = [
            stack.enter_context(redis_server(folder / str(bus), *options, str(bus)))
            for bus in buses
        ]
        for index, (node, bus) in enumerate(zip(nodes, buses, strict=True)):
            first, last = (CLUSTER_SLOTS * each // size for each in (index, index + 1))
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        until(lambda: all(map(knows_all_slots, nodes)), "the cluster's start", START_SECONDS)
        yield nodes


def knows_all_slots(node):
    """Whether a node of a cluster takes the cluster for complete."""
    info = node.ask("CLUSTER", "INFO")
    return b"cluster_state:ok" in info and b"cluster_slots_ok:%d" % CLUSTER_SLOTS in info
