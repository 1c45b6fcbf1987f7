"""The threads that do the work: batches in, completions out.

`submit` returns at once, whatever happens. Each batch ends with one completion: done, over its
time, or given up as the adapter closes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from typing import TypeAlias

from .batches import Batch, Batches, Operation, Result, SizeBook, failed
from .memory import Memory
from .options import AdapterOptions
from .peer import Site

log = logging.getLogger("kvtier.lmcache")
REPEAT_SECONDS = 60.0
"""In which a sentence that several sessions have to say is said once."""

BATCHES_AT_MOST = 1024
"""That wait for their turn; LMCache is told at once that what comes beyond that failed."""
LOADING_LANES = 2
"""So that a batch that waits for a lower tier does not hold up one that need not."""
CLOSE_SECONDS = 10.0

Completion: TypeAlias = tuple[int, bool, str, list[bool] | None]


class _Once(logging.Filter):
    """Lets no sentence through that was logged just now. The sentences are few."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        text = record.getMessage()
        again = record.created < self._said.get(text, 0.0) + REPEAT_SECONDS
        if not again:
            self._said = {text: record.created, **dict(list(self._said.items())[:15])}
        return not again


log.addFilter(_Once())


class Lanes:
    """One lane stores and drops, others look up and load, each in a thread of its own."""

    def __init__(self, options: AdapterOptions) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._options = options
        self._numbers = itertools.count(1)
        self._stores = _Queue(BATCHES_AT_MOST)
        self._loads = _Queue(BATCHES_AT_MOST)
        self._lock = threading.Lock()
        # What the lock guards: what was not fetched yet, and whether the descriptor is open.
        self._completions: list[Completion] = []
        self._open = True
        self._stop = threading.Event()
        self._memory = Memory(log)
        self._site = Site(options, f"lmcache-{uuid.uuid4().hex}", self._memory, self._stop, log)
        self._book = SizeBook()
        self._threads = [
            threading.Thread(target=self._run, args=[todo], name="kvtier-lmcache", daemon=True)
            for todo in (self._stores, *[self._loads] * LOADING_LANES)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, operation: Operation, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Hand a batch in; return its number. Never blocks."""
        number = next(self._numbers)
        until = time.monotonic() + self._options.wait_ms / 1000
        batch = Batch(number, operation, [*keys], [*views], until)
        storing = operation in (Operation.SET, Operation.DELETE)
        if views and len(views) != len(keys):
            self._complete(batch, failed(batch, f"{len(keys)} keys, {len(views)} buffers"))
        elif self._stop.is_set():
            self._complete(batch, failed(batch, "the adapter is closed"))
        else:
            try:
                (self._stores if storing else self._loads).put_nowait(batch)
            except queue.Full:
                self._complete(batch, failed(batch, "too many batches wait already"))
        return number

    def drain(self) -> list[Completion]:
        """Return what has been completed since the last call."""
        with self._lock:
            if self._open:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.event_fd)
            done, self._completions = self._completions, []
        return done

    def close(self) -> None:
        """End what is under way, give up what waits, and hold nothing on the server any more."""
        self._stop.set()
        for todo in (self._stores, *[self._loads] * LOADING_LANES):
            with contextlib.suppress(queue.Full):
                todo.put_nowait(None)
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
        for todo in (self._stores, self._loads):
            with contextlib.suppress(queue.Empty):
                while True:
                    self._give_up(todo.get_nowait())
        self._memory.close()
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.event_fd)

    def _run(self, todo: _Queue) -> None:
        batches = Batches(self._site, self._book)
        while (batch := todo.get()) is not None and not self._stop.is_set():
            try:
                result = batches.do(batch)
            except Exception:
                log.exception("a batch of LMCache failed: %s", batch.operation)
                result = failed(batch, "an error inside kvtier's adapter, which has logged it")
                batches.close()  # With the sessions ends all that they hold.
            self._complete(batch, result)
        self._give_up(batch)
        batches.close()

    def _give_up(self, batch: Batch | None) -> None:
        if batch is not None:
            self._complete(batch, failed(batch, "the adapter is closed"))

    def _complete(self, batch: Batch, result: Result) -> None:
        with self._lock:
            self._completions.append((batch.number, *result))
            if self._open:
                os.eventfd_write(self.event_fd, 1)


_Queue = queue.Queue[Batch | None]
