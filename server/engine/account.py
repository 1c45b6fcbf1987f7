"""The scheduler side's account with the server: who promised what, the stock, what to tell.

A slot belongs to the session it was promised in. After a reconnection, what was promised before is
never committed, and the server is told when no worker copies for it any more. Frames are gathered
in one step and sent one way; only a stock that is too small makes a step wait for the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from logging import Logger

from .. import protocol as wire
from ..client import Client
from .plan import NOBODY, Promise

STOCK = 32
"""Slots that the server is asked to keep ready for this engine."""


class Account:
    """One engine's dealings with the server. `by` is who promises slots now."""

    def __init__(self, client: Client, log: Logger) -> None:
        self.by = NOBODY
        self.say = wire.Step(seq=0)
        """What the next frame will say."""
        self.salt_key = b""
        """With which the server wants salts; empty where it knows none."""
        self._client = client
        self._log = log
        self._stock: list[int] = []
        self._settled = NOBODY
        self._reset_owed = False

    def meet(self) -> None:
        """Drop what an earlier session was promised, if the present one is new."""
        now = self._now()
        if now == self.by:
            return
        self._stock, self.say = [], wire.Step(seq=0)
        if now is not NOBODY and self._reset_owed:
            now = self._now() if self._client.reset() is not None else NOBODY
            self._reset_owed = now is NOBODY
        self.by = now

    def lookup(self, keys: bytes, start: int, tenant: str) -> wire.Found | None:
        """Ask for a prefix; see `protocol.Lookup`. None is a miss."""
        return None if self.by is NOBODY else self._client.lookup(keys, start, tenant)

    def answer(self, lease: int, patience: float = 0.0) -> wire.Found | None:
        """Return what became of a lookup that waits for lower tiers; None if not yet.

        Waits for it for `patience` seconds at most.
        """
        return self._client.answer(lease, patience)

    def abandon(self, lease: int) -> None:
        """The answer to a lookup is not wanted any more."""
        self._client.abandon(lease)

    def overdue(self) -> None:
        """Count an answer that did not come in time."""
        self._client.failures["deadline"] += 1

    def take_slots(self, need: int, above: Iterable[bytes], tenants: Iterable[str]) -> list[int]:
        """Return up to `need` slots, from the stock or, if that is too small, by asking.

        `above`: the chains that what is to be stored continues; `tenants`: whose each block is.
        """
        self._stock += self._client.grants()
        short = need - len(self._stock)
        if short > 0:
            step, self.say = self.say, wire.Step(seq=0)
            step.need, step.stock, step.above = short, STOCK, [*above]
            step.tenants = list(Counter([*tenants][-short:]).items())
            granted = self._client.step(step)
            self._stock += [] if granted is None else granted.slots
        if self._now() != self.by:
            self._stock = []
        taken, self._stock = self._stock[:need], self._stock[need:]
        return taken

    def settle(self, copying_for: Sequence[Promise]) -> None:
        """Say once a session that no worker copies for an earlier one any more."""
        if self.by is not NOBODY and self._settled != self.by:
            server = self.by.server
            if not any(by.server == server and by != self.by for by in copying_for):
                self.say.settled = True
                self._settled = self.by

    def flush(self) -> None:
        """Send what there is to say, one way."""
        say = self.say
        if len(self._stock) < STOCK // 2 and (say.commits or say.aborts):
            say.stock = STOCK
        spoken = say.commits or say.aborts or say.releases or say.touches or say.unreadable
        if spoken or say.asked or say.settled or say.prefill_tokens:
            self.say = wire.Step(seq=0)
            self._client.send_step(say)

    def reset(self) -> None:
        """Drop the namespace's blocks; without a server now, before anything else is asked of it.

        Until the server has done it, every lookup misses: nothing of before comes back.
        """
        if self._client.meet() is None or self._client.reset() is None:
            self._reset_owed = True
            self._log.warning("no kvtier server to reset: it will be when it is back")

    def changes(self) -> list[wire.Changed]:
        """Return what the server told of its blocks since the last call."""
        return self._client.changes()

    def take_failures(self) -> Counter[str]:
        """Return the calls that failed since the last call, by reason."""
        failures, self._client.failures = self._client.failures, Counter()
        return failures

    def close(self) -> None:
        """Leave the server."""
        self._client.close()

    def _now(self) -> Promise:
        welcome = self._client.meet()
        if welcome is None:
            return NOBODY
        self.salt_key = welcome.salt_key
        return Promise(welcome.server, welcome.session)
