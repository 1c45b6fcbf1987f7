"""Clients of a data plane."""

from __future__ import annotations

import logging

import pytest
from kvtier.client import Client, ClientOptions
from kvtier.core import Role
from kvtier.protocol import PROTOCOL_VERSION, Hello
from support import MANIFEST

LOG = logging.getLogger("test.client")


@pytest.fixture
def clients(plane):
    """A factory of clients of `plane`; each is closed at the end."""
    opened = []

    def connect(**options):
        opened.append(plane.client(**options))
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


@pytest.fixture
def connect_to():
    """A factory of clients of a real server."""
    opened = []

    def connect(server, role=Role.SCHEDULER, engine="engine", manifest=MANIFEST, **options):
        hello = Hello(PROTOCOL_VERSION, role, engine, 0, manifest)
        opened.append(Client(ClientOptions(server.socket, **options), hello, LOG))
        opened[-1].start()
        return opened[-1]

    yield connect
    for client in opened:
        client.close()
