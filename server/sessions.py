"""Sessions and engines: who holds which leases and reservations.

A lease or a reservation belongs to a session and ends with it. When a scheduler's session is lost
while a worker of the same engine lives on, that worker may still be copying: what the session held
then waits in limbo until the engine says that all copies ended, or until its last worker is gone.
"""

from __future__ import annotations

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
