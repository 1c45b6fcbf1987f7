"""The engine's end of the data plane, for both halves of the connector.

No call raises into vLLM, and none waits past its deadline: a failure is `None`, counted by reason,
and drops the connection. A thread of its own connects again: often while nobody listens, which
costs nothing, so that a restarted server is used at once; with growing pauses that shrink only
after a call went well where somebody does, so that a server which accepts but never answers is left
alone (a breaker). All calls come from one thread.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from . import protocol as wire
from .errors import ProtocolError
from .link import Link

LOOK_SECONDS = 0.25
"""How often the thread looks whether the connection still stands."""

FAILURES = ("absent", "deadline", "disconnect", "protocol", "refused")
"""Why a call failed, as `Client.failures` counts it."""

NOBODY_LISTENS = (FileNotFoundError, ConnectionRefusedError)
"""What connecting raises then."""

Asked = wire.Lookup | wire.Step | wire.MapSlab | wire.Reset | wire.Drop | wire.Sizes
R = TypeVar("R", wire.Found, wire.Granted, wire.Mapped, wire.Done, wire.Known)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Where the server is and how long to wait. All times in seconds."""

    socket: Path
    deadline: float = 0.25
    """For one call, from its first byte sent to its last byte read."""
    hello_deadline: float = 5.0
    """For the first exchange, in the connecting thread."""
    pause_first: float = 0.1
    pause_most: float = 5.0


class Client:
    """A connection to the server that comes and goes. Start it, then call."""

    def __init__(self, options: ClientOptions, hello: wire.Hello, log: logging.Logger) -> None:
        self.failures: collections.Counter[str] = collections.Counter()
        """Calls that failed, by one of `FAILURES`."""
        self.before_loss: Callable[[], None] = _nothing
        """Called before a connection is dropped. Until it returns, what was promised is held."""
        self._options = options
        self._hello = hello
        self._log = log
        self._seq = itertools.count(1)
        self._link: Link | None = None
        self._ready: Link | None = None
        """Connected by the thread, and not taken up yet: see `meet`."""
        self._pause = options.pause_first
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._keep_connected, name="kvtier", daemon=True)

    def start(self) -> None:
        """Connect now if the server is there, and keep connected from then on."""
        self._try_connect()
        self.meet()
        self._wanted.set()
        self._thread.start()

    def meet(self) -> wire.Welcome | None:
        """Take up a new connection if there is one; return what the server said to its hello.

        Sessions change here and nowhere else, so that a caller always knows which one its slots
        belong to. None means that there is no server now.
        """
        if self._ready is not None:
            if self._link is not None:  # Its server has gone, and a new one is there already.
                self._fail(self._link, ConnectionResetError("the server closed the connection"))
            self._link, self._ready = self._ready, None
        return None if self._link is None else self._link.welcome

    def close(self) -> None:
        """Say goodbye and end the thread."""
        self.send(wire.Bye())
        self._closed.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(self._options.hello_deadline + 1.0)
        for link in (self._link, self._ready):
            if link is not None:
                link.close()
        self._link = self._ready = None

    def lookup(self, keys: bytes, start: int, tenant: str = "") -> wire.Found | None:
        """Ask for a prefix; see `protocol.Lookup`. The answer's `seq` is the lease's number."""
        return self._find(wire.Lookup(next(self._seq), keys, start, tenant))

    def fetch(self, keys: bytes) -> wire.Found | None:
        """Ask the same, for blocks whose use another lookup was."""
        return self._find(wire.Lookup(next(self._seq), keys, 0, use=False))

    def _find(self, lookup: wire.Lookup) -> wire.Found | None:
        found = self._call(lookup, wire.Found)
        if found is not None and found.within and (link := self._link) is not None:
            link.awaited.add(found.seq)
        return found

    def answer(self, lease: int, patience: float = 0.0) -> wire.Found | None:
        """Return what became of a lookup that had to wait; None if not yet.

        Waits for anything to arrive for `patience` seconds at most. It is kept until it was asked
        for, or until `abandon`.
        """
        if (link := self._drained()) is None:
            return None
        if patience and lease not in link.found:
            link.await_anything(patience)
            if (link := self._drained()) is None:
                return None
        return link.found.pop(lease, None)

    def abandon(self, lease: int) -> None:
        """Keep no second answer to a lookup; its lease is still to be released."""
        if (link := self._link) is not None:
            link.awaited.discard(lease)
            link.found.pop(lease, None)

    def step(self, step: wire.Step) -> wire.Granted | None:
        """Send a step and wait for the slots that it needs."""
        step.seq = next(self._seq)
        return self._call(step, wire.Granted)

    def map_slab(self, slab: int) -> tuple[int, int] | None:
        """Return a slab's descriptor, now the caller's, and its bytes; None if it is gone."""
        mapped = self._call(wire.MapSlab(next(self._seq), slab), wire.Mapped)
        if mapped is None or not mapped.slab_bytes or (link := self._link) is None:
            return None
        return link.descriptors.popleft(), mapped.slab_bytes

    def reset(self) -> wire.Done | None:
        """Drop the namespace's blocks."""
        return self._call(wire.Reset(next(self._seq)), wire.Done)

    def drop(self, keys: bytes) -> wire.Done | None:
        """Drop blocks of the namespace from all tiers."""
        return self._call(wire.Drop(next(self._seq), keys), wire.Done)

    def sizes(self) -> wire.Known | None:
        """Ask for the shard sizes of namespaces that are like this one otherwise."""
        return self._call(wire.Sizes(next(self._seq)), wire.Known)

    def send(self, frame: wire.Frame) -> bool:
        """Send a frame that wants no reply now. Returns whether it was handed to the kernel."""
        if (link := self._link) is None:
            return False
        try:
            link.send(frame, time.monotonic() + self._options.deadline)
        except (OSError, ProtocolError) as error:
            self._fail(link, error)
            return False
        return True

    def send_step(self, step: wire.Step) -> bool:
        """Send a step whose slots, if it asks for stock, are picked up by `grants` later."""
        if step.stock:
            step.seq = next(self._seq)
        return self.send(step)

    def grants(self) -> list[int]:
        """Return slots that arrived for earlier steps, without waiting."""
        if (link := self._drained()) is None:
            return []
        granted, link.granted = link.granted, []
        return granted

    def changes(self) -> list[wire.Changed]:
        """Return what the server told of its blocks since the last call, without waiting.

        A caller whose hello wants events must call this again and again: what nobody fetches is
        kept. What an earlier session told is forgotten with it.
        """
        if (link := self._drained()) is None:
            return []
        changed, link.changed = link.changed, []
        return changed

    def look(self) -> None:
        """Notice, without waiting, whether the server has closed the connection."""
        self.meet()  # The new connection may have been closed before anybody took it up.
        self._drained()

    def _drained(self) -> Link | None:
        if (link := self._link) is None:
            return None
        try:
            link.drain()
        except (OSError, ProtocolError) as error:
            self._fail(link, error)
            return None
        return link

    def _call(self, frame: Asked, reply: type[R]) -> R | None:
        if (link := self._link) is None:
            self.failures["absent"] += 1
            return None
        until = time.monotonic() + self._options.deadline
        try:
            link.send(frame, until)
            answer = link.receive(frame.seq, until)
        except (OSError, ProtocolError) as error:
            self._fail(link, error)
            return None
        if not isinstance(answer, reply):
            self._fail(link, ProtocolError("protocol", f"{answer!r} answers {frame!r}"))
            return None
        self._pause = self._options.pause_first
        return answer

    def _fail(self, link: Link, error: Exception) -> None:
        reason = "disconnect"
        if isinstance(error, TimeoutError):
            reason = "deadline"
        elif isinstance(error, ProtocolError):
            reason = "protocol"
        self.failures[reason] += 1
        if self._link is link:
            self._link = None
        self.before_loss()
        link.close()
        self._say(f"lost the kvtier server ({reason}: {error}): all prefixes miss until it is back")
        self._wanted.set()

    def _keep_connected(self) -> None:
        while not self._closed.is_set():
            self._wanted.wait(LOOK_SECONDS)
            self._wanted.clear()
            while self._alone and not self._closed.wait(self._pause):
                self._pause = min(self._pause * 2, self._options.pause_most)
                self._try_connect()

    @property
    def _alone(self) -> bool:
        """Whether a connection is wanted: an engine that rests does not notice a lost one."""
        link = self._link
        return self._ready is None and (link is None or link.hung_up)

    def _try_connect(self) -> None:
        try:
            link = Link(self._options.socket, self._hello, self._options.hello_deadline)
        except ProtocolError as error:
            self.failures["refused"] += 1
            self._say(f"the kvtier server refused this engine: {error}")
        except OSError as error:
            if isinstance(error, NOBODY_LISTENS):
                self._pause = self._options.pause_first
            self._say(f"no kvtier server at {self._options.socket} ({error.strerror or error})")
        else:
            self._said = ""
            self._log.info("connected to the kvtier server at %s", self._options.socket)
            self._ready = link

    def _say(self, text: str) -> None:
        """Log a sentence once, until another one takes its place."""
        if text != self._said:
            self._said = text
            self._log.warning("%s", text)


def _nothing() -> None:
    """Nothing is held."""
