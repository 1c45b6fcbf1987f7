"""The Redis tier: one key a record, `kvtier:<namespace digest>:<block key>`, both in hex.

A record comes, goes and expires as a whole, its existence means that all of it is there, and it
lies on one node of a cluster. How it lies there is in `redis_records.py`.

Redis is shared with other servers: nothing here lists what is in it. It drops records when their
time is over (from their last write) and, as `maxmemory-policy` says, when it is full.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from ..codec import Codec, RecordError
from ..core import BlockKey, Fault, ReadOutcome, Tier
from .base import Listing, RecordStore, Space, TierFault, Written, ignore
from .compression import Coded, Coder
from .redis_access import RedisOptions, parse, shown_url
from .redis_layout import Cluster, Layout, OneNode
from .redis_nodes import FAILURES, Moved, Node
from .redis_records import Wanted, fetch, write
from .resp import Deadline, Exchange, Late, Refusal, Surprise, request

__all__ = ["RedisOptions", "RedisStore", "shown_url"]

log = logging.getLogger(__name__)

ENTRY_BYTES = 320
"""About what Redis takes for a key of ours beside its value; MEMORY USAGE says so."""
KEYS_AT_ONCE = 1000
"""Keys of one request to drop, and about as many of one step of SCAN."""
OLDEST_VERSION = 7
"""Of Redis. Valkey says which Redis it is compatible with."""

T = TypeVar("T")


class RedisStore(RecordStore):
    """Records in a Redis, a Valkey or a Redis Cluster.

    A call takes `timeout_seconds` at most; `open`, `drop` and `wipe` are several steps that each
    do. Raises SettingsError where the options cannot be used.
    """

    tier = Tier.REDIS
    listed = False

    def __init__(self, options: RedisOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self._clock = clock
        self._place, self._access = parse(options)
        self._layout = self._new_layout()
        self._advised = False
        self._coder = Coder()

    def __repr__(self) -> str:
        return f"RedisStore({shown_url(self.options.url)})"

    def open(self) -> None:
        """Connect anew and check the server's version. Raises TierFault."""
        self._layout.close()
        self._layout = self._new_layout()
        for node in self._routed(self._layout.nodes):
            self._routed(partial(_check_version, node))
            if not self._advised and (advice := self._routed(partial(_advice, node))):
                log.warning("%r: %s", self, "; ".join(advice))
                self._advised = True

    def scan(self) -> Iterator[Listing]:
        """Yield nothing: what is in Redis is not this server's to list."""
        yield from ()

    def find(self, space: Space, keys: Sequence[BlockKey]) -> int:
        """Return how many of `keys`, from the first on, are there without a gap."""
        if not keys:
            return 0
        try:
            return self._routed(partial(self._leading, _names(space.digest, keys)))
        except Moved:
            return 0

    def read(
        self,
        space: Space,
        key: BlockKey,
        into: memoryview,
        report: Callable[[Coded], object] = ignore,
    ) -> ReadOutcome:
        """Read a block into `into` and verify it."""
        try:
            return self._routed(partial(self._read, space, key, into, report))
        except Moved:
            return ReadOutcome.MISSING

    def write(
        self,
        space: Space,
        key: BlockKey,
        parent: BlockKey,
        payload: memoryview,
        codec: Codec = Codec.RAW,
    ) -> Written:
        """Write a block. Its bytes are counted as Redis' own allocator, jemalloc, gives them."""
        name = _name(space.digest, key)
        stored = self._coder.encode(space, key, parent, payload, codec)
        ttl = b"%d" % (self.options.ttl_seconds * 1000)

        def attempt(deadline: Deadline) -> int:
            with self._layout.node(name, deadline).exchange(deadline) as exchange:
                return write(exchange, name, stored.header, stored.payload, ttl, deadline)

        return Written(ENTRY_BYTES + self._routed(attempt), 0, stored.coded)

    def drop(self, namespace: str, keys: Sequence[BlockKey]) -> None:
        """Remove records."""
        for batch in _batches(_names(namespace, keys)):
            self._routed(partial(self._unlink, batch))

    def wipe(self, namespace: str) -> None:
        """Remove every record of a namespace, in short steps between which Redis serves others."""
        for node in self._routed(self._layout.nodes):
            cursor = None
            while cursor != b"0":
                step = partial(_scan, node, namespace, cursor or b"0")
                cursor, names = self._routed(step)
                for batch in _batches(names):
                    self._routed(partial(self._unlink, batch))

    def close(self) -> None:
        """Close all connections; calls that use one end with a fault. Waits for nothing."""
        self._layout.close()

    def _new_layout(self) -> Layout:
        layout = Cluster if self.options.cluster else OneNode
        return layout(self._place, self._access)

    def _routed(self, call: Callable[[Deadline], T]) -> T:
        """Make a call within its time, and once more if a slot turns out to have moved."""
        deadline = Deadline(self._clock, self.options.timeout_seconds)
        try:
            try:
                return call(deadline)
            except Moved:
                self._layout.refresh(deadline)
                return call(deadline)
        except Late as late:
            raise TierFault(Fault.TIMEOUT, f"redis at {self._place}: {late}") from None
        except TierFault as fault:
            if fault.fault in {Fault.UNREACHABLE, Fault.TIMEOUT}:
                self._layout.suspect()
            raise

    def _leading(self, names: Sequence[bytes], deadline: Deadline) -> int:
        """Ask all nodes concerned, and only then wait for any of them."""
        gap = len(names)
        asked: list[tuple[Node, Exchange, list[int]]] = []
        with ExitStack() as stack:
            for node, indexes in self._layout.split(names, deadline).items():
                exchange = stack.enter_context(node.exchange(deadline))
                some = names if len(indexes) == len(names) else [names[index] for index in indexes]
                exchange.send([_each(b"EXISTS", some)], deadline)
                asked.append((node, exchange, indexes))
            for node, exchange, indexes in asked:
                try:
                    replies = _bits(exchange, len(indexes), deadline)
                except FAILURES as error:
                    raise node.meaning(error) from None
                if b":0" in replies:
                    gap = min(gap, indexes[replies.index(b":0")])
        return gap

    def _read(
        self,
        space: Space,
        key: BlockKey,
        into: memoryview,
        report: Callable[[Coded], object],
        deadline: Deadline,
    ) -> ReadOutcome:
        name = _name(space.digest, key)
        wanted = Wanted(space.raw, key, space.payload_bytes)
        try:
            with self._layout.node(name, deadline).exchange(deadline) as exchange:
                header = fetch(exchange, name, wanted, into, deadline)
            if header is None:
                return ReadOutcome.MISSING
            return self._coder.restore(header, into, report)
        except RecordError:
            self._unlink([name], deadline)
            return ReadOutcome.CORRUPT

    def _unlink(self, names: Sequence[bytes], deadline: Deadline) -> None:
        for node, indexes in self._layout.split(names, deadline).items():
            with node.exchange(deadline) as exchange:
                exchange.send([_each(b"UNLINK", [names[index] for index in indexes])], deadline)
                _bits(exchange, len(indexes), deadline)


def _names(namespace: str, keys: Sequence[BlockKey]) -> list[bytes]:
    return [_name(namespace, key) for key in keys]


def _name(namespace: str, key: BlockKey) -> bytes:
    return f"kvtier:{namespace}:{key.hex()}".encode()


def _batches(names: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(names), KEYS_AT_ONCE):
        yield names[start : start + KEYS_AT_ONCE]


def _each(command: bytes, names: Sequence[bytes]) -> bytes:
    """Return one request of `command` for each name."""
    head = b"*2\r\n$%d\r\n%b\r\n$" % (len(command), command)
    return b"".join([b"%b%d\r\n%b\r\n" % (head, len(name), name) for name in names])


def _bits(exchange: Exchange, count: int, deadline: Deadline) -> list[bytes]:
    """Receive replies that are `:0` or `:1` each."""
    replies = exchange.lines(count, deadline)
    if set(replies) - {b":0", b":1"}:
        raise Surprise("something else than 0 and 1 where these were due")
    return replies


def _scan(
    node: Node, namespace: str, cursor: bytes, deadline: Deadline
) -> tuple[bytes, list[bytes]]:
    """Return the next cursor, and some names of a namespace's records."""
    pattern, count = f"kvtier:{namespace}:*".encode(), b"%d" % KEYS_AT_ONCE
    with node.exchange(deadline) as exchange:
        words = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", count)
        exchange.send(request(*words), deadline)
        match exchange.reply(deadline):
            case [bytes(after), list(names)]:
                return after, [name for name in names if isinstance(name, bytes)]
            case _:
                raise Surprise("SCAN gave something unknown")


def _check_version(node: Node, deadline: Deadline) -> None:
    with node.exchange(deadline) as exchange:
        exchange.send(request(b"INFO", b"server"), deadline)
        about = exchange.reply(deadline)
    lines = about.split(b"\r\n") if isinstance(about, bytes) else []
    for line in lines:
        name, _, version = line.partition(b":")
        major = version.split(b".")[0]
        if name == b"redis_version" and major.isdigit():
            if int(major) >= OLDEST_VERSION:
                return
            text = f"it is Redis {version.decode()}, and kvtier needs {OLDEST_VERSION} or later"
            raise node.fault(Fault.IO, text)
    raise node.fault(Fault.IO, "INFO says no redis_version: this is no Redis")


def _advice(node: Node, deadline: Deadline) -> list[str]:
    """Return what a person should change in Redis' settings, as far as they may be seen."""
    with node.exchange(deadline) as exchange:
        wanted = (b"maxmemory", b"maxmemory-policy", b"save", b"appendonly")
        exchange.send(request(b"CONFIG", b"GET", *wanted), deadline)
        try:
            reply = exchange.reply(deadline)
        except Refusal:
            return []  # Not permitted, which is well; or a service where settings are hidden.
    words = [each for each in reply if isinstance(each, bytes)] if isinstance(reply, list) else []
    settings = dict(zip(words[::2], words[1::2], strict=False))
    return [
        advice
        for advice, due in (
            ("set maxmemory, or it takes all memory", settings.get(b"maxmemory") == b"0"),
            (
                "set maxmemory-policy to allkeys-lru, or it refuses writes once it is full",
                settings.get(b"maxmemory-policy") == b"noeviction",
            ),
            (
                'switch saving off (save "", appendonly no): a cache needs none',
                bool(settings.get(b"save")) or settings.get(b"appendonly") == b"yes",
            ),
        )
        if due
    ]
