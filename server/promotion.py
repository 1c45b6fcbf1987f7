"""Promotion: blocks of lower tiers come to the host tier while a lookup waits for them.

A lookup that finds more below than in the host tier waits, with a lease on what is there, until all
of it was read into slots, or until its time is over: then it gets the prefix that has come by
then. A block is read once, however many lookups wait for it (single-flight). Whether waiting is
worth it is judged by what was measured (`worth.py`). Runs on the event loop, and never blocks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial

from .accounts import NOBODY, Account
from .core import BlockKey, PromoteOutcome, ReadOutcome, Tier, WaitOutcome
from .directory import Block, Namespace
from .eviction import Evictor
from .lower import LowerTier
from .metrics import Metrics
from .sessions import Session
from .tiers.pool import Urgency
from .waiting import Answer, Incoming, PromotionOptions, Source, Timer, Waiting
from .worth import LoadMode

READS_AT_ONCE = 8
"""Reads that one lookup begins in one turn of the loop, so that it is not held for long."""
ASKED_AT_MOST = 4
"""Times that one lookup asks media for more: each goes on where the one before ended."""


class Promotions:
    """All lookups that wait, and all blocks that are being read for them.

    `later(seconds, call)` makes a call on the loop after so many seconds.
    """

    def __init__(
        self,
        evictor: Evictor,
        lowers: Sequence[LowerTier],
        metrics: Metrics,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self.options = PromotionOptions()
        self.incoming: set[Incoming] = set()
        """Everything that is being read, also what nobody waits for any more."""
        self.promoted: Callable[[Block, BlockKey], object] = _nobody
        """Is told of each block that became visible, and of its parent's key."""
        self._host = evictor.host
        self._evictor = evictor
        self._lowers = lowers
        self._metrics = metrics
        self._promoted = {
            (lower.tier, became): metrics.promotions.labels(lower.tier, became)
            for lower in lowers
            for became in PromoteOutcome
        }
        self._clock = clock
        self._later = later
        self._waiting: dict[tuple[int, int], Waiting] = {}
        self._coming: defaultdict[Namespace, dict[BlockKey, Incoming]] = defaultdict(dict)
        """What is being read and will be visible then."""

    def begin(
        self,
        session: Session,
        lease: int,
        keys: Sequence[BlockKey],
        start: int,
        done: Callable[[Answer], None],
        owner: Account,
    ) -> float:
        """Wait for more of `keys` than the session's lease has, if lower tiers have more.

        Returns the seconds within which `done` is called, on a later turn of the loop; 0.0 if
        there is nothing to wait for, and `done` is not called then.
        """
        leased = session.leases.get(lease, [])
        end = start + len(leased)
        if end >= len(keys) or not self._usable(session.space):
            return 0.0
        waiting = Waiting(session, lease, keys, start, end, done, self._clock(), owner)
        waiting.blocks = dict(enumerate(leased, start))
        self._extend(waiting)
        if not (waiting.awaited or waiting.asking or waiting.todo):
            self._settle(waiting)
            return 0.0
        self._waiting[session.number, lease] = waiting
        overdue = partial(self._end, waiting, WaitOutcome.OVERDUE)
        waiting.timer = self._later(self.options.wait_seconds, overdue)
        return self.options.wait_seconds

    def waits(self, session: Session, lease: int) -> bool:
        """Return whether such a lookup waits."""
        return (session.number, lease) in self._waiting

    def forget(self, session: Session, lease: int) -> None:
        """The engine does not want this lookup any more; its lease is the caller's to end."""
        if (waiting := self._waiting.get((session.number, lease))) is not None:
            self._leave(waiting)
            self._count(waiting, WaitOutcome.ABANDONED)

    def forget_session(self, session: Session) -> None:
        """The session ends, and with it all that it waits for."""
        for number, lease in list(self._waiting):
            if number == session.number:
                self.forget(session, lease)

    def discard(self, space: Namespace) -> None:
        """The namespace is reset: nothing that is being read becomes visible."""
        for one in self._coming[space].values():
            one.discarded = True
        self._coming.pop(space, None)
        for waiting in list(self._waiting.values()):
            if waiting.session.space is space:
                waiting.end = waiting.start
                self._end(waiting, WaitOutcome.SHORTER)

    def cut_off(self, space: Namespace, key: BlockKey) -> None:
        """A block is dropped: no lookup gets it, or what continues it, from a lower tier."""
        for waiting in list(self._waiting.values()):
            if waiting.session.space is space and key in waiting.keys:
                end = waiting.keys.index(key)
                for at, one in waiting.awaited.items():
                    one.discarded = one.discarded or at >= end
                self._cut(waiting, end)
                self._end_if_over(waiting)

    def coming(self, space: Namespace, key: BlockKey) -> Incoming | None:
        """Return the block if it is being read and will be visible then."""
        return self._coming[space].get(key)

    def fetch(
        self,
        space: Namespace,
        chain: Sequence[BlockKey],
        at: int,
        slot: int,
        lower: LowerTier,
        urgency: Urgency,
    ) -> Incoming:
        """Begin to read a block of a chain, which is not on its way yet, into a taken slot.

        It will be charged to whom it is charged to below.
        """
        key, parent = chain[at], chain[at - 1] if at else b""
        one = Incoming(space, key, parent, slot, lower, lower.index.owner(space.digest, key))
        self._coming[space][key] = one
        self.incoming.add(one)
        self._begin_read(one, urgency)
        return one

    def _begin_read(self, one: Incoming, urgency: Urgency) -> None:
        space = one.space
        into = self._host.memory(one.slot, space.pool)
        ended = partial(self._arrived, one)
        one.job = one.source.read(space.records, one.key, into, urgency, ended)

    # Finding more.

    def _usable(self, space: Namespace) -> bool:
        if self.options.mode is LoadMode.NEVER:
            return False
        return bool(self._coming[space]) or any(lower.health.up for lower in self._lowers)

    def _extend(self, waiting: Waiting) -> None:
        """Take what is known to follow, then ask for what may follow that."""
        self._take(waiting, self._known(waiting))
        self._ask(waiting)

    def _known(self, waiting: Waiting) -> list[Source]:
        """Return where the next blocks are, as far as that is known without asking."""
        space = waiting.session.space
        found: list[Source] = []
        for key in itertools.islice(waiting.keys, waiting.end, None):
            source = self._source(space, key)
            if source is None:
                break
            found.append(source)
        return found

    def _source(self, space: Namespace, key: BlockKey) -> Source | None:
        resident = space.blocks.get(key) or self._coming[space].get(key)
        if resident is not None:
            return resident
        for lower in self._lowers:
            if lower.store.listed and lower.holds(space.records, key):
                return lower
        return None

    def _ask(self, waiting: Waiting) -> None:
        """Ask the first medium that has to be asked for what follows, if that pays."""
        space = waiting.session.space
        left = len(waiting.keys) - waiting.end
        if waiting.cut or not left or waiting.asked >= ASKED_AT_MOST:
            return
        lower = next((one for one in self._lowers if one.askable(space.records)), None)
        if lower is None:
            return
        block = self.options.block_seconds(waiting.session)
        if block is not None and left * block <= (lower.measures.speed.latency or 0.0):
            return
        waiting.asking = True
        waiting.asked += 1
        keys = waiting.keys[waiting.end :]
        lower.find(space.records, keys, partial(self._told, waiting, lower))

    def _told(self, waiting: Waiting, lower: LowerTier, count: int) -> None:
        waiting.asking = False
        if self._waiting.get((waiting.session.number, waiting.lease)) is not waiting:
            return
        if count and not waiting.cut:
            space = waiting.session.space
            keys = waiting.keys[waiting.end : waiting.end + count]
            self._take(waiting, [self._source(space, key) or lower for key in keys])
            self._extend(waiting)
        self._end_if_over(waiting)

    # Taking it.

    def _take(self, waiting: Waiting, sources: Sequence[Source]) -> None:
        """Await the blocks that are worth it, from `waiting.end` on."""
        worth = self.options.worth(waiting.session, sources, self._metrics)
        waiting.cut = waiting.cut or worth < len(sources)
        for at, source in enumerate(sources[:worth], waiting.end):
            if isinstance(source, Block):  # First of all, so that none of them makes room.
                self._lease(waiting, at, source)
            elif isinstance(source, Incoming):
                self._await(waiting, at, source)
            else:
                waiting.todo.append((at, source))
        waiting.end += worth
        self._begin_some(waiting)

    def _begin_some(self, waiting: Waiting) -> None:
        """Begin to read the next blocks, and the rest in a later turn of the loop."""
        for _ in range(min(len(waiting.todo), READS_AT_ONCE)):
            at, lower = waiting.todo.popleft()
            space, key = waiting.session.space, waiting.keys[at]
            if (block := space.blocks.get(key)) is not None:  # Since it was put down here.
                self._lease(waiting, at, block)
                continue
            one = self._coming[space].get(key) or self._read(waiting, at, lower)
            if one is None:
                self._cut(waiting, at)
                return
            self._await(waiting, at, one)
        if waiting.todo:
            self._later(0.0, partial(self._go_on, waiting))

    def _go_on(self, waiting: Waiting) -> None:
        if self._waiting.get((waiting.session.number, waiting.lease)) is waiting:
            self._begin_some(waiting)
            self._end_if_over(waiting)

    def _await(self, waiting: Waiting, at: int, one: Incoming) -> None:
        one.waiters[waiting] = at
        waiting.awaited[at] = one
        if (job := one.job) is None or job.urgency is Urgency.REQUEST:
            return
        if one.source.give_up(job, one.space.pool.slot_bytes):  # It goes before other prefetches.
            self._begin_read(one, Urgency.REQUEST)

    def _read(self, waiting: Waiting, at: int, lower: LowerTier) -> Incoming | None:
        """Begin to read a block into a slot; None if there is no slot for it."""
        space = waiting.session.space
        owner = lower.index.owner(space.digest, waiting.keys[at])
        if owner.tenant == NOBODY:  # Nobody has asked for it since it was found there.
            owner = waiting.owner
        if not self._fits(space, owner):
            self._promoted[lower.tier, PromoteOutcome.QUOTA].inc()
            return None
        slot = self._evictor.make_room(space, min(len(waiting.todo) + 1, READS_AT_ONCE))
        if slot is None:
            self._promoted[lower.tier, PromoteOutcome.NO_SLOT].inc()
            return None
        one = self.fetch(space, waiting.keys, at, slot, lower, Urgency.REQUEST)
        one.owner = owner
        return one

    def _fits(self, space: Namespace, owner: Account) -> bool:
        """Return whether a tenant's quota has room for one more block than those on their way."""
        if not owner.quota:
            return True
        coming = sum(one.owner is owner for one in self.incoming)
        fits = self._evictor.fits(space, owner, coming + 1)
        owner.refused += not fits
        return fits

    def _lease(self, waiting: Waiting, at: int, block: Block) -> None:
        block.leases += 1
        waiting.blocks[at] = block
        waiting.session.leases.setdefault(waiting.lease, []).append(block)

    # What arrives.

    def _arrived(self, one: Incoming, outcome: ReadOutcome) -> None:
        self._came(one)
        block, became = self._place(one, outcome)
        self._promoted[one.source.tier, became].inc()
        for waiting, at in list(one.waiters.items()):
            waiting.awaited.pop(at, None)
            if block is None:
                self._cut(waiting, at)
            else:
                self._lease(waiting, at, block)
                waiting.origins[at] = one.source.tier
            self._end_if_over(waiting)
        for tell in one.then:
            tell(block)

    def _came(self, one: Incoming) -> None:
        """It is not on its way any more."""
        self.incoming.discard(one)
        coming = self._coming[one.space]
        if coming.get(one.key) is one:
            del coming[one.key]

    def _place(self, one: Incoming, outcome: ReadOutcome) -> tuple[Block | None, PromoteOutcome]:
        """Make what was read visible, unless it is there by now or must not be."""
        space = one.space
        resident = space.blocks.get(one.key)
        wanted = outcome is ReadOutcome.READ and not one.discarded and resident is None
        if wanted and (not one.owner.quota or self._evictor.admits(space, one.owner, one.parent)):
            block = space.add(one.key, one.parent, one.slot, one.owner)
            space.pool.policy.insert([one.key], space.pool.slot_bytes, one.parent or None)
            self.promoted(block, one.parent)
            self._evictor.use(space.pool, [one.slot])
            return block, PromoteOutcome.PROMOTED
        self._host.give_back(space.pool, one.slot)
        if one.discarded:
            return None, PromoteOutcome.DISCARDED
        if resident is not None:
            return resident, PromoteOutcome.DUPLICATE
        return None, PromoteOutcome.QUOTA if wanted else PromoteOutcome.LOST

    def _cut(self, waiting: Waiting, at: int) -> None:
        """Nothing from a position on is any good to a lookup."""
        waiting.end = min(waiting.end, at)
        waiting.cut = True
        waiting.todo = deque(one for one in waiting.todo if one[0] < at)
        for later in [place for place in waiting.awaited if place >= at]:
            self._drop_waiter(waiting, waiting.awaited.pop(later))

    def _drop_waiter(self, waiting: Waiting, one: Incoming) -> None:
        """One lookup less waits for a block; a read that nobody waits for need not begin."""
        one.waiters.pop(waiting, None)
        if one.waiters or one.then or one.job is None:
            return
        if one.source.give_up(one.job, one.space.pool.slot_bytes):
            self._came(one)
            self._host.give_back(one.space.pool, one.slot)

    # The end of waiting.

    def _end_if_over(self, waiting: Waiting) -> None:
        known = self._waiting.get((waiting.session.number, waiting.lease)) is waiting
        if known and not (waiting.asking or waiting.awaited or waiting.todo):
            self._end(waiting, WaitOutcome.SHORTER if waiting.cut else WaitOutcome.COMPLETE)

    def _end(self, waiting: Waiting, outcome: WaitOutcome) -> None:
        self._leave(waiting)
        self._count(waiting, outcome)
        ready = self._settle(waiting)
        origins = [waiting.origins.get(at) for at in range(waiting.start, ready)]
        slots = [waiting.blocks[at].slot for at in range(waiting.start, ready)]
        waiting.done(Answer(slots, origins.count(Tier.DISK), origins.count(Tier.REDIS)))

    def _settle(self, waiting: Waiting) -> int:
        """Keep leases on the prefix that came, in order. Returns where it ends."""
        ready = waiting.start
        while ready < waiting.end and ready in waiting.blocks:
            ready += 1
        kept = [waiting.blocks.pop(at) for at in range(waiting.start, ready)]
        self._evictor.unlease(waiting.session.space, waiting.blocks.values())
        waiting.blocks = dict(enumerate(kept, waiting.start))
        waiting.session.leases.pop(waiting.lease, None)
        if kept:
            waiting.session.leases[waiting.lease] = kept
        return ready

    def _leave(self, waiting: Waiting) -> None:
        del self._waiting[waiting.session.number, waiting.lease]
        if waiting.timer is not None:
            waiting.timer.cancel()
        while waiting.awaited:
            self._drop_waiter(waiting, waiting.awaited.popitem()[1])

    def _count(self, waiting: Waiting, outcome: WaitOutcome) -> None:
        self._metrics.waits.labels(outcome).inc()
        self._metrics.wait_seconds.observe(self._clock() - waiting.began)


def _nobody(block: Block, parent: BlockKey) -> None:
    """Nobody wants to know what was promoted."""
