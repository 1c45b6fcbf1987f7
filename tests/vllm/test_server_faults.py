"""The server dies, freezes or is too small while an engine serves: no answer changes.

The moments of a copy are in test_equality.py; here are those of a lookup, and long ones.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from faulty import corrupting
from harness import BLOCK, BLOCK_BYTES, no_leaks, prompt
from support import until

DECODE = 24
DEADLINE_MS = 250
BACK_SECONDS = 30.0
"""Longest wait for hits after a server is there again."""
FROZEN_SECONDS = 30.0
"""Longer than several first exchanges of the connecting thread may take."""


class Site:
    """One engine and the server at its socket, which comes and goes."""

    def __init__(self, lab):
        self._lab = lab
        self.server = self.start()
        self.engine = lab.local_engine(self.server.socket, {"deadline_ms": DEADLINE_MS})

    def start(self, *options):
        """Start a server, on the socket of the one before."""
        self.server = self._lab.server(*options, name="site")
        return self.server

    def send(self, number):
        os.kill(self.server.child.pid, number)

    def stopped(self):
        """Return whether the server is frozen."""
        status = Path(f"/proc/{self.server.child.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def hits_are_back(self, asked, right):
        """Wait until the whole prompt comes from the server, with the right answer."""

        def hits():
            self.engine.forget()
            got = self.engine.complete(asked, DECODE)
            assert got.tokens == right
            return got.cached == (len(asked) - 1) // BLOCK * BLOCK

        until(hits, "hits from the server that is back", BACK_SECONDS)
        self.engine.forget()
        no_leaks(self.server, self.engine)


@pytest.fixture(scope="module")
def site(module_lab):
    return Site(module_lab)


def tokens(answers):
    return [each.tokens for each in answers]


def test_a_corrupted_block_changes_the_answer(site, plain):
    """So that the comparisons below mean something."""
    asked = prompt(1, 5 * BLOCK + 3)
    cold = plain.complete(asked, DECODE)
    site.engine.complete(asked, DECODE)
    site.engine.forget()
    with corrupting(site.engine, "slice(2, 3)"):
        damaged = site.engine.complete(asked, DECODE)
    assert damaged.cached == 5 * BLOCK
    assert damaged.tokens != cold.tokens
    site.engine.forget_all()


AT_A_LOOKUP = """
import os
from kvtier.client import Client
plain_lookup = Client.lookup

def lookup(self, *asked):
    Client.lookup = plain_lookup
    if {moment!r} == "before":
        os.kill({pid}, {number})
    found = plain_lookup(self, *asked)
    if {moment!r} == "after":
        os.kill({pid}, {number})
    return found

Client.lookup = lookup
result = None
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_server_lost_at_a_lookup_changes_no_answer(moment, number, site, plain):
    asked = [prompt(10 + n, 4 * BLOCK + n) for n in range(6)]
    cold = tokens(plain.complete_all(asked, DECODE))
    site.engine.complete_all(asked, DECODE)
    site.engine.forget()
    site.hits_are_back(asked[1], cold[1])
    code = AT_A_LOOKUP.format(moment=moment, pid=site.server.child.pid, number=int(number))
    site.engine.run(code)
    lost = site.engine.complete_all(asked, DECODE)
    assert tokens(lost) == cold
    if moment == "before":
        assert lost[0].cached == 0
    if number == signal.SIGSTOP:
        assert site.stopped()
        site.send(signal.SIGCONT)
    else:
        until(lambda: site.server.child.exit_code() is not None, "the server's death")
        site.start()
    site.hits_are_back(asked[1], cold[1])


def test_while_a_server_is_frozen_one_call_waits_and_no_other(site, plain):
    asked = [prompt(20 + n, 4 * BLOCK + n) for n in range(6)]
    cold = tokens(plain.complete_all(asked, DECODE))
    site.engine.complete_all(asked, DECODE)
    site.engine.forget()
    before = site.engine.counters()
    site.send(signal.SIGSTOP)
    end = time.monotonic() + FROZEN_SECONDS
    while time.monotonic() < end:
        assert tokens(site.engine.complete_all(asked, DECODE)) == cold
        site.engine.forget()
    assert site.stopped()
    after = site.engine.counters()
    assert after["misses:deadline"] - before["misses:deadline"] == 1
    assert after["misses:absent"] - before["misses:absent"] == 0, "absent servers are not asked"
    site.send(signal.SIGCONT)
    site.hits_are_back(asked[1], cold[1])


def test_a_prompt_larger_than_the_whole_host_tier_is_answered_and_leaves_nothing(site, plain):
    site.send(signal.SIGKILL)
    until(lambda: site.server.child.exit_code() is not None, "the server's death")
    slots = 16
    site.start("--capacity", f"{slots * BLOCK_BYTES >> 10}KiB")
    short, asked = prompt(30, 2 * BLOCK + 1), prompt(31, 40 * BLOCK + 3)
    site.hits_are_back(short, plain.complete(short, DECODE).tokens)
    cold = plain.complete(asked, DECODE)
    for _ in range(3):
        got = site.engine.complete(asked, DECODE)
        assert got.tokens == cold.tokens
        assert got.cached <= slots * BLOCK
        site.engine.forget()
        no_leaks(site.server, site.engine)
    assert got.cached, "the head of the prompt found no place"
    host = json.loads(site.server.get("/v1/tiers/host"))["host"]
    assert sum(host["slots"].values()) == slots
