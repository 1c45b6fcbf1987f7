"""One open connection to the server: frames out, frames and descriptors in.

Whoever holds it decides how long to wait, and when it is lost (`client.py`).
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from . import protocol as wire
from .errors import ProtocolError

READ_BYTES = 1 << 18
CONTROL_BYTES = socket.CMSG_SPACE(4 * 8)
"""Room for the descriptors that may come with one read."""


class Link:
    """One open connection after its hello. Raises OSError, TimeoutError or ProtocolError."""

    def __init__(self, path: Path, hello: wire.Hello, deadline: float) -> None:
        self.granted: list[int] = []
        self.awaited: set[int] = set()
        """Leases whose second answers are to come, and wanted."""
        self.found: dict[int, wire.Found] = {}
        """These answers, until somebody asks for them."""
        self.changed: list[wire.Changed] = []
        self.descriptors: collections.deque[int] = collections.deque()
        self._reader = wire.FrameReader()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._replies: collections.deque[wire.Reply] = collections.deque()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._poll = select.poll()
        until = time.monotonic() + deadline
        try:
            self._sock.settimeout(deadline)
            self._sock.connect(os.fspath(path))
            self._sock.setblocking(False)  # From here on we wait ourselves, and only if we must.
            _check_owner(self._sock, path)
            self.send(hello, until)
            while not self._replies:
                self._wait(select.POLLIN, until)
                self._read()
            answer = self._replies.popleft()
            if not isinstance(answer, wire.Welcome):
                raise ProtocolError("refused", getattr(answer, "message", repr(answer)))
        except BaseException:
            self.close()
            raise
        self.welcome = answer

    def send(self, frame: wire.Frame, until: float) -> None:
        """Hand a frame to the kernel before `until`."""
        data = memoryview(wire.encode(frame))
        while data:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, until)

    def receive(self, seq: int, until: float) -> wire.Reply:
        """Return the reply to `seq`; what comes before it without being asked for is kept."""
        while True:
            while self._replies:
                reply = self._replies.popleft()
                if getattr(reply, "seq", seq) == seq:
                    return reply
                self._keep(reply)
            self._wait(select.POLLIN, until)
            self._read()

    def drain(self) -> None:
        """Take in what has arrived, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._read()
        while self._replies:
            self._keep(self._replies.popleft())

    def close(self) -> None:
        """Close the socket and descriptors that nobody took."""
        self._sock.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _keep(self, reply: wire.Reply) -> None:
        match reply:
            case wire.Granted():
                self.granted += reply.slots
            case wire.Found():
                if reply.seq in self.awaited:
                    self.awaited.discard(reply.seq)
                    self.found[reply.seq] = reply
            case wire.Changed():
                self.changed.append(reply)
            case _:
                raise ProtocolError("protocol", f"nobody waits for {reply!r}")

    def await_anything(self, seconds: float) -> None:
        """Wait until something has arrived, or the connection is lost, for so long at most."""
        self._poll.register(self._sock, select.POLLIN)
        self._poll.poll(math.ceil(seconds * 1000.0))

    @property
    def hung_up(self) -> bool:
        """Whether the server has closed the connection. From any thread, without waiting."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLRDHUP)
        except ValueError:  # Closed by ourselves just now.
            return True
        return bool(poll.poll(0))

    def _wait(self, event: int, until: float) -> None:
        left = until - time.monotonic()
        self._poll.register(self._sock, event)
        if left <= 0.0 or not self._poll.poll(math.ceil(left * 1000.0)):
            raise TimeoutError("the deadline is over")

    def _read(self) -> None:
        size, control, _, _ = self._sock.recvmsg_into([self._buffer], CONTROL_BYTES)
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.descriptors += struct.unpack(f"{len(payload) // 4}i", payload)
        if not size:
            raise ConnectionResetError("the server closed the connection")
        self._replies += map(wire.decode_reply, self._reader.feed(self._buffer[:size]))


def _check_owner(sock: socket.socket, path: Path) -> None:
    """Raise ProtocolError if another user listens where anybody could: blocks are trusted."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if not trusted(user, path.absolute().parents):
        raise ProtocolError(
            "refused", f"user {user} serves {path}, in a folder that anyone may have made"
        )


def trusted(user: int, folders: Iterable[Path]) -> bool:
    """Return whether a server of `user` whose socket lies inside `folders` may hand us blocks."""
    if user in (os.geteuid(), 0):
        return True
    return not any(folder.stat().st_mode & stat.S_IWOTH for folder in folders)
