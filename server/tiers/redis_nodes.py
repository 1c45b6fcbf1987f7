"""Connections to Redis, and which node of a cluster has a key.

A connection serves one thread at a time. Any error and any unread byte closes it. A call keeps one
deadline over all that it does: connecting, TLS, AUTH, asking a cluster where its slots lie. (Only
looking up a name has none: the resolver's own settings bound that.)
"""

from __future__ import annotations

import binascii
import contextlib
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ..codec import RecordError
from ..core import Fault
from .base import TierFault
from .redis_access import Access, Place
from .resp import Closed, Deadline, Exchange, Late, Refusal, Reply, Surprise, request

SLOTS = 16384
"""Hash slots of a cluster, by Redis's definition."""

REFUSALS = {
    "OOM": (
        Fault.FULL,
        "it is at its maxmemory: raise that, lower redis.ttl, or let it evict (allkeys-lru)",
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


class Moved(TierFault):
    """A slot lies on another node than was asked, or is on its way there."""


class Node:
    """One address, and the connections to it."""

    def __init__(self, place: Place, access: Access) -> None:
        self.place = place
        self._access = access
        self._room = threading.Semaphore(access.connections)
        self._idle: deque[_Line] = deque()
        self._busy: set[_Line] = set()
        self._closed = False
        self.answers = True
        """Whether it did when it was last asked. Set by any thread; only an order depends on it."""

    def fault(self, fault: Fault, text: str) -> TierFault:
        """Return a fault of this node."""
        return TierFault(fault, f"redis at {self.place}: {text}")

    @contextlib.contextmanager
    def exchange(self, deadline: Deadline) -> Iterator[Exchange]:
        """Lend a connection. What goes wrong with it comes out as TierFault or RecordError."""
        with self.blamed(), self.lent(deadline) as exchange:
            yield exchange
        self.answers = True

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Turn what goes wrong with a connection of this node into TierFault or RecordError."""
        try:
            yield
        except Late as late:
            self.answers = False
            raise self.fault(Fault.TIMEOUT, str(late)) from None
        except Surprise as surprise:
            raise self.fault(Fault.IO, str(surprise)) from None
        except Refusal as refusal:
            raise self._meaning(refusal) from None
        except (Closed, OSError) as error:
            self.answers = False
            text = getattr(error, "strerror", None) or str(error)
            raise self.fault(Fault.UNREACHABLE, text) from None

    @contextlib.contextmanager
    def lent(self, deadline: Deadline) -> Iterator[Exchange]:
        """Lend a connection. Whatever is raised while it is lent closes it."""
        if not self._room.acquire(timeout=deadline.left()):
            raise Late(f"all {self._access.connections} connections were in use")
        try:
            line = self._reused() or self._connected(deadline)
            self._busy.add(line)
            keep = False
            try:
                if self._closed:
                    raise Closed("the store is closed")
                yield line.exchange
                keep = not line.exchange.unread and not self._closed
            finally:
                self._busy.discard(line)
                if keep:
                    self._idle.append(line)
                else:
                    line.close()
        finally:
            self._room.release()

    def close(self) -> None:
        """Close all connections, those in use too: their calls end with a fault. Waits for none."""
        self._closed = True
        for line in list(self._busy):
            line.cut()
        while self._idle:
            self._idle.pop().close()

    def _reused(self) -> _Line | None:
        """Return an idle connection; those that the server closed meanwhile are let go."""
        while self._idle:
            line = self._idle.pop()
            if line.exchange.clean:
                return line
            line.close()
        return None

    def _connected(self, deadline: Deadline) -> _Line:
        """Return a new connection that is logged in."""
        if self._closed:
            raise Closed("the store is closed")
        line = _Line(self.place, self._access, deadline)
        try:
            self._log_in(line.exchange, deadline)
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

    def _meaning(self, refusal: Refusal) -> TierFault | RecordError:
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


class _Line:
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


class Layout(ABC):
    """Which node has a key."""

    @abstractmethod
    def node(self, name: bytes, deadline: Deadline) -> Node:
        """Return the node of a key. Raises TierFault."""

    @abstractmethod
    def split(self, names: Sequence[bytes], deadline: Deadline) -> dict[Node, list[int]]:
        """Return the indexes of keys by node, in an order of nodes that is always the same."""

    @abstractmethod
    def nodes(self, deadline: Deadline) -> Sequence[Node]:
        """Return all nodes that have keys."""

    @abstractmethod
    def refresh(self, deadline: Deadline) -> None:
        """Ask where the slots lie now. Raises TierFault."""

    @abstractmethod
    def suspect(self) -> None:
        """Let the next call ask first where the slots lie: a node failed."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections. Waits for none."""


class OneNode(Layout):
    """A server alone."""

    def __init__(self, place: Place, access: Access) -> None:
        self._node = Node(place, access)

    def node(self, name: bytes, deadline: Deadline) -> Node:  # noqa: ARG002
        """Return the node of a key."""
        return self._node

    def split(self, names: Sequence[bytes], deadline: Deadline) -> dict[Node, list[int]]:  # noqa: ARG002
        """Return the indexes of keys by node."""
        return {self._node: list(range(len(names)))}

    def nodes(self, deadline: Deadline) -> Sequence[Node]:  # noqa: ARG002
        """Return the node."""
        return [self._node]

    def refresh(self, deadline: Deadline) -> None:
        """There is nothing to ask for."""

    def suspect(self) -> None:
        """There is nothing to ask for."""

    def close(self) -> None:
        """Close all connections."""
        self._node.close()


class Cluster(Layout):
    """A Redis Cluster. Reads and writes go to the primaries."""

    def __init__(self, place: Place, access: Access) -> None:
        self._access = access
        self._asking = threading.Lock()
        # Replaced as a whole, by the thread that holds the lock:
        self._nodes: dict[Place, Node] = {}
        self._slots: list[Node | None] = []
        self._stale = True
        self._entry = Node(place, access)

    def node(self, name: bytes, deadline: Deadline) -> Node:
        """Return the node of a key. Raises TierFault."""
        self._fresh(deadline)
        slot = binascii.crc_hqx(name, 0) % SLOTS
        node = self._slots[slot]
        if node is None:
            raise self._entry.fault(Fault.UNREACHABLE, f"no node of the cluster has slot {slot}")
        return node

    def split(self, names: Sequence[bytes], deadline: Deadline) -> dict[Node, list[int]]:
        """Return the indexes of keys by node."""
        found: defaultdict[Node, list[int]] = defaultdict(list)
        for index, name in enumerate(names):
            found[self.node(name, deadline)].append(index)
        return dict(sorted(found.items(), key=lambda item: item[0].place))

    def nodes(self, deadline: Deadline) -> Sequence[Node]:
        """Return all primaries."""
        self._fresh(deadline)
        return list(self._nodes.values())

    def refresh(self, deadline: Deadline) -> None:
        """Ask node after node until one says where the slots lie. Raises TierFault."""
        self._stale = True
        self._fresh(deadline)

    def suspect(self) -> None:
        """Let the next call ask first where the slots lie: a node failed."""
        self._stale = True

    def close(self) -> None:
        """Close all connections."""
        for node in (self._entry, *self._nodes.values()):
            node.close()

    def _fresh(self, deadline: Deadline) -> None:
        if not self._stale:
            return
        if not self._asking.acquire(timeout=deadline.left()):
            raise Late("another call was asking where the slots lie")
        try:
            if self._stale:
                self._ask(deadline)
                self._stale = False
        finally:
            self._asking.release()

    def _ask(self, deadline: Deadline) -> None:
        known = dict.fromkeys([self._entry, *self._nodes.values()])
        asked = sorted(known, key=lambda node: not node.answers)
        for index, node in enumerate(asked):
            try:
                self._adopt(node, _slots_of(node, deadline.share(len(asked) - index)))
            except TierFault:
                if node is asked[-1]:
                    raise
            else:
                return

    def _adopt(self, asked: Node, ranges: list[_Range]) -> None:
        known = {asked.place: asked, **self._nodes}
        nodes: dict[Place, Node] = {}
        slots: list[Node | None] = [None] * SLOTS
        for first, last, host, port in ranges:
            place = Place(host or asked.place.host, port)
            node = nodes.setdefault(place, known.get(place) or Node(place, self._access))
            slots[first : last + 1] = [node] * (last + 1 - first)
        gone = set(self._nodes.values()) - set(nodes.values()) - {self._entry}
        self._nodes, self._slots = nodes, slots
        for node in gone:
            node.close()


_Address: TypeAlias = str | tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
"""As `socket.connect` takes it."""
_Range: TypeAlias = tuple[int, int, str, int]
"""First and last slot, host (empty: the one that was asked) and port of the primary."""


def _slots_of(node: Node, deadline: Deadline) -> list[_Range]:
    with node.exchange(deadline) as exchange:
        exchange.send(request(b"CLUSTER", b"SLOTS"), deadline)
        reply = exchange.reply(deadline)
        if not isinstance(reply, list):
            raise Surprise("CLUSTER SLOTS gave no list")
        return [_range(entry) for entry in reply]


def _range(entry: Reply) -> _Range:
    match entry:
        case [int(first), int(last), [(bytes() | None) as host, int(port), *_], *_] if (
            0 <= first <= last < SLOTS
        ):
            return first, last, (host or b"").decode(), port
        case _:
            raise Surprise("CLUSTER SLOTS gave something unknown")


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
