"""One lower tier (L2) as the event loop sees it: what it holds and what it may hold.

The store behind it does the I/O in the threads of a pool. This file keeps the index and the byte
budget, names what goes, measures, and keeps the medium's failures from everybody else: what a tier
that fails or hangs is asked for is a miss, and nothing here waits for it. Runs on the event loop.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from .accounts import Account
from .admission import Throttle
from .core import PAGE_BYTES, BlockKey, EvictReason, ReadOutcome, WriteOutcome
from .health import Health, LeftAlone
from .looks import NEVER, Looks
from .lower_options import LowerOptions
from .lower_room import Room, by_namespace
from .measures import Measures
from .metrics import Metrics
from .policies import POLICIES
from .records import B, Record, RecordIndex
from .tiers.base import RecordStore, Space, Written
from .tiers.compression import Coded
from .tiers.pool import Job, Pool, Steps, Urgency

T = TypeVar("T")

log = logging.getLogger("kvtier.lower")

FULL_SHARE = 64
"""Of what it holds, a tier on a full medium gives up 1 ÷ this before it writes again."""
FORGOTTEN_AT_ONCE = 1000
"""Records of a namespace that is reset which leave the index in one turn of the loop."""


class LowerTier:
    """The index, the budget and the health of one store.

    `post` hands a call to the event loop from any thread; `clock` gives seconds.
    """

    def __init__(
        self,
        store: RecordStore,
        options: LowerOptions,
        metrics: Metrics,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], object],
    ) -> None:
        self.store = store
        self.tier = store.tier
        self.options = options
        self.throttle = Throttle(options.write_rate)
        self.measures = Measures(store.tier, options, metrics, clock)
        self.health = Health(store.tier, options.breaker, metrics, clock)
        self.health.full = self._give_up_some
        self.scanned = False
        """What was there at the start is in the index."""
        self.queued_write_bytes = 0
        self._reads = {
            outcome: metrics.reads.labels(self.tier, outcome or "failed")
            for outcome in (None, *ReadOutcome)
        }
        self._writes = {one: metrics.writes.labels(self.tier, one) for one in WriteOutcome}
        self._clock = clock
        self._steps = Steps(post)
        self._pool = Pool(store.tier, options.threads, post)
        self.index = RecordIndex(POLICIES[options.policy](), self.tier)
        self.room = Room(self.tier, self.index, metrics)
        self._reserved = 0
        """Bytes of writes under way."""
        self._busy: Counter[str] = Counter()
        """What has to end before a namespace's records are removed, by namespace."""
        self._wiping: set[str] = set()
        """Namespaces whose records are not to be used until they are removed."""
        self._looks = Looks(store, self.index, self._steps, clock, self._looked)
        self._closed = False

    # State.

    @property
    def used_bytes(self) -> int:
        """What the medium gave for the records that this tier answers for."""
        return self.index.used_bytes

    @property
    def evictions(self) -> int:
        """Records that left the tier."""
        return self.room.evictions

    def __len__(self) -> int:
        return len(self.index)

    def holds(self, space: Space, key: BlockKey) -> bool:
        """Return whether the index has the block, and it may be used now."""
        return self._usable(space) and self.index.has(space.digest, key)

    def takes(self, space: Space, size: int) -> bool:
        """Return whether a block of `size` bytes would be written now."""
        return self._refusal(space, size) is None

    def lacking(self, space: Space, blocks: Sequence[B]) -> list[B]:
        """Return the blocks that the index has not got; none while it can't be used."""
        return self.index.lacking(space.digest, blocks) if self._usable(space) else []

    def askable(self, space: Space) -> bool:
        """Return whether the medium must be asked for what the index does not know."""
        return not self.store.listed and self._usable(space)

    def touch(self, space: Space, keys: Sequence[BlockKey]) -> None:
        """Record one use of a chain."""
        self.index.touch(space.digest, keys)

    def _usable(self, space: Space) -> bool:
        return self.health.up and space.digest not in self._wiping

    def retune(self, options: LowerOptions) -> None:
        """Go by other options from now on. Policy and threads stay; what is too much goes."""
        self.options = options
        self.throttle.rate = options.write_rate
        self.measures.coding.mode = options.codec
        self.health.breaker.options = options.breaker
        self._steps.hand_in(self._fit)

    # Work.

    def start(self) -> None:
        """Get the store ready, and look at what it holds, in the background."""
        self._pool.submit(Urgency.UPKEEP, self.store.open, self._ready)

    def find(self, space: Space, keys: Sequence[BlockKey], done: Callable[[int], None]) -> Job[int]:
        """Ask the medium how many of `keys` it has from the first on; 0 if it can't say."""

        def answered(job: Job[int]) -> None:
            count = 0
            if self.health.judge(job) and job.result is not None:
                self.measures.found(job)
                count = job.result
                for key in keys[count:]:  # Redis lost it, or what it continues: write it again.
                    self.index.remove(space.digest, key)
            done(count)

        work = self._unless_down(partial(self.store.find, space, keys))
        return self._pool.submit(Urgency.REQUEST, work, answered)

    def peek(
        self, space: Space, keys: Sequence[BlockKey], done: Callable[[int | None], None]
    ) -> None:
        """Ask the medium as `find` does, but measure and learn nothing; None if it can't say."""

        def answered(job: Job[int]) -> None:
            done(job.result if self.health.judge(job) else None)

        work = self._unless_down(partial(self.store.find, space, keys))
        self._pool.submit(Urgency.PREFETCH, work, answered)

    def read(
        self,
        space: Space,
        key: BlockKey,
        into: memoryview,
        urgency: Urgency,
        done: Callable[[ReadOutcome], None],
    ) -> Job[ReadOutcome]:
        """Read a block into `into`, which is the job's until `done` was called.

        A tier that fails says that it has lost the block.
        """
        self.measures.read_begins(len(into))
        decoded: list[Coded] = []

        def ended(job: Job[ReadOutcome]) -> None:
            self.measures.read(job, len(into), decoded)
            outcome = job.result if self.health.judge(job) else None
            moved = len(into) if outcome is ReadOutcome.READ else 0
            self.measures.read_ends(len(into), moved)
            if outcome in (ReadOutcome.MISSING, ReadOutcome.CORRUPT):
                self.index.remove(space.digest, key)
            self._reads[outcome].inc()
            done(outcome or ReadOutcome.MISSING)

        work = self._unless_down(partial(self.store.read, space, key, into, decoded.append))
        return self._pool.submit(urgency, work, ended)

    def give_up(self, job: Job[ReadOutcome], size: int) -> bool:
        """Take back a read of `size` bytes that has not begun. Returns whether it was."""
        if not self._pool.cancel(job):
            return False
        self.measures.read_ends(size, 0)
        return True

    def write(
        self,
        space: Space,
        key: BlockKey,
        parent: BlockKey,
        payload: memoryview,
        owner: Account,
        done: Callable[[WriteOutcome], None],
    ) -> WriteOutcome | None:
        """Write a block from `payload`, which is the job's until `done` was called.

        It is charged to `owner`, unless it is there. Returns why the block is not written, and
        does not call `done` then: a tier that can't keep up drops what comes.
        """
        refusal, gone = self._admit(space, len(payload), parent, owner)
        if refusal is not None:
            self._writes[refusal].inc()
            self._drop(by_namespace(gone))
            return refusal
        size = len(payload) + PAGE_BYTES
        short = self.used_bytes + self._reserved + size - self.options.capacity_bytes
        victims = by_namespace([*gone, *self.room.evict(short)])
        self._count_write(space, size, owner, 1)
        codec = self.measures.coding.choose(self.measures.speed.bandwidth)

        def work() -> Written:
            for namespace, keys in victims.items():
                self.store.drop(namespace, keys)
            return self.store.write(space, key, parent, payload, codec)

        def ended(job: Job[Written]) -> None:
            self._count_write(space, size, owner, -1)
            self.measures.wrote(job)
            down = isinstance(job.error, LeftAlone)
            outcome = WriteOutcome.DOWN if down else WriteOutcome.FAILED
            if self.health.judge(job) and job.result is not None:
                self._wrote(space, key, parent, owner, job.result)
                outcome = WriteOutcome.WRITTEN
            self._writes[outcome].inc()
            done(outcome)
            self._wipe_what_is_quiet()

        self._pool.submit(Urgency.WRITE, self._unless_down(work), ended)
        return None

    def drop(self, space: Space, keys: Sequence[BlockKey], reason: EvictReason) -> None:
        """Remove records of blocks that are wrong or not wanted."""
        self.room.count(sum(self.index.remove(space.digest, key) for key in keys), reason)
        if self.health.up:
            self._drop({space.digest: list(keys)})

    def make_way(self, owner: Account, size: int) -> int:
        """Drop `size` bytes of a tenant's own coldest records. Returns how many, a bounded number.

        A tier that is down drops none.
        """
        if not self.health.up:
            return 0
        gone = self.room.give_up(owner, size, None)
        self._drop(by_namespace(gone))
        return len(gone)

    def wipe(self, space: Space) -> None:
        """Drop everything of a namespace. Nothing of it is read or written until that is done."""
        if space.digest not in self._wiping:
            self._wiping.add(space.digest)
            self._busy[space.digest] += 1
            self._steps.hand_in(partial(self._forget_some, space.digest))

    def tick(self) -> None:
        """Look after the tier: probe it, notice what hangs, look for what others wrote."""
        now = self._clock()
        if self._closed:
            return
        waited = self._pool.oldest_seconds()
        if self.health.breaker.closed and waited > self.options.stuck_seconds:
            self.health.stuck(waited)
        if waited <= self.options.stuck_seconds and self.health.breaker.probe_due(now):
            self._pool.submit(Urgency.UPKEEP, self.store.open, self._ready)
        elif self.health.up and now >= self._looks.again:
            self._look()

    def close(self) -> None:
        """Forget what is queued; what hangs is left to itself."""
        self._closed = True
        self._steps.close()
        self._pool.close()
        self.store.close()

    def _unless_down(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return work that is not begun if the tier went down while it was queued."""

        def checked() -> T:
            if not self.health.up:  # Read in a thread: at worst, one more call is made.
                raise LeftAlone
            return work()

        return checked

    # What comes back.

    def _ready(self, job: Job[None]) -> None:
        if self.health.ready(job):
            if not self.scanned and self._looks.again == NEVER:
                self._look()
            self._wipe_what_is_quiet()

    def _refusal(self, space: Space, size: int) -> WriteOutcome | None:
        if not self._usable(space):
            return WriteOutcome.DOWN
        room = self.options.capacity_bytes - self.index.overhead_bytes
        if not self.health.writable or size + PAGE_BYTES > room:
            return WriteOutcome.FULL
        if self.queued_write_bytes + size > self.options.queue_bytes:
            return WriteOutcome.QUEUE_FULL
        if self._reserved + size + PAGE_BYTES > room:  # Evicting all there is would not do.
            return WriteOutcome.QUEUE_FULL
        return None

    def _admit(
        self, space: Space, payload_bytes: int, parent: BlockKey, owner: Account
    ) -> tuple[WriteOutcome | None, list[Record]]:
        """Return why a block is not written, and what goes for its owner's quota all the same."""
        if (refusal := self._refusal(space, payload_bytes)) is not None:
            return refusal, []
        above = self.index.name(space.digest, parent) if parent else None
        way = self.room.admit(owner, payload_bytes + PAGE_BYTES, above)
        return (None if way.fits else WriteOutcome.QUOTA), way.gone

    def _count_write(self, space: Space, size: int, owner: Account, writes: int) -> None:
        """Take note of writes of `size` bytes that begin, or end if `writes` is below 0."""
        self._reserved += writes * size
        owner.promised[self.tier] += writes * size
        self._busy[space.digest] += writes
        self.queued_write_bytes += writes * size

    def _wrote(
        self, space: Space, key: BlockKey, parent: BlockKey, owner: Account, written: Written
    ) -> None:
        self.index.grew(space.digest, key[0], written.overhead_bytes)
        if space.digest not in self._wiping:
            self.index.add(space.digest, key, written.record_bytes, parent, owner)

    # Room.

    def _drop(self, victims: dict[str, list[BlockKey]]) -> None:
        for namespace, keys in victims.items():
            work = partial(self.store.drop, namespace, keys)
            self._pool.submit(Urgency.UPKEEP, work, self.health.judge)

    def _give_up_some(self) -> None:
        """The medium is full before the budget is: make room on it, for others too."""
        self._drop(by_namespace(self.room.evict(max(self.used_bytes // FULL_SHARE, 1))))

    def _forget_some(self, digest: str) -> None:
        """Take a namespace out of the index, a part at a time; then its records can go."""
        forgotten = self.index.forget(digest, FORGOTTEN_AT_ONCE)
        self.room.count(forgotten, EvictReason.RESET)
        if forgotten:
            self._steps.hand_in(partial(self._forget_some, digest))
        else:
            self._busy[digest] -= 1
            self._wipe_what_is_quiet()

    def _wipe_what_is_quiet(self) -> None:
        for digest in self._wiping:
            if self.health.up and not self._busy[digest]:
                self._busy[digest] += 1  # So that one wipe of it is under way at a time.
                wiped = partial(self._wiped, digest)
                self._pool.submit(Urgency.UPKEEP, partial(self.store.wipe, digest), wiped)

    def _wiped(self, digest: str, job: Job[None]) -> None:
        self._busy[digest] -= 1
        if self.health.judge(job):
            self._wiping.discard(digest)
            self._looks.soon()  # Folders went as well.

    # Looking at what is there.

    def _look(self) -> None:
        def ended(job: Job[None]) -> None:
            self._looks.seen(self.health.judge(job))

        self._pool.submit(Urgency.UPKEEP, self._looks.begin(), ended)

    def _looked(self, well: bool) -> None:
        if well and not self.scanned:
            self.scanned = True
            log.info("the %s tier holds %d blocks", self.tier, len(self))
        self._fit()

    def _fit(self) -> None:
        """Give up what is above the capacity, some of it in each turn of the loop.

        A tier that is down does so after the first look when it is back.
        """
        excess = self.used_bytes + self._reserved - self.options.capacity_bytes
        if self.health.up and excess > 0 and (victims := self.room.evict(excess)):
            self._drop(by_namespace(victims))
            self._steps.hand_in(self._fit)
