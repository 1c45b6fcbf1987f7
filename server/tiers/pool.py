"""The threads of one lower tier: a bounded pool in which reads go first.

Jobs are posted and their results are taken on the event loop; the work itself runs in a thread and
touches nothing but the bytes that it was given. One thread is always kept for reads, so that a
read waits for one other at most. A thread that hangs in the kernel hangs alone: nothing here
waits for it, and it does not keep the process alive.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, TypeVar

T = TypeVar("T")

RESULTS_AT_ONCE = 16
"""Results that are handed over in one turn of the loop, so that it is not held for long."""


class Urgency(IntEnum):
    """Who waits for a job. The lower goes first."""

    REQUEST = 0
    """A request that an engine has asked for."""
    PREFETCH = 1
    UPKEEP = 2
    """Nobody: getting ready, looking through the medium, removing. Takes as long as it takes."""
    WRITE = 3


class Job(Generic[T]):
    """One piece of work. `done` is called on the loop with its result, unless it was cancelled."""

    __slots__ = ("done", "error", "result", "seconds", "started", "urgency", "work")

    def __init__(
        self, urgency: Urgency, work: Callable[[], T], done: Callable[[Job[T]], object]
    ) -> None:
        self.urgency = urgency
        self.work: Callable[[], T] | None = work
        self.done = done
        self.result: T | None = None
        self.error: Exception | None = None
        self.started = 0.0
        self.seconds = 0.0

    def run(self) -> None:
        """Do the work, in a thread. What it raises is the job's result too."""
        self.started = time.monotonic()
        assert self.work is not None, "a job runs once"
        try:
            self.result = self.work()
        except Exception as error:  # noqa: BLE001  # The top of a thread; `done` deals with it.
            self.error = error
        self.work = None
        self.seconds = time.monotonic() - self.started


class Pool:
    """Threads that are started when there is work for them, `threads` at most.

    `post` hands a call to the event loop from any thread.
    """

    def __init__(
        self, name: str, threads: int, post: Callable[[Callable[[], None]], object]
    ) -> None:
        assert threads > 1, "one thread is kept for reads"
        self._name = name
        self._most = threads
        self._post = post
        self._changed = threading.Condition()
        # Guarded by the condition:
        self._queues: dict[Urgency, deque[Job[object]]] = {each: deque() for each in Urgency}
        self._running: set[Job[object]] = set()
        self._threads = 0
        self._idle = 0
        self._closed = False
        self._finished: deque[Job[object]] = deque()
        self._posted = False

    def submit(
        self, urgency: Urgency, work: Callable[[], T], done: Callable[[Job[T]], object]
    ) -> Job[T]:
        """Queue a job. Its caller bounds how many there are."""
        job = Job(urgency, work, done)
        with self._changed:
            assert not self._closed, "the pool takes jobs until it is closed"
            self._queues[urgency].append(job)  # type: ignore[arg-type]
            self._changed.notify()
            # A thread that was woken counts as idle until it runs, and can take one job only.
            if self._threads < self._most and sum(map(len, self._queues.values())) > self._idle:
                self._threads += 1
                name = f"kvtier-{self._name}-{self._threads}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        return job

    def cancel(self, job: Job[T]) -> bool:
        """Take back a job that has not begun. Returns whether it was; `done` is not called then."""
        with self._changed:
            queue = self._queues[job.urgency]
            try:
                queue.remove(job)  # type: ignore[arg-type]
            except ValueError:
                return False
        return True

    def oldest_seconds(self) -> float:
        """Return for how long the read or write that began first has been running, or 0.0."""
        with self._changed:
            began = [
                job.started
                for job in self._running
                if job.started and job.urgency is not Urgency.UPKEEP
            ]
        return time.monotonic() - min(began) if began else 0.0

    def close(self) -> None:
        """Forget what is queued and let the threads end; does not wait for them."""
        with self._changed:
            self._closed = True
            for queue in self._queues.values():
                queue.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                self._running.discard(job)
                self._finished.append(job)
                wake = not self._posted and not self._closed
                self._posted = self._posted or wake
                if self._idle and any(self._queues.values()):
                    self._changed.notify()  # What was held back may go now.
            if wake:
                self._post(self._hand_over)

    def _next(self) -> Job[object] | None:
        with self._changed:
            while not self._closed:
                for urgency, queue in self._queues.items():
                    if queue and (urgency < Urgency.UPKEEP or self._one_is_left()):
                        job = queue.popleft()
                        self._running.add(job)
                        return job
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
        return None

    def _one_is_left(self) -> bool:
        """Return whether a thread is left for reads beside one more job that is none."""
        others = sum(job.urgency >= Urgency.UPKEEP for job in self._running)
        return others < self._most - 1

    def _hand_over(self) -> None:
        with self._changed:
            if self._closed:
                return
            count = min(len(self._finished), RESULTS_AT_ONCE)
            jobs = [self._finished.popleft() for _ in range(count)]
            self._posted = again = bool(self._finished)
        for job in jobs:
            job.done(job)
        if again:
            self._post(self._hand_over)


class Steps:
    """Calls for the event loop, each made in a turn of its own, so that the loop is not held.

    Whoever hands them in bounds how many there are.
    """

    def __init__(self, post: Callable[[Callable[[], None]], object]) -> None:
        self._post = post
        self._waiting: deque[Callable[[], None]] = deque()
        self._closed = False

    def hand_in(self, step: Callable[[], None]) -> None:
        """Queue a step, from any thread."""
        self._waiting.append(step)
        if len(self._waiting) == 1:
            self._post(self._take)

    def close(self) -> None:
        """Take no step any more."""
        self._closed = True

    def _take(self) -> None:
        if self._waiting and not self._closed:
            self._waiting[0]()
            self._waiting.popleft()
            if self._waiting:
                self._post(self._take)
