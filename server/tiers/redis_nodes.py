"""Connections to a Redis server.

A connection serves one thread at a time. Any error and any unread byte closes it. A call keeps one
deadline over all that it does: waiting for a connection, connecting, TLS, AUTH. (Only
looking up a name has none: the resolver's own settings bound that.)
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque
from queue import Empty, SimpleQueue
from typing import TypeAlias

from ..codec import RecordError
from ..core import Fault
from .base import TierFault
from .redis_access import Access, Place
from .resp import Closed, Deadline, Exchange, Late, Refusal, Surprise, request

REFUSALS = {
    "OOM": (
        Fault.FULL,
        "it is at its maxmemory: raise it, lower redis.ttl_seconds, or let it evict (allkeys-lru)",
    ),
    "READONLY": (Fault.READ_ONLY, "it is a replica: redis.url must be the primary's"),
    "MISCONF": (Fault.READ_ONLY, "it takes no writes as it cannot save: let a cache save nothing"),
    "LOADING": (Fault.UNREACHABLE, "it is still loading its data"),
    "MASTERDOWN": (Fault.UNREACHABLE, "it is a replica that has lost its primary"),
    "CLUSTERDOWN": (Fault.UNREACHABLE, "the cluster is down: nodes of it are missing"),
    "TRYAGAIN": (Fault.UNREACHABLE, "the cluster is moving this slot"),
    "NOAUTH": (Fault.UNREACHABLE, "it wants a password, and none is set"),
    "NOPERM": (Fault.UNREACHABLE, "the user may not run what kvtier needs (docs/operations.md)"),
    "DENIED": (Fault.UNREACHABLE, "it is in protected mode, and takes local connections only"),
    "ERR max": (Fault.UNREACHABLE, "it has as many clients as its maxclients"),
}
"""What an error reply means for the tier, by its first words. All others are `IO`."""


FAILURES = (Late, Closed, Surprise, Refusal, OSError)
"""What an exchange raises."""


class Moved(TierFault):
    """A slot lies on another node than was asked, or is on its way there."""


class Node:
    """One address, and the connections to it."""

    def __init__(self, place: Place, access: Access) -> None:
        self.place = place
        self._access = access
        self._room: SimpleQueue[None] = SimpleQueue()
        """One for each connection that may be used beside those that are: a queue in C, which
        takes a tenth of a semaphore's time."""
        for _ in range(access.connections):
            self._room.put(None)
        self._idle: deque[Line] = deque()
        self._busy: set[Line] = set()
        self._closed = False
        self.answers = True
        """Whether it did when it was last asked. Set by any thread; only an order depends on it."""

    def fault(self, fault: Fault, text: str) -> TierFault:
        """Return a fault of this node."""
        return TierFault(fault, f"redis at {self.place}: {text}")

    def exchange(self, deadline: Deadline) -> Loan:
        """Lend a connection, to be used as a context.

        What is raised in it closes the connection, and comes out as TierFault or RecordError if it
        is one of `FAILURES`.
        """
        return Loan(self, deadline)

    def meaning(self, error: Exception) -> Exception:
        """Return what one of `FAILURES` means for the tier or the record."""
        match error:
            case Late():
                self.answers = False
                return self.fault(Fault.TIMEOUT, str(error))
            case Surprise():
                return self.fault(Fault.IO, str(error))
            case Refusal():
                return self._refused(error)
            case _:
                self.answers = False
                text = getattr(error, "strerror", None) or str(error)
                return self.fault(Fault.UNREACHABLE, text)

    def take(self, deadline: Deadline) -> Line:
        """Return a connection to use alone. Raises one of `FAILURES`, TierFault."""
        try:
            self._room.get(timeout=deadline.left())
        except Empty:
            raise Late(f"all {self._access.connections} connections were in use") from None
        try:
            line = self._reused() or self._connected(deadline)
        except BaseException:
            self._room.put(None)
            raise
        self._busy.add(line)
        return line

    def give_back(self, line: Line, error: BaseException | None) -> None:
        """Keep a connection that was used for another time, unless something was wrong with it."""
        self._busy.discard(line)
        if error is None and not line.exchange.unread and not self._closed:
            self.answers = True
            self._idle.append(line)
        else:
            line.close()
        self._room.put(None)

    def close(self) -> None:
        """Close all connections, those in use too: their calls end with a fault. Waits for none."""
        self._closed = True
        for line in list(self._busy):
            line.cut()
        while self._idle:
            self._idle.pop().close()

    def _reused(self) -> Line | None:
        """Return an idle connection; those that the server closed meanwhile are let go."""
        while self._idle:
            line = self._idle.pop()
            if line.exchange.clean:
                return line
            line.close()
        return None

    def _connected(self, deadline: Deadline) -> Line:
        """Return a new connection that is logged in."""
        if self._closed:
            raise Closed("the store is closed")
        line = Line(self.place, self._access, deadline)
        try:
            self._log_in(line.exchange, deadline)
            if self._closed:
                raise Closed("the store is closed")
        except BaseException:
            line.close()
            raise
        return line

    def _log_in(self, exchange: Exchange, deadline: Deadline) -> None:
        if self._access.login:
            try:
                exchange.send(request(b"AUTH", *self._access.login), deadline)
                exchange.lines(1, deadline)
            except Refusal as refusal:
                # Not its text: a server that does not know AUTH repeats the words after it.
                text = f"AUTH failed ({refusal.code}): check the user name and the password"
                raise self.fault(Fault.UNREACHABLE, text) from None
        if self._access.database:
            exchange.send(request(b"SELECT", b"%d" % self._access.database), deadline)
            exchange.lines(1, deadline)

    def _refused(self, refusal: Refusal) -> TierFault | RecordError:
        if refusal.code == "WRONGTYPE":
            return RecordError("something else lies under the record's name")
        if refusal.code in {"MOVED", "ASK"}:
            text = "the slot lies on another node: set redis.cluster if this is a cluster"
            return Moved(Fault.UNREACHABLE, f"redis at {self.place}: {text}")
        text = str(refusal)
        aborted = refusal.code == "EXECABORT"
        for words, (fault, meaning) in REFUSALS.items():
            if f"{text} ".startswith(f"{words} ") or (aborted and f" {words} " in text):
                return self.fault(fault, meaning)
        return self.fault(Fault.IO, text)


class Loan:
    """A connection of a node in use."""

    __slots__ = ("_deadline", "_line", "_node")

    def __init__(self, node: Node, deadline: Deadline) -> None:
        self._node = node
        self._deadline = deadline
        self._line: Line | None = None

    def __enter__(self) -> Exchange:
        try:
            self._line = self._node.take(self._deadline)
        except FAILURES as error:
            raise self._node.meaning(error) from None
        return self._line.exchange

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        assert self._line is not None, "a loan is entered first"
        self._node.give_back(self._line, error)
        if error is not None and isinstance(error, FAILURES):
            raise self._node.meaning(error) from None


class Line:
    """One connection."""

    def __init__(self, place: Place, access: Access, deadline: Deadline) -> None:
        self._socket = _connect(place, access, deadline)
        self.exchange = Exchange(self._socket)

    def cut(self) -> None:
        """Wake the thread that uses the connection; from any thread."""
        with contextlib.suppress(OSError):
            # Not the method of a TLS socket: that one would go on in plain text.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Raises nothing."""
        self._socket.close()


_Address: TypeAlias = str | tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
"""As `socket.connect` takes it."""


def _connect(place: Place, access: Access, deadline: Deadline) -> socket.socket:
    """Return a connected socket, the first that can be had of the place's addresses."""
    if not place.port:
        return _opened(socket.AF_UNIX, place.host, deadline)
    failure: OSError | Late = OSError("the name has no address")
    found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
    for index, (family, _, _, _, address) in enumerate(found):
        try:
            sock = _opened(family, address, deadline.share(len(found) - index))
        except (OSError, Late) as error:
            failure = error
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock if access.tls is None else _sealed(sock, place, access.tls, deadline)
    raise failure


def _opened(family: int, address: _Address, deadline: Deadline) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(deadline.left())
        sock.connect(address)
    except TimeoutError:
        sock.close()
        raise Late("no connection in time") from None
    except BaseException:
        sock.close()
        raise
    return sock


def _sealed(
    sock: socket.socket, place: Place, context: ssl.SSLContext, deadline: Deadline
) -> ssl.SSLSocket:
    try:
        sock.settimeout(deadline.left())
        return context.wrap_socket(sock, server_hostname=place.host)
    except TimeoutError:
        sock.close()
        raise Late("no TLS in time: does it speak TLS at this port?") from None
    except BaseException:
        sock.close()
        raise
