"""The index of a lower tier: which records there are, what they take, and which go first.

Keys of all namespaces share one policy, so that the coldest record of all goes first: it knows a
record by the beginning of its namespace's digest and the key. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

from .core import BlockKey
from .policies import EvictionPolicy
from .tiers.base import Held, Listing

DIGEST_BYTES = 8
"""Of a namespace's digest, in front of each key that the policy knows."""
SAME_TIME_SECONDS = 60.0
"""Records whose times differ by less were used by the same requests, as far as one can tell."""

Shelf: TypeAlias = dict[BlockKey, int]
"""Records whose keys begin with one byte → the bytes that each takes."""


class Record(NamedTuple):
    """One record that goes."""

    namespace: str
    key: BlockKey
    record_bytes: int


class RecordIndex:
    """What a lower tier holds."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._overhead = 0
        self._records_bytes = 0
        self._count = 0
        self._shelves: dict[str, list[Shelf]] = {}
        self._names: dict[bytes, str] = {}
        self._unordered: dict[str, set[BlockKey]] = {}
        """Known, but not to the policy yet: their order is being found out."""
        self._overheads: dict[tuple[str, int], int] = {}
        self._changed: set[bytes] = set()
        """What came or went since the present look at the medium began: we know better."""

    @property
    def used_bytes(self) -> int:
        """What the medium gave for all records and for holding them."""
        return self._records_bytes + self._overhead

    @property
    def overhead_bytes(self) -> int:
        """What the medium gave for holding records, beside the records."""
        return self._overhead

    def __len__(self) -> int:
        return self._count

    def has(self, namespace: str, key: BlockKey) -> bool:
        """Return whether there is such a record."""
        shelves = self._shelves.get(namespace)
        return shelves is not None and key in shelves[key[0]]

    def size(self, namespace: str, key: BlockKey) -> int:
        """Return the bytes that a record takes; 0 if there is none."""
        shelves = self._shelves.get(namespace)
        return 0 if shelves is None else shelves[key[0]].get(key, 0)

    def shelves(self, namespace: str) -> Iterator[tuple[int, int]]:
        """Yield records and bytes of a namespace, a part at a time."""
        for shelf in self._shelves.get(namespace, ()):
            yield len(shelf), sum(shelf.values())

    def add(self, namespace: str, key: BlockKey, record_bytes: int, parent: BlockKey) -> None:
        """Take in a record that was written, or written again."""
        name = self._name(namespace, key)
        self._changed.add(name)
        if self._put(namespace, key, record_bytes):
            above = self._name(namespace, parent) if parent else None
            self.policy.insert([name], record_bytes, above)

    def grew(self, namespace: str, first: int, overhead_bytes: int) -> None:
        """Count what a write took of the medium beside the record."""
        place = (namespace, first)
        self._overheads[place] = self._overheads.get(place, 0) + overhead_bytes
        self._overhead += overhead_bytes

    def remove(self, namespace: str, key: BlockKey) -> bool:
        """Forget a record. Returns whether there was one."""
        shelves = self._shelves.get(namespace)
        size = None if shelves is None else shelves[key[0]].pop(key, None)
        if size is None:
            return False
        self._forget(namespace, key, size)
        waiting = self._unordered.get(namespace, set())
        if key in waiting:
            waiting.discard(key)
        else:
            self.policy.remove(self._name(namespace, key))
        return True

    def forget(self, namespace: str, at_most: int) -> int:
        """Forget some records of a namespace. Returns how many; 0 when there are none left."""
        shelves = self._shelves.get(namespace, [])
        keys = list(islice((key for shelf in shelves for key in shelf), at_most))
        for key in keys:
            self.remove(namespace, key)
        return len(keys)

    def touch(self, namespace: str, keys: Sequence[BlockKey]) -> None:
        """Record one request's use of a chain."""
        if namespace in self._shelves:
            front = bytes.fromhex(namespace[: 2 * DIGEST_BYTES])
            self.policy.touch([front + key for key in keys])

    def coldest(self) -> Iterator[Record]:
        """Yield records, the coldest first, and take each out of the index as it is yielded."""
        for name in self.policy.victims():
            namespace, key = self._names[name[:DIGEST_BYTES]], name[DIGEST_BYTES:]
            size = self._shelves[namespace][key[0]].pop(key)
            self._forget(namespace, key, size)
            self.policy.evict(name)
            yield Record(namespace, key, size)

    # Looking at the medium.

    def begin_look(self) -> None:
        """A look at the medium begins: from now on, what we do counts more than what it sees."""
        self._changed.clear()

    def take_in(self, listing: Listing) -> None:
        """Make the index agree with what a look saw, but for what changed since it began.

        What is new is known at once; `order` tells the policy of it.
        """
        namespace, first = listing.namespace, listing.first
        place = (namespace, first)
        self._overhead += listing.overhead_bytes - self._overheads.get(place, 0)
        self._overheads[place] = listing.overhead_bytes
        shelf = self._open(namespace)[first]
        seen = {held.key for held in listing.records}
        for key in [key for key in shelf if key not in seen]:
            if self._name(namespace, key) not in self._changed:
                self.remove(namespace, key)
        waiting = self._unordered.setdefault(namespace, set())
        for held in listing.records:
            if self._name(namespace, held.key) not in self._changed and self._put(
                namespace, held.key, held.record_bytes
            ):
                waiting.add(held.key)

    def order(self, found: Sequence[Found]) -> None:
        """Tell the policy of records that a look saw, the coldest first."""
        for namespace, key in found:
            if key in (waiting := self._unordered.get(namespace, set())):
                waiting.discard(key)
                size = self._shelves[namespace][key[0]][key]
                self.policy.insert([self._name(namespace, key)], size, None)

    def _open(self, namespace: str) -> list[Shelf]:
        shelves = self._shelves.get(namespace)
        if shelves is None:
            shelves = self._shelves[namespace] = [{} for _ in range(256)]
            self._names[bytes.fromhex(namespace[: 2 * DIGEST_BYTES])] = namespace
        return shelves

    def _put(self, namespace: str, key: BlockKey, size: int) -> bool:
        """Note a record's size. Returns whether it is new."""
        shelf = self._open(namespace)[key[0]]
        before = shelf.get(key)
        shelf[key] = size
        self._records_bytes += size - (before or 0)
        self._count += before is None
        return before is None

    def _forget(self, namespace: str, key: BlockKey, size: int) -> None:
        self._records_bytes -= size
        self._count -= 1
        self._changed.add(self._name(namespace, key))

    def _name(self, namespace: str, key: BlockKey) -> bytes:
        return bytes.fromhex(namespace[: 2 * DIGEST_BYTES]) + key


class Found(NamedTuple):
    """A record that a look saw."""

    namespace: str
    key: BlockKey


class Order:
    """Gathers what a look sees and puts it in order. Runs in the thread that looks."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, float, str, BlockKey]] = []

    def note(self, listing: Listing) -> None:
        """Gather the records of one listing."""
        self._seen += [_aged(listing.namespace, held) for held in listing.records]

    def coldest_first(self) -> list[Found]:
        """Return all that was gathered; of one time, the last first: a chain's tail."""
        self._seen.sort()
        return [Found(namespace, key) for _, _, namespace, key in self._seen]


def _aged(namespace: str, held: Held) -> tuple[int, float, str, BlockKey]:
    return int(held.used // SAME_TIME_SECONDS), -held.used, namespace, held.key
