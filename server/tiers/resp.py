"""The exchange with a Redis server, on a socket that is connected: requests out, replies in.

Bytes of blocks go from the caller's memory into the socket and from the socket into the caller's
memory, without a copy between. Whatever goes wrong, and every reply that is an error, is an
exception that leaves the exchange unusable: its connection must be closed, so that no reply is
ever taken for another request's.

The deadline of a call is kept over all its sends and receives: a peer that sends byte by byte
cannot stretch it by more than `LIMIT_SLACK`.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from ..errors import KVTierError

Piece: TypeAlias = bytes | memoryview
Reply: TypeAlias = "bytes | int | list[Reply] | None"

END = b"\r\n"
AHEAD_BYTES = 16 << 10
"""What is received at once where a line is expected. What it has of a payload is copied."""
UNIX_BUFFER_BYTES = 1 << 20
"""The send buffer asked for on a unix socket, whose buffer does not grow by itself."""
SEND_BYTES = 256 << 10
"""What is given to TLS at once."""
REPLY_LIMIT = 1 << 20
"""Bytes of a line or a bulk string that is no payload, and members of an array."""
SHORTEST = 0.001
"""Seconds. A socket takes zero for no limit at all."""
LIMIT_SLACK = 0.01
"""Seconds by which a receive may end later than its call should: setting the time anew for each
receive takes 6 µs."""


class Late(KVTierError):
    """The deadline of a call has passed."""


class Closed(KVTierError):
    """The peer has closed the connection."""


class Surprise(KVTierError):
    """What came is not the reply that was due."""


class Refusal(KVTierError):
    """The server replied with an error."""

    def __init__(self, line: bytes) -> None:
        text = line.decode("ascii", "replace").lstrip("-")
        super().__init__(text[:200])
        self.code = text.split(" ", 1)[0]
        """The first word: `OOM`, `MOVED`, `ERR`."""


class Deadline:
    """When a call must be done."""

    __slots__ = ("_clock", "_end")

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Return the seconds that are left, more than none. Raises Late."""
        left = self._end - self._clock()
        if left > SHORTEST:
            return left
        if left <= 0:
            raise Late("the time of the call is over")
        return SHORTEST

    def share(self, parts: int) -> Deadline:
        """Return a deadline after one of `parts` equal parts of the time that is left."""
        return Deadline(self._clock, self.left() / parts)


class Wire(Protocol):
    """A connected socket with deadlines."""

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Send all bytes of all pieces."""

    def some(self, most: int, deadline: Deadline) -> bytes:
        """Wait for bytes and return up to `most`; none means that the peer has closed."""

    def fill(self, into: Sequence[memoryview], deadline: Deadline) -> None:
        """Receive until all of `into`, which has bytes, is full. Raises Closed."""

    def silent(self) -> bool:
        """Return whether the peer has sent nothing and keeps the connection."""


class PlainWire:
    """A TCP or unix socket: the kernel waits for whole payloads, within the time that is left."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        if sock.family == socket.AF_UNIX:
            # A TCP socket's buffer grows by itself.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        self._sock = sock
        self._limited = 0.0
        """Seconds that a receive waits now at most; 0 for no limit."""
        self._writable, self._readable = select.poll(), select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._readable.register(sock, select.POLLIN)

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Send all bytes of all pieces."""
        rest: Sequence[Piece] = pieces
        while (sent := self._send(rest)) < sum(map(len, rest)):
            rest = _without([memoryview(piece) for piece in rest], sent)
            if not self._writable.poll(deadline.left() * 1000):
                raise Late("the server takes no bytes in time")

    def some(self, most: int, deadline: Deadline) -> bytes:
        """Wait for bytes and return up to `most`; none means that the peer has closed."""
        self._limit(deadline)
        try:
            return self._sock.recv(most)
        except BlockingIOError:
            raise Late("no reply in time") from None

    def fill(self, into: Sequence[memoryview], deadline: Deadline) -> None:
        """Receive until all of `into`, which has bytes, is full. Raises Closed."""
        rest = into
        while rest:
            self._limit(deadline)
            try:
                received = self._sock.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                raise Late("no reply in time") from None
            if not received:
                raise Closed("closed within a reply")
            rest = _without(rest, received)

    def silent(self) -> bool:
        """Return whether the peer has sent nothing and keeps the connection."""
        return not self._readable.poll(0)

    def _send(self, pieces: Sequence[Piece]) -> int:
        """Return how many bytes the socket takes now."""
        try:
            return self._sock.sendmsg(pieces, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _limit(self, deadline: Deadline) -> None:
        """Let the next receive wait for the time that is left, or up to `LIMIT_SLACK` longer."""
        left = deadline.left()
        if not left <= self._limited <= left + LIMIT_SLACK:
            self._limited = left + LIMIT_SLACK / 2
            seconds, fraction = divmod(self._limited, 1)
            limit = struct.pack("ll", int(seconds), int(fraction * 1_000_000))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


class TlsWire:
    """A TLS socket. Python encrypts and decrypts; a payload is copied once in that."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Send all bytes of all pieces."""
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    self._sock.settimeout(deadline.left())
                    rest = rest[self._sock.send(rest[:SEND_BYTES]) :]
        except TimeoutError:
            raise Late("the server takes no bytes in time") from None

    def some(self, most: int, deadline: Deadline) -> bytes:
        """Wait for bytes and return up to `most`; none means that the peer has closed."""
        self._sock.settimeout(deadline.left())
        try:
            return self._sock.recv(most)
        except TimeoutError:
            raise Late("no reply in time") from None

    def fill(self, into: Sequence[memoryview], deadline: Deadline) -> None:
        """Receive until all of `into`, which has bytes, is full. Raises Closed."""
        for piece in into:
            rest = piece
            while rest:
                self._sock.settimeout(deadline.left())
                try:
                    received = self._sock.recv_into(rest)
                except TimeoutError:
                    raise Late("no reply in time") from None
                if not received:
                    raise Closed("closed within a reply")
                rest = rest[received:]

    def silent(self) -> bool:
        """Return whether the peer has sent nothing and keeps the connection."""
        self._sock.settimeout(0)
        try:
            self._sock.recv(1)
        except ssl.SSLWantReadError:
            return True
        except OSError:
            return False
        return False


class Exchange:
    """Requests and replies of one connection, for one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._wire: Wire = TlsWire(sock) if isinstance(sock, ssl.SSLSocket) else PlainWire(sock)
        self.send = self._wire.send
        """Send requests, any number in any pieces, by a deadline. Raises Late, OSError."""
        self._ahead = b""
        """Received, and not asked for yet."""
        self._end = memoryview(bytearray(len(END)))
        """Where the end of a value is received."""

    @property
    def unread(self) -> bool:
        """Whether more was received than was asked for."""
        return bool(self._ahead)

    @property
    def clean(self) -> bool:
        """Whether the connection stands and no byte lies unread: the next reply will be the right
        request's."""
        return not self._ahead and self._wire.silent()

    def lines(self, count: int, deadline: Deadline) -> list[bytes]:
        """Return the next `count` lines, without their ends. Raises Refusal if one is an error."""
        data = self._ahead
        while len(lines := data.split(END, count)) <= count:
            if len(data) > REPLY_LIMIT:
                raise Surprise("a line without end")
            more = self._wire.some(AHEAD_BYTES, deadline)
            if not more:
                raise Closed("the server closed the connection")
            data += more
        self._ahead = lines.pop()
        for line in lines:
            if line.startswith(b"-"):
                raise Refusal(line)
        return lines

    def opening(self, line: bytes, count: int, deadline: Deadline) -> bytes:
        """Return the `count` bytes after `line` if a reply begins with these; none if not.

        One receive takes them and nothing behind them, where a payload may follow. None is also
        returned if not all have come: whatever has is what the other methods take first.
        """
        if self._ahead:
            raise Surprise("something came that was not asked for")
        self._ahead = data = self._wire.some(len(line) + count, deadline)
        if len(data) < len(line) + count or not data.startswith(line):
            return b""
        self._ahead = b""
        return data[len(line) :]

    def number(self, mark: bytes, deadline: Deadline) -> int:
        """Return the number on the next line, after `mark`: a length, or -1 for nothing."""
        (line,) = self.lines(1, deadline)
        if not line.startswith(mark):
            raise Surprise(f"{line[:20]!r} where {mark!r} was due")
        return _integer(line)

    def take(self, count: int, deadline: Deadline) -> bytes:
        """Return the next `count` bytes, which are few."""
        while len(self._ahead) < count:
            more = self._wire.some(count - len(self._ahead), deadline)
            if not more:
                raise Closed("closed within a reply")
            self._ahead += more
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        return taken

    def value(self, into: memoryview, deadline: Deadline) -> None:
        """Take the rest of a bulk string, exactly as many bytes as `into` has, and its end."""
        rest = [into, self._end]
        while rest and self._ahead:
            ahead = min(len(rest[0]), len(self._ahead))
            rest[0][:ahead] = self._ahead[:ahead]
            self._ahead = self._ahead[ahead:]
            rest = _without(rest, ahead)
        if rest:
            self._wire.fill(rest, deadline)
        if self._end != END:
            raise Surprise("a value is longer than it says")

    def reply(self, deadline: Deadline) -> Reply:
        """Return the next reply, whatever it is. Not for payloads. Raises Refusal."""
        (line,) = self.lines(1, deadline)
        match line[:1]:
            case b"+":
                return line[1:]
            case b":":
                return _integer(line)
            case b"$":
                return self._bulk(_integer(line), deadline)
            case b"*":
                return [self.reply(deadline) for _ in range(_limited(_integer(line)))]
            case _:
                raise Surprise(f"no reply begins with {line[:20]!r}")

    def _bulk(self, size: int, deadline: Deadline) -> bytes | None:
        if size < 0:
            return None
        value = bytearray(_limited(size))
        self.value(memoryview(value), deadline)
        return bytes(value)


def request(*words: Piece | Sequence[Piece]) -> list[Piece]:
    """Return a request in pieces: memory views as they are, and what lies between them joined.

    A word that is a list or a tuple is the one word that its pieces make up.
    """
    pieces: list[Piece] = []
    between = b"*%d\r\n" % len(words)
    for word in words:
        parts: Sequence[Piece] = [word] if isinstance(word, Piece) else word
        between += b"$%d\r\n" % sum(map(len, parts))
        for part in parts:
            if isinstance(part, memoryview):
                pieces += [between, part]
                between = b""
            else:
                between += part
        between += END
    return [*pieces, between]


def _without(pieces: Sequence[memoryview], sent: int) -> list[memoryview]:
    """Return what is left of pieces of which the first `sent` bytes are gone."""
    for index, piece in enumerate(pieces):
        if sent < len(piece):
            return [piece[sent:], *pieces[index + 1 :]]
        sent -= len(piece)
    return []


def _integer(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise Surprise(f"{line[:20]!r} is no number") from None


def _limited(size: int) -> int:
    if size > REPLY_LIMIT:
        raise Surprise(f"a reply of {size} is too long")
    return size
