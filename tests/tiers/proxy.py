"""A TCP proxy before a server that does what networks do: delays, cuts, flips bits, falls silent.

with Proxy(server.port) as proxy:
    proxy.delay = 0.05
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

CHUNK_BYTES = 16 << 10


class Proxy:
    """Passes bytes to a port on loopback and back. Settings may change at any time."""

    def __init__(self, port: int) -> None:
        self.delay: float | Callable[[], float] = 0.0
        """Seconds that each piece of a reply is late."""
        self.cut_after: int | None = None
        """Connections are closed once so many bytes of replies have passed on them."""
        self.silent_after: int | None = None
        """No more than so many bytes of replies pass on a connection, which stays."""
        self.trickle: float | None = None
        """Seconds after each byte of a reply; then it goes byte by byte."""
        self.flips = 0.0
        """Chance that a bit of a piece of a reply is flipped."""
        self.settle = 0.0
        """Replies wait until the requests have been silent for so many seconds."""
        self.turns = 0
        """How often a reply came after a request: round trips, where `settle` is set."""
        self.seed = random.randrange(1 << 32)
        self._random = random.Random(self.seed)
        self._target = port
        self._pairs: list[_Pair] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many connections have come in so far."""
        return len(self._pairs)

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self.drop_connections()
        for pair in self._pairs:
            pair.end()

    def calm(self) -> None:
        """Pass everything at once, as it is."""
        self.delay, self.flips, self.settle = 0.0, 0.0, 0.0
        self.cut_after = self.silent_after = self.trickle = None

    def drop_connections(self) -> None:
        """Close all connections, as a proxy does with idle ones."""
        for pair in self._pairs:
            pair.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs.append(_Pair(self, client, server))

    def tampered(self, data: bytes) -> bytes:
        """Return a piece of a reply as it arrives."""
        if self._random.random() >= self.flips:
            return data
        changed = bytearray(data)
        changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def late(self) -> float:
        """Return by how much the next piece of a reply is late."""
        return self.delay() if callable(self.delay) else self.delay


class _Pair:
    """One connection through the proxy, and the two threads that pump it."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._last_request = 0.0
        self._answered = True
        self._passed = 0
        self._threads = [
            threading.Thread(target=self._pump, args=pump, daemon=True)
            for pump in ((client, self._up), (server, self._down))
        ]
        for thread in self._threads:
            thread.start()

    def cut(self) -> None:
        """Close both sides."""
        for each in (self._client, self._server):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Wait for the threads of a connection that was cut."""
        for thread in self._threads:
            thread.join(10)
        self._client.close()
        self._server.close()

    def _pump(self, source: socket.socket, pass_on: Callable[[bytes], None]) -> None:
        try:
            while data := source.recv(CHUNK_BYTES):
                pass_on(data)
        except OSError:
            pass
        self.cut()

    def _up(self, data: bytes) -> None:
        self._last_request = time.monotonic()
        self._answered = False
        self._server.sendall(data)

    def _down(self, data: bytes) -> None:
        proxy = self._proxy
        while (quiet := time.monotonic() - self._last_request) < proxy.settle:
            time.sleep(proxy.settle - quiet)
        if not self._answered:
            self._answered = True
            proxy.turns += 1
        if late := proxy.late():
            time.sleep(late)
        data = proxy.tampered(data)
        room = len(data)
        if proxy.cut_after is not None:
            room = min(room, max(0, proxy.cut_after - self._passed))
        if proxy.silent_after is not None:
            data = data[: max(0, proxy.silent_after - self._passed)]
        self._passed += len(data)
        for part in [data[:room]] if proxy.trickle is None else _bytes_of(data[:room]):
            self._client.sendall(part)
            time.sleep(proxy.trickle or 0)
        if room < len(data):
            raise ConnectionError("cut, as was wanted")


def _bytes_of(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


class Canned:
    """A server that says the same to whatever it is asked, once for each connection."""

    def __init__(self, *replies: bytes) -> None:
        self._replies = replies
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _serve(self) -> None:
        held = []
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                held.append(client)
                client.settimeout(5)
                for reply in self._replies:
                    client.recv(CHUNK_BYTES)
                    client.sendall(reply)
        for client in held:
            client.close()
