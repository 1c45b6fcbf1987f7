"""Rubbish on the socket: no frame crashes the server or disturbs another session."""

from __future__ import annotations

import contextlib
import random
import socket

import msgspec
import pytest
from kvtier import protocol as wire
from kvtier.core import Role
from support import MANIFEST, chain, until

SEED = 20_261_130
KEYS = chain("kept", 8)
NO_SLOT = 2**64 - 1
"""What a session says to be unreadable: it may drop what it leases, as the witness's blocks."""


def hello(rng):
    return wire.Hello(
        wire.PROTOCOL_VERSION, rng.choice(list(Role)), "fuzz", 0, MANIFEST, rng.random() < 0.5
    )


def good_frame(rng, keys):
    some = b"".join(rng.sample(keys, rng.randint(0, 8)))
    number = rng.choice([0, 1, 7, 63, 1 << 24, 1 << 40, -1])
    return rng.choice(
        [
            lambda: hello(rng),
            lambda: wire.Lookup(number, some, rng.randint(-1, 9), "t" * rng.choice([0, 1, 129])),
            lambda: wire.Step(
                number,
                commits=[wire.Chain(rng.choice([b"", *keys]), some, [number] * rng.randint(0, 8))],
                aborts=[number],
                releases=[number],
                touches=[some],
                need=rng.randint(-1, 70),
                stock=rng.randint(0, 70),
                asked=[wire.Asked("t", 3, rng.randint(-1, 3), 0)],
                unreadable=[NO_SLOT],
                settled=rng.random() < 0.5,
            ),
            lambda: wire.MapSlab(number, number),
            wire.Bye,
        ]
    )()


def harmless(rng, keys):
    """A frame that leaves its session open, so that what follows it is read as well."""
    some = b"".join(rng.sample(keys, rng.randint(0, 8)))
    touches = [b"".join(rng.sample(keys, 3))]
    return rng.choice(
        [
            wire.Lookup(rng.randrange(2**63), some, 0, rng.choice("rst")),
            wire.Step(rng.randrange(2), aborts=[7], touches=touches, need=rng.randrange(70)),
            wire.Step(0, unreadable=[NO_SLOT], releases=[7], asked=[wire.Asked("t", 3, 2, 1)]),
            wire.MapSlab(2, rng.randrange(20)),
        ]
    )


def mutated(rng, data):
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        where = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[where] = rng.randrange(256)
            case 1:
                del data[where:]
                data += b"\x00"
            case 2:
                data[where:where] = rng.randbytes(rng.randint(1, 9))
            case _:
                data[where] ^= 1 << rng.randrange(8)
    return bytes(data)


def rubbish(rng, keys):
    match rng.randrange(5):
        case 0:
            return rng.randbytes(rng.randint(1, 64))
        case 1:
            body = rng.randbytes(rng.randint(0, 64))
            return len(body).to_bytes(4, "big") + body
        case 2:
            body = msgspec.msgpack.encode([rng.choice(["step", "lookup", "x"]), [[]] * 3, 2**63])
            return len(body).to_bytes(4, "big") + body
        case 3:
            return wire.encode(good_frame(rng, keys))
        case _:
            return mutated(rng, wire.encode(good_frame(rng, keys)))


@pytest.mark.slow
def test_100_000_frames_of_rubbish_disturb_nobody(plane, clients):
    send_rubbish(plane, clients, 100_000)


def test_a_tenth_of_that_disturbs_nobody(plane, clients):
    send_rubbish(plane, clients, 10_000)


def send_rubbish(plane, clients, count):
    rng = random.Random(SEED)
    print("seed", SEED)
    witness = clients(engine="witness", deadline=5.0)
    slots = witness.step(wire.Step(0, need=8)).slots
    witness.send(wire.Step(0, commits=[wire.Chain(b"", b"".join(KEYS), slots)]))
    assert witness.lookup(b"".join(KEYS), 0).slots == slots
    keys = [*KEYS, *chain("fuzzed", 8)]
    sent = connections = 0
    while sent < count:
        connections += 1
        # What comes after a frame that closes the session is never read: one of them, and last.
        frames = [wire.encode(hello(rng))] if rng.random() < 0.9 else []
        frames += [wire.encode(harmless(rng, keys)) for _ in range(rng.randrange(3))] * bool(frames)
        frames.append(rubbish(rng, keys))
        sent += len(frames)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(plane.path))  # Blocks while the backlog is full.
            sock.settimeout(20)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(b"".join(frames))
                # A server that can't send its replies any more would not read the rest either.
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
        if connections % 250 == 0:
            found = witness.lookup(b"".join(KEYS), 0)
            assert found is not None, "the witness is served"
            assert found.slots == slots, "its leased blocks stay"
    until(lambda: len(plane.do(plane.readings.sessions)) == 1, "the end of all sessions but one")
    assert plane.closes("error") == 0, "no frame ran into an unforeseen error"
    assert plane.closes("malformed") > count // 50
    assert plane.closes("oversized") > count // 5000


@pytest.mark.parametrize("size", [wire.MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_an_oversized_frame_is_refused_before_it_is_read(plane, size):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(str(plane.path))
        sock.sendall(size.to_bytes(4, "big") + b"x")
        assert sock.recv(1) == b""
    assert plane.closes("oversized") == 1


def test_a_frame_may_come_byte_by_byte(plane):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(str(plane.path))
        for byte in wire.encode(hello(random.Random(1))):
            sock.sendall(bytes([byte]))
        size = int.from_bytes(sock.recv(4), "big")
        assert isinstance(wire.decode_reply(sock.recv(size)), wire.Welcome)
