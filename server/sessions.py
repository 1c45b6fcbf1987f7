"""Sessions and engines: who holds which leases and reservations.

A lease or a reservation belongs to a session and ends with it. When a scheduler's session is lost
while a worker of the same engine lives on, that worker may still be copying: what the session held
then waits in limbo until the engine says that all copies ended, or until its last worker is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .averages import averaged
from .core import Role
from .directory import Block, Namespace

RATE_WEIGHT = 0.2
"""Of the latest measure of an engine's prefill rate in the average."""


@dataclass(slots=True, eq=False)
class Session:
    """One open connection of an engine. `leases` go by number, `reserved` are packed slots."""

    number: int
    role: Role
    engine: Engine = field(repr=False)
    rank: int
    pid: int
    space: Namespace = field(repr=False)
    opened: float
    leases: dict[int, list[Block]] = field(default_factory=dict)
    reserved: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Limbo:
    """What a lost session held."""

    session: int
    space: Namespace
    leased: list[Block]
    reserved: set[int]


@dataclass(slots=True)
class Engine:
    """All sessions of one engine. `released`: up to this session number, all slots are gone."""

    name: str
    released: int
    sessions: dict[int, Session] = field(default_factory=dict)
    limbo: list[Limbo] = field(default_factory=list)
    prefill_rate: float | None = None
    """Prompt tokens that it computes in a second, as measured lately."""

    def computed(self, tokens: int, seconds: float) -> None:
        """Take note of prompt tokens that were computed, and of the time that they took."""
        if seconds > 0.0:
            self.prefill_rate = averaged(self.prefill_rate, tokens / seconds, RATE_WEIGHT)

    def past(self, before: int) -> list[Limbo]:
        """Take out of limbo what was lost with sessions up to `before`, which is left out."""
        gone = [lost for lost in self.limbo if lost.session < before]
        self.limbo = [lost for lost in self.limbo if lost.session >= before]
        self.released = max([self.released, *(lost.session for lost in gone)])
        return gone


class Roster:
    """The open sessions, by engine."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self._opened = 0

    def open(
        self, role: Role, engine: str, rank: int, pid: int, space: Namespace, now: float
    ) -> Session:
        """Begin a session."""
        if (home := self.engines.get(engine)) is None:
            home = self.engines[engine] = Engine(engine, released=self._opened)
        self._opened += 1
        session = Session(self._opened, role, home, rank, pid, space, now)
        home.sessions[session.number] = session
        space.sessions += 1
        return session

    def close(self, session: Session) -> list[Limbo]:
        """End a session. Returns what is free now; what workers may still copy stays in limbo."""
        engine = session.engine
        del engine.sessions[session.number]
        session.space.sessions -= 1
        leased = [block for blocks in session.leases.values() for block in blocks]
        if leased or session.reserved:
            engine.limbo.append(Limbo(session.number, session.space, leased, session.reserved))
        session.leases, session.reserved = {}, set()
        if not engine.sessions:
            del self.engines[engine.name]
        if any(other.role is Role.WORKER for other in engine.sessions.values()):
            return []
        return engine.past(self._opened + 1)

    def reserved(self, space: Namespace) -> list[int]:
        """Return the slots of a namespace that sessions, or what they lost, have reserved."""
        limbo = (lost for engine in self.engines.values() for lost in engine.limbo)
        return [slot for one in (*self, *limbo) if one.space is space for slot in one.reserved]

    def __iter__(self) -> Iterator[Session]:
        """Yield the open sessions of all engines."""
        return (one for engine in self.engines.values() for one in engine.sessions.values())
