"""Lower tiers whose records lie in a dict, and whose jobs run when a test says so."""

from __future__ import annotations

from kvtier.codec import Codec
from kvtier.core import Fault, ReadOutcome
from kvtier.tiers.base import Held, Listing, RecordStore, TierFault, Written
from kvtier.tiers.compression import Coded
from kvtier.tiers.pool import Job


class DictStore(RecordStore):
    """Records in a dict. `next_fault` is what the next read or write does instead."""

    def __init__(self, tier, listed):
        self.tier = tier
        self.listed = listed
        self.records = {}
        self.wrong = 0
        """Writes of other bytes than were committed: an assertion would be the tier's fault."""
        self.next_fault = None

    def open(self):
        pass

    def scan(self):
        shelves = {}
        for namespace, key in self.records if self.listed else ():
            shelves.setdefault((namespace, key[0]), []).append(Held(key, 2 * 4096, 0.0))
        for (namespace, first), records in shelves.items():
            yield Listing(namespace, first, records, 0)

    def find(self, space, keys):
        self._fail()
        found = [(space.digest, key) in self.records for key in keys]
        return ([*found, False]).index(False)

    def read(self, space, key, into, report):
        fault = self._fail()
        if isinstance(fault, ReadOutcome):
            self.records.pop((space.digest, key), None)
            return fault
        if (space.digest, key) not in self.records:
            return ReadOutcome.MISSING
        into[:], coded = self.records[space.digest, key]
        if coded.raw_bytes:
            report(coded)
        return ReadOutcome.READ

    def write(self, space, key, parent, payload, codec):
        self._fail()
        self.wrong += bytes(payload[:32]) != key
        coded = Coded() if codec is Codec.RAW else Coded(len(payload), len(payload) // 2, 1e-6)
        self.records[space.digest, key] = bytes(payload), coded
        return Written(2 * 4096, 0, coded)

    def drop(self, namespace, keys):
        for key in keys:
            self.records.pop((namespace, key), None)

    def wipe(self, namespace):
        for one in [one for one in self.records if one[0] == namespace]:
            del self.records[one]

    def close(self):
        pass

    def _fail(self):
        fault, self.next_fault = self.next_fault, None
        if isinstance(fault, Fault):
            raise TierFault(fault, "on purpose")
        return fault


class ManualPool:
    """A pool whose jobs run when `run` is called."""

    def __init__(self):
        self.jobs = []
        self.begun = []

    def submit(self, urgency, work, done):
        self.jobs.append(Job(urgency, work, done))
        return self.jobs[-1]

    def cancel(self, job):
        if job not in self.jobs:
            return False
        self.jobs.remove(job)
        return True

    def run(self, which):
        """Do a job's work now, and hand its result over with `hand_over`."""
        job = self.jobs.pop(which % len(self.jobs))
        job.run()
        self.begun.append(job)

    def hand_over(self):
        while self.begun:
            job = self.begun.pop(0)
            job.done(job)

    def oldest_seconds(self):
        return 0.0

    def close(self):
        self.jobs.clear()


class Timers:
    """Calls that are made when `fire` is called."""

    def __init__(self):
        self.calls = []

    def later(self, seconds, call):
        timers = self

        class Timer:
            def cancel(self):
                timers.calls = [one for one in timers.calls if one[0] is not self]

        timer = Timer()
        self.calls.append((timer, call))
        return timer

    def fire(self):
        if self.calls:
            self.calls.pop(0)[1]()
