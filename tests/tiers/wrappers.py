"""Stores around a store: one that takes its time, and one that fails as it is told to.

Both hand every call on to the store inside, and work with any `RecordStore`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

from kvtier.codec import Codec
from kvtier.core import BlockKey, Fault, ReadOutcome
from kvtier.tiers.base import Listing, RecordStore, Space, TierFault, Written, ignore
from kvtier.tiers.compression import Coded

Operation = Literal["open", "scan", "find", "read", "write", "drop", "wipe"]
Delay: TypeAlias = float | Callable[[], object]
"""Seconds to sleep, or what to call instead: the `wait` of a threading.Event, for example."""
Step: TypeAlias = Fault | ReadOutcome | int | Exception | None
"""What one call does: fail the tier, be a read's outcome or a find's answer, raise, or go on."""


class WrappedStore(RecordStore):
    """Hands every call on to the store inside, after `before` was called with its name."""

    def __init__(self, inner: RecordStore) -> None:
        self.inner = inner
        self.tier = inner.tier
        self.listed = inner.listed

    def before(self, operation: Operation) -> Step:
        """Do what comes before a call. Returns what it is to be instead, or None."""
        raise NotImplementedError

    def open(self) -> None:
        self.before("open")
        self.inner.open()

    def scan(self) -> Iterator[Listing]:
        self.before("scan")
        yield from self.inner.scan()

    def find(self, space: Space, keys: Sequence[BlockKey]) -> int:
        instead = self.before("find")
        return instead if isinstance(instead, int) else self.inner.find(space, keys)

    def read(
        self,
        space: Space,
        key: BlockKey,
        into: memoryview,
        report: Callable[[Coded], object] = ignore,
    ) -> ReadOutcome:
        instead = self.before("read")
        if not isinstance(instead, ReadOutcome):
            return self.inner.read(space, key, into, report)
        if instead is ReadOutcome.READ:
            raise ValueError("a read that reads is the inner store's business: script None")
        self.inner.drop(space.digest, [key])
        into[:] = b"\xee" * len(into)
        return instead

    def write(
        self,
        space: Space,
        key: BlockKey,
        parent: BlockKey,
        payload: memoryview,
        codec: Codec = Codec.RAW,
    ) -> Written:
        self.before("write")
        return self.inner.write(space, key, parent, payload, codec)

    def drop(self, namespace: str, keys: Sequence[BlockKey]) -> None:
        self.before("drop")
        self.inner.drop(namespace, keys)

    def wipe(self, namespace: str) -> None:
        self.before("wipe")
        self.inner.wipe(namespace)

    def close(self) -> None:
        self.inner.close()


class SlowStore(WrappedStore):
    """Waits before each call of an operation that has a delay.

        gate = threading.Event()
        store = SlowStore(inner, read=gate.wait, write=0.01)

    `calls` counts what was asked for, `waiting` what waits now, both by operation.
    """

    def __init__(self, inner: RecordStore, **delays: Delay) -> None:
        super().__init__(inner)
        self.delays = delays
        self.calls: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self._lock = threading.Lock()

    def before(self, operation: Operation) -> Step:
        self._count(operation, 1)
        try:
            match self.delays.get(operation, 0.0):
                case 0.0:
                    pass
                case float() | int() as seconds:
                    time.sleep(seconds)
                case wait:
                    wait()
        finally:
            self._count(operation, 0)

    def _count(self, operation: Operation, new: int) -> None:
        with self._lock:
            self.calls[operation] += new
            self.waiting[operation] += 1 if new else -1


class FaultyStore(WrappedStore):
    """Does what a script says: first the steps of an operation one by one, then what is steady.

        store = FaultyStore(inner)
        store.next("read", ReadOutcome.CORRUPT, Fault.TIMEOUT, None)
        store.steady("write", Fault.FULL)

    A scripted CORRUPT or MISSING also drops the record inside, as the contract has it. `calls`
    counts what was asked for by operation. Threads may call at once.
    """

    def __init__(self, inner: RecordStore) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self._next: dict[str, deque[Step]] = {}
        self._steady: dict[str, Step] = {}
        self._lock = threading.Lock()

    def next(self, operation: Operation, *steps: Step) -> None:
        """Let the next calls be these steps, one each."""
        with self._lock:
            self._next.setdefault(operation, deque()).extend(steps)

    def steady(self, operation: Operation, step: Step) -> None:
        """Let every call be this, once the steps of `next` are done."""
        with self._lock:
            self._steady[operation] = step

    def heal(self) -> None:
        """Forget the script: all calls go on to the store inside."""
        with self._lock:
            self._next.clear()
            self._steady.clear()

    def before(self, operation: Operation) -> Step:
        with self._lock:
            self.calls[operation] += 1
            steps = self._next.get(operation)
            step = steps.popleft() if steps else self._steady.get(operation)
        if isinstance(step, Fault):
            raise TierFault(step, f"{self.tier}: {step}, as the test's script says")
        if isinstance(step, Exception):
            raise step
        return step
