"""The index of a lower tier: which records there are, what they take, and which go first.

Keys of all namespaces share one policy, so that the coldest record of all goes first: it knows a
record by the beginning of its namespace's digest and the key. What belongs to a tenant with a quota
has an order of its own beside that, and is known to continue what it does. Runs on the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from .accounts import Account, Accounts, Orders
from .core import BlockKey, Tier
from .policies import EvictionPolicy
from .tiers.base import Held, Listing

DIGEST_BYTES = 8
"""Of a namespace's digest, in front of each key that the policy knows."""
SAME_TIME_SECONDS = 60.0
"""Records whose times differ by less were used by the same requests, as far as one can tell."""

OWNER_SHIFT = 48
SIZE_MASK = (1 << OWNER_SHIFT) - 1

Shelf: TypeAlias = dict[BlockKey, int]
"""Records whose keys begin with one byte → the bytes that each takes, and above those, from
`OWNER_SHIFT` on, the number of the account that it is charged to."""


class Keyed(Protocol):
    """What has a block's key."""

    @property
    def key(self) -> BlockKey:
        """The key."""


B = TypeVar("B", bound=Keyed)


class Record(NamedTuple):
    """One record that goes."""

    namespace: str
    key: BlockKey
    record_bytes: int


class RecordIndex:
    """What a lower tier holds."""

    def __init__(self, policy: EvictionPolicy, tier: Tier) -> None:
        self.policy = policy
        self.orders = Orders()
        self.accounts = Accounts()
        """Those of the cache, once it is one: before there are records."""
        self._tier = tier
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
        self._parents: dict[bytes, bytes] = {}
        """What a record continues, as far as a tenant with a quota has to do with it."""
        self._children: Counter[bytes] = Counter()
        """How many of these continue a record."""

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

    def lacking(self, namespace: str, blocks: Sequence[B]) -> list[B]:
        """Return the blocks of which there is no record."""
        return [block for block in blocks if not self.has(namespace, block.key)]

    def size(self, namespace: str, key: BlockKey) -> int:
        """Return the bytes that a record takes; 0 if there is none."""
        shelves = self._shelves.get(namespace)
        return 0 if shelves is None else shelves[key[0]].get(key, 0) & SIZE_MASK

    def owner(self, namespace: str, key: BlockKey) -> Account:
        """Return whom a record is charged to; nobody if there is none."""
        shelves = self._shelves.get(namespace)
        held = 0 if shelves is None else shelves[key[0]].get(key, 0)
        return self.accounts.numbered(held >> OWNER_SHIFT)

    def owner_of(self, name: bytes) -> Account | None:
        """Return whom a record is charged to, by what the policy calls it; None without one."""
        namespace = self._names.get(name[:DIGEST_BYTES])
        if namespace is None or not self.has(namespace, name[DIGEST_BYTES:]):
            return None
        return self.owner(namespace, name[DIGEST_BYTES:])

    def owners(self) -> dict[bytes, Account]:
        """Return whom each record is charged to that the policy knows. O(records)."""
        return {
            self.name(namespace, key): self.owner(namespace, key)
            for namespace, shelves in self._shelves.items()
            for shelf in shelves
            for key in shelf.keys() - self._unordered.get(namespace, set())
        }

    def charged(self) -> Iterator[tuple[Account, int]]:
        """Yield each record's owner and bytes."""
        for shelves in self._shelves.values():
            for shelf in shelves:
                for held in shelf.values():
                    yield self.accounts.numbered(held >> OWNER_SHIFT), held & SIZE_MASK

    def shelves(self, namespace: str) -> Iterator[tuple[int, int]]:
        """Yield records and bytes of a namespace, a part at a time."""
        for shelf in self._shelves.get(namespace, ()):
            yield len(shelf), sum(held & SIZE_MASK for held in shelf.values())

    def add(
        self, namespace: str, key: BlockKey, record_bytes: int, parent: BlockKey, owner: Account
    ) -> None:
        """Take in a record that was written, or written again: then its owner stays."""
        name = self.name(namespace, key)
        self._changed.add(name)
        if self._put(namespace, key, record_bytes, owner):
            above = self.name(namespace, parent) if parent else None
            self.policy.insert([name], record_bytes, above)
            self.enter(owner, name, record_bytes, above)

    def enter(self, owner: Account, name: bytes, weight: int, parent: bytes | None) -> None:
        """Remember of a record what quotas need, unless nobody has one."""
        self.orders.add(owner, name, weight, parent)
        if parent is not None and self.accounts.quotas and name not in self._parents:
            above = self.owner_of(parent)
            if owner.quota or above is None or above.quota:
                self._parents[name] = parent
                self._children[parent] += 1

    def prune(self) -> None:
        """Forget what quotas needed that are no more."""
        self.orders.prune()
        if not self.accounts.quotas:
            self._parents.clear()
            self._children.clear()

    def grew(self, namespace: str, first: int, overhead_bytes: int) -> None:
        """Count what a write took of the medium beside the record."""
        place = (namespace, first)
        self._overheads[place] = self._overheads.get(place, 0) + overhead_bytes
        self._overhead += overhead_bytes

    def remove(self, namespace: str, key: BlockKey) -> bool:
        """Forget a record. Returns whether there was one."""
        shelves = self._shelves.get(namespace)
        held = None if shelves is None else shelves[key[0]].pop(key, None)
        if held is None:
            return False
        self._forget(namespace, key, held)
        waiting = self._unordered.get(namespace, set())
        if key in waiting:
            waiting.discard(key)
        else:
            self.policy.remove(self.name(namespace, key))
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
            names = [front + key for key in keys]
            self.policy.touch(names)
            if self.orders:
                self.orders.touch(names, self.owner_of)

    def coldest(self) -> Iterator[Record]:
        """Yield records, the coldest first, and take each out of the index as it is yielded."""
        for name in self.policy.victims():
            record = self._take_out(name)
            self.policy.evict(name)
            yield record

    def own_coldest(self, owner: Account, parent: bytes | None) -> Iterator[Record | None]:
        """Yield a tenant's own records as `coldest` does, and None for each that may not go.

        That is one which another record continues, and `parent`.
        """
        for name in self.orders.coldest(owner):
            if name == parent or name in self._children:
                yield None
            else:
                record = self._take_out(name)
                self.policy.evict(name)
                yield record

    def _take_out(self, name: bytes) -> Record:
        namespace, key = self._names[name[:DIGEST_BYTES]], name[DIGEST_BYTES:]
        held = self._shelves[namespace][key[0]].pop(key)
        self._forget(namespace, key, held)
        return Record(namespace, key, held & SIZE_MASK)

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
            if self.name(namespace, key) not in self._changed:
                self.remove(namespace, key)
        waiting = self._unordered.setdefault(namespace, set())
        for held in listing.records:
            if self.name(namespace, held.key) not in self._changed and self._put(
                namespace, held.key, held.record_bytes, self.accounts.nobody
            ):
                waiting.add(held.key)

    def order(self, found: Sequence[Found]) -> None:
        """Tell the policy of records that a look saw, the coldest first."""
        for namespace, key in found:
            if key in (waiting := self._unordered.get(namespace, set())):
                waiting.discard(key)
                name, size = self.name(namespace, key), self.size(namespace, key)
                self.policy.insert([name], size, None)
                self.enter(self.owner(namespace, key), name, size, None)

    def _open(self, namespace: str) -> list[Shelf]:
        shelves = self._shelves.get(namespace)
        if shelves is None:
            shelves = self._shelves[namespace] = [{} for _ in range(256)]
            self._names[bytes.fromhex(namespace[: 2 * DIGEST_BYTES])] = namespace
        return shelves

    def _put(self, namespace: str, key: BlockKey, size: int, owner: Account) -> bool:
        """Note a record's size, and its owner if it is new. Returns whether it is."""
        shelf = self._open(namespace)[key[0]]
        before = shelf.get(key)
        if before is not None:
            owner = self.accounts.numbered(before >> OWNER_SHIFT)
        shelf[key] = owner.number << OWNER_SHIFT | size
        more = size - ((before or 0) & SIZE_MASK)
        self._records_bytes += more
        owner.charge(self._tier, more)
        self._count += before is None
        return before is None

    def _forget(self, namespace: str, key: BlockKey, held: int) -> None:
        owner, size = self.accounts.numbered(held >> OWNER_SHIFT), held & SIZE_MASK
        name = self.name(namespace, key)
        self._records_bytes -= size
        self._count -= 1
        self._changed.add(name)
        owner.charge(self._tier, -size)
        self.orders.remove(owner, name)
        parent = self._parents.pop(name, None)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]

    def name(self, namespace: str, key: BlockKey) -> bytes:
        """Return what the policy calls a record."""
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
