"""The client's promises: it never raises, never waits past a deadline, and comes back by itself."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time

import pytest
from kvtier import protocol as wire
from kvtier.client import Client, ClientOptions
from kvtier.core import Role
from kvtier.link import trusted
from support import MANIFEST, chain, until

LOG = logging.getLogger("test.client")
KEY = chain("document", 1)[0]
HELLO = wire.Hello(wire.PROTOCOL_VERSION, Role.SCHEDULER, "engine", 0, MANIFEST)
SLACK = 0.5
"""Seconds beyond a deadline that a busy machine may take to run us again."""


class Impostor:
    """Says hello properly, then answers everything with `answer` (or never)."""

    def __init__(self, path, answer: bytes | None):
        self.answer = answer
        self.hellos = 0
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.sockets = []
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.sockets.append(sock)
            sock.recv(1 << 16)
            self.hellos += 1
            sock.sendall(wire.encode(wire.Welcome(self.hellos, "impostor", 0, [], 4096)))
            if self.answer is not None:
                sock.recv(1 << 16)
                sock.sendall(self.answer)

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(5)
        for sock in self.sockets:
            sock.close()


@pytest.fixture
def connect(tmp_path):
    opened = []

    def start(**options):
        client = Client(ClientOptions(tmp_path / "k.sock", **options), HELLO, LOG)
        client.start()
        opened.append(client)
        return client

    yield start
    for client in opened:
        client.close()


def test_without_a_server_every_call_is_a_counted_miss(connect):
    client = connect()
    assert client.meet() is None
    assert client.lookup(KEY, 0) is None
    assert client.step(wire.Step(0, need=1)) is None
    assert client.map_slab(0) is None
    assert client.grants() == []
    assert not client.send(wire.Bye())
    assert client.failures["absent"] == 3


def test_a_server_that_comes_later_is_found(connect, planes):
    client = connect()
    assert client.meet() is None
    planes()
    until(lambda: client.meet() is not None, "the connection")
    assert client.lookup(KEY, 0).slots == []


def test_a_server_that_is_long_in_coming_is_looked_for_as_often_as_at_first(connect, planes):
    """Growing pauses would let the first requests after a restart miss what lies on disk."""
    client = connect(pause_first=0.02, pause_most=10.0)
    tries = []
    look = client._try_connect
    client._try_connect = lambda: tries.append(client._pause) or look()
    until(lambda: len(tries) >= 8, "eight tries")
    assert set(tries) == {0.04}, "each was the first try after the one before"
    planes()
    until(lambda: client.meet() is not None, "the connection")


@pytest.mark.parametrize("deadline", [0.05, 0.3])
def test_a_silent_server_costs_one_deadline_and_then_nothing(tmp_path, connect, deadline):
    silent = Impostor(tmp_path / "k.sock", None)
    client = connect(deadline=deadline, pause_first=5.0)
    began = time.monotonic()
    assert client.lookup(KEY, 0) is None
    assert deadline <= time.monotonic() - began < deadline + SLACK
    assert client.failures["deadline"] == 1
    began = time.monotonic()
    for _ in range(100):
        assert client.lookup(KEY, 0) is None
    assert time.monotonic() - began < SLACK
    silent.close()


def test_a_server_that_greets_and_never_answers_is_asked_ever_more_rarely(tmp_path, connect):
    silent = Impostor(tmp_path / "k.sock", None)
    client = connect(deadline=0.01, pause_first=0.02, pause_most=10.0)
    pauses = []
    for _ in range(5):
        until(lambda: client.meet() is not None, "the next try")
        assert client.lookup(KEY, 0) is None
        pauses.append(client._pause)
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 8 * pauses[0]
    silent.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x00\x00\x03abc",
        b"\xff\xff\xff\xff",
        wire.encode(wire.Found(999, [], [])),
        wire.encode(wire.Granted(1, [])),
        wire.encode(wire.Welcome(1, "", 0, [], 1)),
        b"\x00",
    ],
)
def test_a_wrong_answer_is_a_miss_and_drops_the_connection(tmp_path, connect, answer):
    wrong = Impostor(tmp_path / "k.sock", answer)
    client = connect(deadline=0.2, pause_first=5.0)
    assert client.lookup(KEY, 0) is None
    assert client.meet() is None
    assert client.failures.total() == 1
    wrong.close()


def test_a_restarted_server_is_a_new_session(connect, planes):
    first = planes()
    client = connect(pause_first=0.02)
    before = client.meet()
    first.stop()
    assert client.lookup(KEY, 0) is None
    assert client.failures["disconnect"] == 1
    planes()
    until(lambda: client.meet() is not None, "the new session")
    assert client.meet().server != before.server


def test_a_client_that_rests_is_connected_to_the_next_server_before_it_asks(connect, planes):
    first = planes()
    client = connect(pause_first=0.02)
    before = client.meet()
    first.stop()
    planes()
    until(lambda: client._ready is not None, "the new connection")
    assert client.meet().server != before.server
    assert client.lookup(KEY, 0).slots == [], "no call was lost"
    assert client.failures["disconnect"] == 1


def test_sessions_change_only_when_met(connect, planes):
    plane = planes()
    client = connect(pause_first=0.01)
    plane.do(lambda: [each.close("error") for each in list(plane.plane.open)])
    assert client.lookup(KEY, 0) is None
    until(lambda: client._ready is not None, "the connection in waiting")
    assert client.lookup(KEY, 0) is None, "the old session is over and the new not met"
    assert client.meet() is not None
    assert client.lookup(KEY, 0).slots == []


def test_stock_is_picked_up_without_waiting(connect, planes):
    planes()
    client = connect()
    assert client.send_step(wire.Step(0, stock=8))
    got = []
    until(lambda: got.extend(client.grants()) or len(got) == 8, "the stock")
    assert client.step(wire.Step(0, need=1)).slots
    client.send_step(wire.Step(0, aborts=got[:4], stock=8))
    assert client.lookup(KEY, 0).slots == [], "a grant on the way is kept for later"
    assert client.grants()


def test_changes_that_come_before_a_reply_are_kept(tmp_path, connect):
    changed = [wire.Changed(whole=True), wire.Changed(removed=KEY)]
    answers = b"".join(map(wire.encode, [changed[0], wire.Found(1, [7], []), changed[1]]))
    told = Impostor(tmp_path / "k.sock", answers)
    client = connect()
    assert client.lookup(KEY, 0).slots == [7]
    assert client.changes() == changed
    assert client.changes() == []
    assert client.failures.total() == 0
    told.close()


def test_a_frozen_server_is_left_alone_and_taken_up_again(serve, connect_to):
    server = serve().ready()
    client = connect_to(server, deadline=0.1, pause_first=0.02)
    assert client.lookup(KEY, 0).slots == []
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(20):
            client.meet()
            assert client.lookup(KEY, 0) is None
        assert time.monotonic() - began < 20 * 0.1 + SLACK
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    until(lambda: client.meet() and client.lookup(KEY, 0), "the thawed server")


def test_another_users_server_is_trusted_only_where_not_everyone_may_write(tmp_path):
    """Someone else could have made the folder in /tmp first, and answer in the server's place."""
    other = os.geteuid() + 12345
    assert trusted(os.geteuid(), [tmp_path])
    for mode, expected in ((0o755, True), (0o777, False), (0o1777, False)):
        tmp_path.chmod(mode)
        assert trusted(other, [tmp_path]) is expected


def test_a_second_answer_is_kept_only_while_somebody_wants_it(connect, planes):
    planes()
    client = connect()
    link = client._link
    for lease in (7, 8):
        link.awaited.add(lease)
    client.abandon(8)
    for lease in (7, 8, 9):
        link._keep(wire.Found(lease, [lease]))
    assert client.answer(8) is None
    assert client.answer(7).slots == [7]
    assert client.answer(7) is None
    assert not link.found
    assert not link.awaited
