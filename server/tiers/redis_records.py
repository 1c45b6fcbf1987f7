"""How one record lies in Redis: its bytes on their way there and back.

The value is a string, the header (`codec.pack`) and the payload behind it. Redis gets several times
slower with strings of 8 MiB and more, so that a record of a larger payload than `WHOLE_BYTES` is a
hash: field `0` is its header, fields from `1` on are pieces of its payload as it is stored. Either
is written in one step, so that nobody ever reads parts of two.
"""

from __future__ import annotations

from typing import NamedTuple

from ..codec import HEADER_BYTES, Header, RecordError, expect, pack, unpack
from ..core import BlockKey
from .resp import Deadline, Exchange, Piece, Surprise, request

WHOLE_BYTES = 4 << 20
"""The largest payload that lies in one string. Redis copies fields of hashes, but not strings."""
PIECE_BYTES = (1 << 20) - 64
"""The most that one field of a hash holds. Redis' allocator gives it 1 MiB."""


class Wanted(NamedTuple):
    """What a header must say."""

    namespace: bytes
    key: BlockKey
    payload_bytes: int

    def header(self, page: bytes) -> Header:
        """Return the header if it is this block's. Raises RecordError."""
        header = unpack(page)
        expect(header, *self)
        return header


def write(
    exchange: Exchange,
    name: bytes,
    header: Header,
    stored: memoryview,
    ttl: bytes,
    deadline: Deadline,
) -> int:
    """Write a record that expires after `ttl` ms (never: `0`). Returns what its value takes."""
    how = _write_whole if header.payload_bytes <= WHOLE_BYTES else _write_pieces
    return how(exchange, name, pack(header), stored, ttl, deadline)


def fetch(
    exchange: Exchange, name: bytes, wanted: Wanted, into: memoryview, deadline: Deadline
) -> Header | None:
    """Receive a record: its stored payload straight into `into`. Returns None if there is none.

    Nothing is received that does not have the length that is due. Raises RecordError.
    """
    how = _fetch_whole if len(into) <= WHOLE_BYTES else _fetch_pieces
    return how(exchange, name, wanted, into, deadline)


def _write_whole(
    exchange: Exchange,
    name: bytes,
    header: bytes,
    stored: memoryview,
    ttl: bytes,
    deadline: Deadline,
) -> int:
    """Write a record as a string. Returns what its value takes."""
    words = (b"SET", name, (header, stored))
    expiry = () if ttl == b"0" else (b"PX", ttl)
    exchange.send(request(*words, *expiry), deadline)
    if exchange.lines(1, deadline) != [b"+OK"]:
        raise Surprise("SET did not say OK")
    return _allocated(len(header) + len(stored))


def _write_pieces(
    exchange: Exchange,
    name: bytes,
    header: bytes,
    stored: memoryview,
    ttl: bytes,
    deadline: Deadline,
) -> int:
    """Write a record as a hash, in one transaction. Returns what its values take."""
    values: list[Piece] = [header, *_pieces(stored)]
    words = [word for index, value in enumerate(values) for word in (_field(index), value)]
    steps = [request(b"UNLINK", name), request(b"HSET", name, *words)]
    if ttl != b"0":
        steps.append(request(b"PEXPIRE", name, ttl))
    whole = [request(b"MULTI"), *steps, request(b"EXEC")]
    exchange.send([piece for each in whole for piece in each], deadline)
    queued = exchange.lines(1 + len(steps), deadline)
    if queued != [b"+OK"] + [b"+QUEUED"] * len(steps):
        raise Surprise("MULTI did not queue what was sent")
    if exchange.number(b"*", deadline) != len(steps):
        raise Surprise("EXEC did not run what was queued")
    exchange.lines(len(steps), deadline)
    return sum(_allocated(len(value)) for value in values)


def _fetch_whole(
    exchange: Exchange, name: bytes, wanted: Wanted, into: memoryview, deadline: Deadline
) -> Header | None:
    """Receive a record that is a string."""
    exchange.send([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)], deadline)
    size = HEADER_BYTES + len(into)
    page = exchange.opening(b"$%d\r\n" % size, HEADER_BYTES, deadline)
    if not page:  # It is not there, or compressed, or something else.
        size = exchange.number(b"$", deadline)
        if size < 0:
            return None
        _expect_length(min(size, HEADER_BYTES), HEADER_BYTES)
        page = exchange.take(HEADER_BYTES, deadline)
    header = wanted.header(page)
    stored = into[: header.stored_bytes]
    _expect_length(size - HEADER_BYTES, len(stored))
    exchange.value(stored, deadline)
    return header


def _fetch_pieces(
    exchange: Exchange, name: bytes, wanted: Wanted, into: memoryview, deadline: Deadline
) -> Header | None:
    """Receive a record that is a hash."""
    pieces = len(_pieces(into))
    exchange.send(request(b"HMGET", name, *map(_field, range(1 + pieces))), deadline)
    if exchange.number(b"*", deadline) != 1 + pieces:
        raise Surprise("HMGET gave another number of values than it was asked for")
    size = exchange.number(b"$", deadline)
    if size < 0:
        _expect_nothing(exchange, pieces, deadline)
        return None
    page = bytearray(HEADER_BYTES)
    _fill_field(exchange, memoryview(page), size, deadline)
    header = wanted.header(bytes(page))
    stored = _pieces(into[: header.stored_bytes])
    for piece in stored:
        _fill_field(exchange, piece, exchange.number(b"$", deadline), deadline)
    _expect_nothing(exchange, pieces - len(stored), deadline)
    return header


def _fill_field(exchange: Exchange, into: memoryview, size: int, deadline: Deadline) -> None:
    _expect_length(size, len(into))
    exchange.value(into, deadline)


def _expect_length(size: int, due: int) -> None:
    if size != due:
        raise RecordError(f"a value of {size} bytes where {due} were due")


def _expect_nothing(exchange: Exchange, count: int, deadline: Deadline) -> None:
    if any(line != b"$-1" for line in exchange.lines(count, deadline)):
        raise RecordError("values that no header tells of")


def _field(index: int) -> bytes:
    return b"%d" % index


def _allocated(size: int) -> int:
    """Return what a string takes: the allocator has four sizes between two powers of two."""
    size += 16  # The string's own head and end.
    step = 1 << max(4, (size - 1).bit_length() - 3)
    return -(-size // step) * step


def _pieces(payload: memoryview) -> list[memoryview]:
    return [payload[start : start + PIECE_BYTES] for start in range(0, len(payload), PIECE_BYTES)]
