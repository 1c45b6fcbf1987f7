"""The exchange with a server, byte by byte: replies that come in any parts, and calls that end."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from kvtier.codec import HEADER_BYTES, Codec, RecordError, pack, seal
from kvtier.tiers.redis_records import Wanted, fetch
from kvtier.tiers.resp import LIMIT_SLACK, Deadline, Exchange, Late, Refusal, Surprise
from support import until

NAMESPACE, KEY = b"n" * 32, b"k" * 32
PAYLOAD = bytes(range(256)) * 16
NOTHING = b"$-1\r\n"
LATE_AT_MOST = 0.25
"""Seconds that another process may keep a thread from running."""


def reply(stored: bytes = PAYLOAD, codec: Codec = Codec.RAW) -> bytes:
    """Return Redis' reply to GET of a record, of a payload as it is stored."""
    header = seal(NAMESPACE, KEY, b"", memoryview(stored), codec, len(PAYLOAD), codec.value)
    return b"$%d\r\n%b%b\r\n" % (HEADER_BYTES + len(stored), pack(header), stored)


WHOLE, SHRUNK = reply(), reply(PAYLOAD[:3000], Codec.SHUFFLE_ZSTD)
OPENING = WHOLE.index(b"\n") + 1 + HEADER_BYTES
"""Bytes before a raw payload."""


@pytest.fixture
def ends():
    """An exchange and the server's socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Exchange(ours), ours, theirs


def unread(sock: socket.socket) -> int:
    """Return how many bytes lie in a socket."""
    return struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0]


def soon() -> Deadline:
    return Deadline(time.monotonic, 20)


def got(exchange: Exchange, slot: bytearray):
    """Return the header that a read of the record gives."""
    wanted = Wanted(NAMESPACE, KEY, len(PAYLOAD))
    return fetch(exchange, b"name", wanted, memoryview(slot), soon())


def parts(whole, cuts):
    """Return the parts of bytes that are cut at these places."""
    places = [0, *(at % len(whole) for at in cuts), len(whole)]
    return [whole[start:end] for start, end in pairwise(places)]


def say(pieces, ours, theirs):
    """Send each piece when the one before was received."""
    theirs.recv(1000)
    for piece in pieces:
        theirs.sendall(piece)
        until(lambda: unread(ours) == 0, "a receive", 10)


@pytest.mark.parametrize("whole", [WHOLE, SHRUNK], ids=["raw", "compressed"])
@pytest.mark.parametrize(
    "cuts",
    [
        *([at] for at in (1, 5, 6, 7, 8, OPENING - 1, OPENING, OPENING + 1, 2000, -2, -1)),
        [1, 7, 8, 9, 100, OPENING, OPENING + 1, -3, -1],
    ],
)
def test_a_record_is_read_however_its_reply_is_cut(ends, whole, cuts):
    exchange, ours, theirs = ends
    slot = bytearray(len(PAYLOAD))
    with ThreadPoolExecutor(1) as pool:
        saying = pool.submit(say, parts(whole, cuts), ours, theirs)
        header = got(exchange, slot)
        saying.result()
    assert slot[: header.stored_bytes] == PAYLOAD[: header.stored_bytes]
    assert not any(slot[header.stored_bytes :])
    assert exchange.clean


@pytest.mark.parametrize("cuts", [[], [1], [3], [4]])
def test_a_record_that_is_not_there_leaves_a_clean_exchange(ends, cuts):
    exchange, ours, theirs = ends
    with ThreadPoolExecutor(1) as pool:
        saying = pool.submit(say, parts(NOTHING, cuts), ours, theirs)
        assert got(exchange, bytearray(len(PAYLOAD))) is None
        saying.result()
    assert exchange.clean


def test_no_byte_of_a_payload_is_received_before_its_header_was_checked(ends):
    exchange, ours, theirs = ends
    foreign = seal(NAMESPACE, b"x" * 32, b"", memoryview(PAYLOAD))
    theirs.sendall(WHOLE[: OPENING - HEADER_BYTES] + pack(foreign) + PAYLOAD + b"\r\n")
    slot = bytearray(len(PAYLOAD))
    with pytest.raises(RecordError, match="another block's"):
        got(exchange, slot)
    assert not any(slot)
    assert unread(ours) == len(PAYLOAD) + 2


def test_a_value_of_another_length_than_it_says_is_a_surprise(ends):
    exchange, _, theirs = ends
    theirs.sendall(WHOLE[:-2] + b"more\r\n")
    with pytest.raises(Surprise, match="longer"):
        got(exchange, bytearray(len(PAYLOAD)))


def test_an_error_in_place_of_a_record_is_a_refusal(ends):
    exchange, _, theirs = ends
    theirs.sendall(b"-MOVED 1 elsewhere:6379 %b\r\n" % (b"and a long tail" * 20))
    with pytest.raises(Refusal) as caught:
        got(exchange, bytearray(len(PAYLOAD)))
    assert caught.value.code == "MOVED"


def test_what_came_before_it_was_asked_for_is_no_record(ends):
    exchange, _, theirs = ends
    theirs.sendall(b"+OK\r\n" + WHOLE)
    assert exchange.lines(1, soon()) == [b"+OK"]
    with pytest.raises(Surprise, match="not asked for"):
        got(exchange, bytearray(len(PAYLOAD)))


@pytest.mark.parametrize("before", [20.0, 0.03, 0.03 + LIMIT_SLACK])
def test_a_call_ends_in_its_own_time_whatever_time_the_call_before_had(ends, before):
    exchange, _, theirs = ends
    theirs.sendall(b"+OK\r\n")
    exchange.lines(1, Deadline(time.monotonic, before))
    began = time.monotonic()
    with pytest.raises(Late):
        exchange.lines(1, Deadline(time.monotonic, 0.03))
    assert 0.03 <= time.monotonic() - began < 0.03 + LIMIT_SLACK + LATE_AT_MOST


def test_a_call_has_its_whole_time_though_the_call_before_had_less(ends):
    exchange, _, theirs = ends
    theirs.sendall(b"+OK\r\n")
    exchange.lines(1, Deadline(time.monotonic, 0.02))
    later = threading.Timer(0.1, theirs.sendall, [b"+later\r\n"])
    later.start()
    assert exchange.lines(1, soon()) == [b"+later"]
    later.join()
