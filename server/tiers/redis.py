"""The Redis tier: one hash a record, under `kvtier:<namespace digest>:<key>`, both in hex.

Field `0` of the hash is the header (`codec.pack`), and fields from `1` on are pieces of the
payload, for Redis is several times slower with larger values. A record is one key: it comes, goes
and expires as a whole, its existence means that all of it is there, and it lies on one node of a
cluster. It is written in one transaction, so that nobody ever reads parts of two.

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

from ..codec import HEADER_BYTES, Header, RecordError, expect, pack, seal, unpack, verify
from ..core import BlockKey, Fault, ReadOutcome, Tier
from .base import Listing, RecordStore, Space, TierFault, Written
from .redis_access import RedisOptions, parse, shown_url
from .redis_nodes import Cluster, Layout, Moved, Node, OneNode
from .resp import Deadline, Exchange, Late, Refusal, Surprise, request

__all__ = ["RedisOptions", "RedisStore", "shown_url"]

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""The most that one field holds. Redis gets slow with values of more than twice as much."""
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
        self._options = options
        self._clock = clock
        self._place, self._access = parse(options)
        self._layout = self._new_layout()
        self._advised = False

    def __repr__(self) -> str:
        return f"RedisStore({shown_url(self._options.url)})"

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

    def read(self, space: Space, key: BlockKey, into: memoryview) -> ReadOutcome:
        """Read a block into `into` and verify it."""
        try:
            return self._routed(partial(self._read, space, key, into))
        except Moved:
            return ReadOutcome.MISSING

    def write(self, space: Space, key: BlockKey, parent: BlockKey, payload: memoryview) -> Written:
        """Write a block, in one transaction.

        The bytes counted are those of name, fields and values; what Redis adds to them is not.
        """
        (name,) = _names(space.digest, [key])
        header = pack(seal(space.raw, key, parent, payload))
        values = [memoryview(header), *_pieces(payload)]
        words = [word for index, value in enumerate(values) for word in (_field(index), value)]
        steps = [request(b"UNLINK", name), request(b"HSET", name, *words)]
        if self._options.ttl_seconds:
            steps.append(request(b"PEXPIRE", name, b"%d" % (self._options.ttl_seconds * 1000)))

        def attempt(deadline: Deadline) -> None:
            with self._layout.node(name, deadline).exchange(deadline) as exchange:
                whole = [request(b"MULTI"), *steps, request(b"EXEC")]
                exchange.send([piece for each in whole for piece in each], deadline)
                exchange.lines(1 + len(steps), deadline)
                if exchange.number(b"*", deadline) != len(steps):
                    raise Surprise("EXEC did not run what was queued")
                exchange.lines(len(steps), deadline)

        self._routed(attempt)
        return Written(len(name) + sum(map(len, words)), 0)

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
        layout = Cluster if self._options.cluster else OneNode
        return layout(self._place, self._access)

    def _routed(self, call: Callable[[Deadline], T]) -> T:
        """Make a call within its time, and once more if a slot turns out to have moved."""
        deadline = Deadline(self._clock, self._options.timeout_seconds)
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
                with node.blamed():
                    exchange = stack.enter_context(node.lent(deadline))
                    some = names if len(indexes) == gap else [names[index] for index in indexes]
                    exchange.send([_each(b"EXISTS", some)], deadline)
                asked.append((node, exchange, indexes))
            for node, exchange, indexes in asked:
                with node.blamed():
                    replies = exchange.lines(len(indexes), deadline)
                    if set(replies) - {b":0", b":1"}:
                        raise Surprise("EXISTS gave something else than 0 and 1")
                if b":0" in replies:
                    gap = min(gap, indexes[replies.index(b":0")])
        return gap

    def _read(
        self, space: Space, key: BlockKey, into: memoryview, deadline: Deadline
    ) -> ReadOutcome:
        (name,) = _names(space.digest, [key])
        try:
            with self._layout.node(name, deadline).exchange(deadline) as exchange:
                header = _fetch(exchange, name, space, key, into, deadline)
            if header is None:
                return ReadOutcome.MISSING
            verify(header, into[: header.stored_bytes])
        except RecordError:
            self._unlink([name], deadline)
            return ReadOutcome.CORRUPT
        return ReadOutcome.READ

    def _unlink(self, names: Sequence[bytes], deadline: Deadline) -> None:
        for node, indexes in self._layout.split(names, deadline).items():
            with node.exchange(deadline) as exchange:
                exchange.send([_each(b"UNLINK", [names[index] for index in indexes])], deadline)
                exchange.lines(len(indexes), deadline)


def _names(namespace: str, keys: Sequence[BlockKey]) -> list[bytes]:
    prefix = f"kvtier:{namespace}:"
    return [f"{prefix}{key.hex()}".encode() for key in keys]


def _batches(names: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(names), KEYS_AT_ONCE):
        yield names[start : start + KEYS_AT_ONCE]


def _field(index: int) -> bytes:
    return b"%d" % index


def _pieces(payload: memoryview) -> list[memoryview]:
    return [payload[start : start + PIECE_BYTES] for start in range(0, len(payload), PIECE_BYTES)]


def _each(command: bytes, names: Sequence[bytes]) -> bytes:
    """Return one request of `command` for each name."""
    head = b"*2\r\n$%d\r\n%b\r\n$" % (len(command), command)
    return b"".join([b"%b%d\r\n%b\r\n" % (head, len(name), name) for name in names])


def _fetch(
    exchange: Exchange,
    name: bytes,
    space: Space,
    key: BlockKey,
    into: memoryview,
    deadline: Deadline,
) -> Header | None:
    """Receive a record: its payload straight into `into`. Returns None if there is none.

    Nothing is received that does not have the length that is due. Raises RecordError.
    """
    pieces = len(_pieces(into))
    exchange.send(request(b"HMGET", name, *map(_field, range(1 + pieces))), deadline)
    if exchange.number(b"*", deadline) != 1 + pieces:
        raise Surprise("HMGET gave another number of values than it was asked for")
    size = exchange.number(b"$", deadline)
    if size < 0:
        _expect_nothing(exchange, pieces, deadline)
        return None
    page = memoryview(bytearray(HEADER_BYTES))
    _fill(exchange, page, size, deadline)
    header = unpack(page)
    expect(header, space.raw, key, space.payload_bytes)
    stored = _pieces(into[: header.stored_bytes])
    for piece in stored:
        _fill(exchange, piece, exchange.number(b"$", deadline), deadline)
    _expect_nothing(exchange, pieces - len(stored), deadline)
    return header


def _fill(exchange: Exchange, into: memoryview, size: int, deadline: Deadline) -> None:
    if size != len(into):
        raise RecordError(f"a value of {size} bytes where {len(into)} were due")
    exchange.fill(into, deadline)


def _expect_nothing(exchange: Exchange, count: int, deadline: Deadline) -> None:
    if any(line != b"$-1" for line in exchange.lines(count, deadline)):
        raise RecordError("values that no header tells of")


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
        if name == b"redis_version":
            if int(version.split(b".")[0]) >= OLDEST_VERSION:
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
