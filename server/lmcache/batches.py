"""What a lane does with a batch: which namespaces it is about, and what came of each key.

A namespace is for one size of values. Which sizes there are is asked of the server, as a question
whether keys are there names none. Of keys that are no chain, each is one of its own.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ..core import BlockKey
from ..protocol import Asked
from .keys import WEAK, block_key
from .memory import Wanted
from .peer import Peer, Site

ROOT_BYTES = 1
"""Of a namespace without blocks, in which a lane asks what belongs to no size."""
SIZES_AT_MOST = 16
ASK_AGAIN_SECONDS = 5.0
"""After which a lane asks for sizes that others have stored since."""


class Operation(StrEnum):
    """What LMCache asks for."""

    SET = "set"
    GET = "get"
    EXISTS = "exists"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Batch:
    """One call. `until` is when it has to be over, on the monotonic clock."""

    number: int
    operation: Operation
    keys: Sequence[str]
    views: Sequence[memoryview]
    until: float


class Result(NamedTuple):
    """What LMCache is told. `error` is empty where it went well; `each` has an entry a key."""

    ok: bool
    error: str
    each: list[bool] | None


def failed(batch: Batch, error: str) -> Result:
    """Return that nothing was done."""
    each = None if batch.operation is Operation.SET else [False] * len(batch.keys)
    return Result(False, error, each)


@dataclass(slots=True)
class SizeBook:
    """The sizes of values that this label has, as far as known here. For all lanes."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    # What the lock guards:
    _sizes: set[int] = field(default_factory=set)
    _asked: float = float("-inf")

    def admit(self, size: int) -> bool:
        """Return whether values of this size are stored: there are few sizes, or it is one."""
        with self._lock:
            if len(self._sizes) < SIZES_AT_MOST:
                self._sizes.add(size)
            return size in self._sizes

    def sizes(self, now: float) -> tuple[list[int], bool]:
        """Return the sizes, and whether the caller should ask for others, which it has now."""
        with self._lock:
            due = not self._sizes or now >= self._asked + ASK_AGAIN_SECONDS
            self._asked = now if due else self._asked
            return sorted(self._sizes), due


class Batches:
    """Does the batches of one lane, in its thread."""

    def __init__(self, site: Site, book: SizeBook) -> None:
        self._site = site
        self._book = book
        self._peers: dict[int, Peer] = {}

    def do(self, batch: Batch) -> Result:
        """Do a batch. A miss is normal, and so is a server that is not there."""
        if time.monotonic() >= batch.until:
            return failed(batch, "the time for it was over before its turn")
        if (root := self._peer(ROOT_BYTES)) is None:
            return failed(batch, "there is no kvtier server now")
        match batch.operation:
            case Operation.SET:
                return self._set(batch)
            case Operation.GET:
                return self._get(batch)
            case Operation.EXISTS:
                return self._exists(batch, root)
            case Operation.DELETE:
                return self._delete(batch, root)

    def close(self) -> None:
        """End all sessions."""
        while self._peers:
            self._peers.popitem()[1].close()

    def _set(self, batch: Batch) -> Result:
        stored = 0
        for size, values in _by_size(batch).items():
            peer = self._peer(size) if self._book.admit(size) else None
            stored += sum(peer.store(values, batch.until)) if peer is not None else 0
        if stored == len(batch.keys):
            return Result(True, "", None)
        if any(block_key(key) is None for key in batch.keys):
            return Result(False, WEAK, None)
        return Result(False, f"{len(batch.keys) - stored} of {len(batch.keys)} not stored", None)

    def _get(self, batch: Batch) -> Result:
        each = [False] * len(batch.keys)
        for size, values in _by_size(batch).items():
            if (peer := self._peer(size)) is not None:
                for value, there in zip(values, peer.load(values, batch.until), strict=True):
                    each[value.at] = there
        return Result(True, "", each)

    def _exists(self, batch: Batch, root: Peer) -> Result:
        each = [False] * len(batch.keys)
        host = disk = redis = 0
        for size in self._sizes(root):
            left = _keys(batch, each)
            if not left or (peer := self._peer(size)) is None:
                break
            held = peer.holds(list(left.values()), batch.until)
            places = list(left)
            for at in held.slots:
                each[places[at]] = True
            disk, redis = disk + held.disk, redis + held.redis
        host = sum(each) - disk - redis
        root.count(Asked(self._site.options.tenant, len(each), 0, host, disk, redis))
        return Result(True, "", each)

    def _delete(self, batch: Batch, root: Peer) -> Result:
        keys = list(_keys(batch, [False] * len(batch.keys)).values())
        for size in self._sizes(root):
            peer = self._peer(size)
            if peer is None or not peer.drop(keys):
                return failed(batch, "the kvtier server did not answer")
        return Result(True, "", [True] * len(batch.keys))

    def _sizes(self, root: Peer) -> list[int]:
        """Return the sizes of values under this label. Asks the server now and then."""
        sizes, due = self._book.sizes(time.monotonic())
        if due:
            for size in root.sizes():
                if size != ROOT_BYTES and self._book.admit(size):
                    sizes.append(size)
        return sorted(set(sizes))

    def _peer(self, size: int) -> Peer | None:
        """Return the session for values of a size, or None if there is no server now."""
        peer = self._peers.get(size)
        if peer is None:
            peer = self._peers[size] = Peer(self._site, size)
        return peer if peer.meet() else None


def _by_size(batch: Batch) -> dict[int, list[Wanted]]:
    """Return the values that can be stored or loaded, by their bytes."""
    found: defaultdict[int, list[Wanted]] = defaultdict(list)
    for at, (text, view) in enumerate(zip(batch.keys, batch.views, strict=True)):
        key = block_key(text)
        usable = view.c_contiguous and not view.readonly and view.nbytes > ROOT_BYTES
        if key is not None and usable:
            found[view.nbytes].append(Wanted(at, key, view))
    return found


def _keys(batch: Batch, there: Sequence[bool]) -> dict[int, BlockKey]:
    """Return the block keys that are not `there` yet, by position."""
    keys = enumerate(map(block_key, batch.keys))
    return {at: key for at, key in keys if key is not None and not there[at]}
