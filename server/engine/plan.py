"""What scheduler side and worker side tell each other, through vLLM, for one engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class StepPlan(KVConnectorMetadata):
    """Copies of one step. Pairs are (vLLM's block id, packed slot)."""

    seq: int = 0
    """Rises by step; 0 when there is nothing to copy."""
    server: str = ""
    session: int = 0
    """The scheduler's session that the slots were promised to: see `Welcome.released`."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    stores: list[tuple[int, int]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    """Requests that ended; their blocks are vLLM's again once this plan is carried out."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What the ranks did. `done`: plan → ranks that carried it out, well or not."""

    done: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    """Slots that some rank could not write."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return both reports as one."""
        assert isinstance(other, WorkerReport), "all ranks run one connector"
        done = dict(self.done)
        for seq, ranks in other.done.items():
            done[seq] = done.get(seq, 0) + ranks
        return WorkerReport(done, self.failed | other.failed)
