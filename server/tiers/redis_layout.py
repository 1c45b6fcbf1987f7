"""Which node has a key: the one that there is, or one of a cluster's."""

from __future__ import annotations

import binascii
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from ..core import Fault
from .base import TierFault
from .redis_access import Access, Place
from .redis_nodes import Node
from .resp import Deadline, Late, Reply, Surprise, request

SLOTS = 16384
"""Hash slots of a cluster, by Redis's definition."""


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
