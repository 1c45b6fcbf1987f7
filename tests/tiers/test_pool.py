"""The threads of a lower tier: who goes first, who waits for whom, and how results come back."""

from __future__ import annotations

import queue
import threading

import pytest
from kvtier.tiers.pool import RESULTS_AT_ONCE, Pool, Urgency
from support import until


class Bench:
    """A pool whose results are handed over by `turn`, as an event loop would."""

    def __init__(self, threads):
        self.posted = queue.SimpleQueue()
        self.pool = Pool("test", threads, self.posted.put)
        self.gates = []
        self.begun = []
        self.done = []
        self._lock = threading.Lock()

    def submit(self, urgency, name, waits=False):
        gate = threading.Event()
        self.gates.append(gate)

        def work():
            with self._lock:
                self.begun.append(name)
            if waits:
                gate.wait(20)
            return name

        return gate, self.pool.submit(urgency, work, lambda job: self.done.append(job.result))

    def turn(self):
        """Make one call of those that were posted."""
        self.posted.get(timeout=20)()

    def until_done(self, count):
        until(lambda: self.posted.empty() or self.turn() or len(self.done) >= count, "results")
        while len(self.done) < count:
            self.turn()

    def close(self):
        for gate in self.gates:
            gate.set()
        self.pool.close()


@pytest.fixture
def bench():
    opened = []

    def make(threads):
        opened.append(Bench(threads))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_a_burst_uses_all_threads_though_one_was_idle(bench):
    one = bench(4)
    one.submit(Urgency.REQUEST, "first")
    one.until_done(1)
    until(lambda: one.pool._idle == 1, "an idle thread")
    for number in range(4):
        one.submit(Urgency.REQUEST, number, waits=True)
    until(lambda: len(one.begun) == 5, "all four at once")


def test_one_thread_is_always_left_for_reads(bench):
    one = bench(3)
    gates = [one.submit(Urgency.WRITE, f"write {n}", waits=True)[0] for n in range(2)]
    gates.append(one.submit(Urgency.UPKEEP, "scan", waits=True)[0])
    until(lambda: len(one.begun) == 2, "two of them")
    one.submit(Urgency.REQUEST, "read")
    one.until_done(1)
    assert one.done == ["read"]
    gates[0].set()
    until(lambda: "scan" in one.begun, "what was held back")


def test_the_more_urgent_goes_first(bench):
    one = bench(2)
    gate, _ = one.submit(Urgency.REQUEST, "busy", waits=True)
    other, _ = one.submit(Urgency.REQUEST, "busy too", waits=True)
    until(lambda: len(one.begun) == 2, "both threads")
    for urgency in (Urgency.WRITE, Urgency.UPKEEP, Urgency.PREFETCH, Urgency.REQUEST):
        one.submit(urgency, urgency.name)
    gate.set()
    one.until_done(5)
    assert one.begun[2:] == ["REQUEST", "PREFETCH", "UPKEEP", "WRITE"]
    other.set()


def test_a_job_can_be_taken_back_until_it_begins(bench):
    one = bench(2)
    gate, running = one.submit(Urgency.REQUEST, "running", waits=True)
    other, _ = one.submit(Urgency.REQUEST, "running too", waits=True)
    _, queued = one.submit(Urgency.REQUEST, "queued")
    until(lambda: len(one.begun) == 2, "both threads")
    assert one.pool.cancel(queued)
    assert not one.pool.cancel(running)
    gate.set()
    other.set()
    one.until_done(2)
    assert "queued" not in one.begun


def test_results_come_some_at_a_time(bench):
    one = bench(2)
    for number in range(3 * RESULTS_AT_ONCE):
        one.submit(Urgency.REQUEST, number)
    until(lambda: len(one.pool._finished) == 3 * RESULTS_AT_ONCE, "the work")
    for turns in range(1, 4):
        one.turn()
        assert len(one.done) == turns * RESULTS_AT_ONCE


def test_only_a_read_or_write_that_does_not_come_back_is_told(bench):
    one = bench(3)
    one.submit(Urgency.UPKEEP, "scan", waits=True)
    until(lambda: one.begun, "the scan")
    assert one.pool.oldest_seconds() == 0.0
    one.submit(Urgency.REQUEST, "read", waits=True)
    until(lambda: one.pool.oldest_seconds() > 0.0, "the read")


def test_what_comes_back_after_the_end_is_left_alone(bench):
    one = bench(2)
    one.submit(Urgency.REQUEST, "late")
    until(lambda: not one.posted.empty(), "the result")
    one.pool.close()
    one.turn()
    assert one.done == []
