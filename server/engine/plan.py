"""What scheduler side and worker side tell each other, through vLLM, for one engine step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


class Promise(NamedTuple):
    """Who promised slots: a server's start and the session with it. See `Welcome.released`."""

    server: str
    session: int


NOBODY = Promise("", 0)


class Move(NamedTuple):
    """One block's copy. `seed` is the start of its key: its checksum is bound to the key by it."""

    block: int
    """vLLM's block id."""
    slot: int
    """Packed slot."""
    seed: int


@dataclass
class Load:
    """All blocks that one request loads in a step, out of slots that `by` promised."""

    request: str
    by: Promise
    moves: list[Move]


@dataclass
class StepPlan(KVConnectorMetadata):
    """Copies of one step."""

    seq: int = 0
    """Rises by step; 0 when there is nothing to copy."""
    by: Promise = NOBODY
    """Who promised the slots of `stores`."""
    loads: list[Load] = field(default_factory=list)
    stores: list[Move] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    """Requests that ended; their blocks are vLLM's again once this plan is carried out."""
    fences: list[int] = field(default_factory=list)
    """Earlier plans whose stores read blocks that this step writes."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What the ranks did. `loaded`, `stored`: plan → ranks that are through, well or not."""

    loaded: dict[int, int] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    unloaded: set[int] = field(default_factory=set)
    """Slots that some rank could not load."""
    unreadable: set[int] = field(default_factory=set)
    """Of these, slots whose bytes are not what was promised: worthless to everybody."""
    unwritten: set[int] = field(default_factory=set)
    """Slots that some rank could not write."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return both reports as one."""
        assert isinstance(other, WorkerReport), "all ranks run one connector"
        return WorkerReport(
            _summed(self.loaded, other.loaded),
            _summed(self.stored, other.stored),
            self.unloaded | other.unloaded,
            self.unreadable | other.unreadable,
            self.unwritten | other.unwritten,
        )

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.loaded or self.stored)


def _summed(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    summed = dict(one)
    for plan, ranks in other.items():
        summed[plan] = summed.get(plan, 0) + ranks
    return summed
