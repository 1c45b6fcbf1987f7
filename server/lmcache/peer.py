"""One lane's session in one namespace: finds, loads, stores and drops blocks.

While a lane copies, none of its frames is unanswered or unhandled. The server closes a session for
what a frame says, or at its own end, so that no slot is given away while it is copied to; and a
load counts only if the session still stands when its copies are over (`_intact`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from logging import Logger

from .. import protocol as wire
from ..client import Client
from ..core import BlockKey, Role
from .memory import Memory, Place, Wanted, load, store
from .options import AdapterOptions

STOCK = 4
"""Slots that the server is asked to keep ready for a lane that stores."""
SLOTS_AT_ONCE = 16
"""Blocks that are reserved, copied and committed together."""
LOOK_SECONDS = 0.1
"""How often a lane that waits for lower tiers looks whether it should end."""
NOBODY = ("", 0)


@dataclass(slots=True)
class Site:
    """What all peers of an adapter share. `engine` is the same in all their sessions."""

    options: AdapterOptions
    engine: str
    memory: Memory
    stop: threading.Event
    log: Logger


@dataclass(slots=True)
class Held:
    """What a lookup found: slots by position, under leases, and how many came from lower tiers."""

    slots: dict[int, int] = field(default_factory=dict)
    leases: list[int] = field(default_factory=list)
    disk: int = 0
    redis: int = 0


class Peer:
    """A session that comes and goes. All calls come from one lane, and none raises for a server."""

    def __init__(self, site: Site, size: int) -> None:
        self._site = site
        self._manifest = site.options.manifest(size)
        hello = wire.Hello(wire.PROTOCOL_VERSION, Role.SCHEDULER, site.engine, 0, self._manifest)
        self._client = Client(site.options.client, hello, site.log)
        self._by = NOBODY
        self._stock: list[int] = []
        self._client.start()

    def meet(self) -> bool:
        """Return whether there is a server now. What an earlier session had is forgotten."""
        self._client.look()
        if (now := self._now()) != self._by:
            self._by, self._stock = now, []
        return now is not NOBODY

    def holds(self, keys: Sequence[BlockKey], until: float) -> Held:
        """Find out which blocks there are, and hold none of them. This is their use."""
        held = self._find(keys, until, use=True)
        if held.leases:
            self._client.send_step(wire.Step(0, releases=held.leases))
        return held

    def load(self, values: Sequence[Wanted], until: float) -> list[bool]:
        """Copy blocks to where they are wanted. Returns for each whether it is there, whole."""
        held = self._find([value.key for value in values], until, use=False)
        places = ((at, self._place(slot)) for at, slot in held.slots.items())
        here = {at: place for at, place in places if place is not None}
        copies = [partial(load, place, values[at], self._manifest) for at, place in here.items()]
        sound = dict(zip(here, self._copy(copies), strict=True))
        if not self._intact():
            return [False] * len(values)
        if held.leases:
            wrong = [held.slots[at] for at, well in sound.items() if not well]
            self._client.send_step(wire.Step(0, releases=held.leases, unreadable=wrong))
        return [sound.get(at, False) for at in range(len(values))]

    def store(self, values: Sequence[Wanted], until: float) -> list[bool]:
        """Make blocks of values. Returns for each whether it is there now."""
        done: list[bool] = []
        while len(done) < len(values):
            over = self._site.stop.is_set() or time.monotonic() >= until
            part = values[len(done) : len(done) + SLOTS_AT_ONCE]
            some = [] if over else self._store(part)
            if not some:
                break
            done += some
        return done + [False] * (len(values) - len(done))

    def drop(self, keys: Sequence[BlockKey]) -> bool:
        """Drop blocks from all tiers. Returns whether the server has done it."""
        parts = (keys[at : at + wire.MAX_DROP_BLOCKS] for at in _steps(keys))
        return all(self._client.drop(b"".join(part)) is not None for part in parts)

    def sizes(self) -> list[int]:
        """Return the sizes of values that the server has namespaces for, under this label."""
        known = self._client.sizes()
        return [] if known is None else known.shard_bytes

    def count(self, asked: wire.Asked) -> None:
        """Tell how many blocks were asked for, and what was there."""
        self._client.send_step(wire.Step(0, asked=[asked]))

    def close(self) -> None:
        """End the session, and with it all that it holds."""
        self._client.close()

    def _find(self, keys: Sequence[BlockKey], until: float, *, use: bool) -> Held:
        """Lease what there is of blocks that are no chain: each gap ends one lookup.

        Only the first one is a use: it names all of them.
        """
        held, at = Held(), 0
        while at < len(keys):
            found = self._lookup(b"".join(keys[at:]), until, use=use and not at)
            if found is None:
                break
            if found.slots:
                held.leases.append(found.seq)
                held.slots.update(enumerate(found.slots, at))
            held.disk += found.disk
            held.redis += found.redis
            at += len(found.slots) + 1
        return held

    def _lookup(self, keys: bytes, until: float, *, use: bool) -> wire.Found | None:
        """Ask, and wait for lower tiers. None if the time is over or the server lost."""
        if time.monotonic() >= until:
            return None
        ask = self._client
        found = ask.lookup(keys, 0, self._site.options.tenant) if use else ask.fetch(keys)
        while found is not None and found.within:
            left = until - time.monotonic()
            if left <= 0.0 or self._site.stop.is_set():
                ask.abandon(found.seq)
                ask.send_step(wire.Step(0, releases=[found.seq]))
                return None
            came = ask.answer(found.seq, min(left, LOOK_SECONDS))
            if came is None and not self._intact():
                return None
            found = came or found
        return found

    def _store(self, values: Sequence[Wanted]) -> list[bool]:
        """Store as many of the values as there are slots for. Returns what came of each of these.

        There may be fewer: slots that are leased or promised give no room.
        """
        if self._lost():
            return []
        slots = self._take(len(values))
        places = [self._place(slot) for slot in slots]
        ready = [(value, at) for value, at in zip(values, places, strict=False) if at is not None]
        self._copy([partial(store, place, value, self._manifest) for value, place in ready])
        say = wire.Step(0, stock=STOCK)
        for value, slot, place in zip(values, slots, places, strict=False):
            if place is None:
                say.aborts.append(slot)
            else:
                say.commits.append(wire.Chain(b"", value.key, [slot], self._site.options.tenant))
        if self._lost() or (answer := self._client.step(say)) is None:
            return []
        self._stock += answer.slots
        return [place is not None for place in places]

    def _take(self, need: int) -> list[int]:
        """Return up to `need` slots, from the stock or, if that is too small, by asking."""
        if (short := need - len(self._stock)) > 0:
            granted = self._client.step(wire.Step(0, need=short, stock=STOCK))
            self._stock += [] if granted is None else granted.slots
        taken, self._stock = self._stock[:need], self._stock[need:]
        return taken

    def _copy(self, copies: Sequence[partial[bool]]) -> list[bool]:
        return self._site.memory.all(copies, self._manifest.shard_bytes)

    def _place(self, slot: int) -> Place | None:
        """Return where a slot lies. None if it can't be had, or belongs to a lost session."""
        if self._lost():  # What the client would map now is another server's.
            return None
        size = self._manifest.slot_bytes
        return self._site.memory.place(self._client, self._by[0], slot, size)

    def _intact(self) -> bool:
        """Return whether the session that everything was promised in stands at this moment."""
        self._client.look()
        return not self._lost()

    def _lost(self) -> bool:
        """Return whether the session is known to be another one, or none."""
        return self._now() != self._by

    def _now(self) -> tuple[str, int]:
        welcome = self._client.meet()
        return NOBODY if welcome is None else (welcome.server, welcome.session)


def _steps(keys: Sequence[BlockKey]) -> Iterator[int]:
    return iter(range(0, len(keys), wire.MAX_DROP_BLOCKS))
