"""The worker side: copies between vLLM's pages and slots, as the plan of each step says.

What cannot be read is reported to vLLM by block, which computes it again; what cannot be written
is reported to the scheduler side, which never commits it. Where copies are done when the call
returns, a step's loads come before its forward pass and its stores after it. Where they go on
beside the model, vLLM holds a request back until its load is reported, and plans name the stores
that have to be over before a block is written again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from logging import Logger

import torch

from ..client import Client
from ..core import Manifest, unpack_slot
from .paging import DONE, Copy, Paging, Transfer
from .plan import Load, Move, Promise, StepPlan, WorkerReport
from .seal import seal, sound
from .slabs import Slabs
from .stats import ConnectorStats

COPIES_SECONDS = 1.0
"""Longest wait for copies that were started, when the connection to the server is lost."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands among those that hold the same KV heads.

    `shard`: number of its shard in a slot. Of `replicas` ranks with equal bytes it is the
    `replica`-th: all of them load, and each slot is written by one.
    """

    shard: int = 0
    replica: int = 0
    replicas: int = 1

    def writes(self, slot: int) -> bool:
        """Return whether this rank is the one that writes the slot."""
        return unpack_slot(slot).index % self.replicas == self.replica


@dataclass(slots=True)
class Job:
    """Copies under way. `request` is empty for stores."""

    plan: int
    request: str
    began: float
    moves: list[Move] = field(default_factory=list)
    shards: list[torch.Tensor] = field(default_factory=list)
    """Memory of each move's shard and seal: it stays mapped as long as the job lives."""
    failed: set[int] = field(default_factory=set)
    """Slots that could not be copied from or to."""
    unreadable: set[int] = field(default_factory=set)
    transfer: Transfer = DONE

    def add(self, move: Move, whole: torch.Tensor) -> None:
        """Take a move into the job: `whole` are the bytes of its shard and seal."""
        self.moves.append(move)
        self.shards.append(whole)


class WorkerSide:
    """One rank's half of the connector."""

    def __init__(
        self, client: Client, paging: Paging, manifest: Manifest, place: Place, log: Logger
    ) -> None:
        self._client = client
        self._paging = paging
        self._manifest = manifest
        self._place = place
        self._log = log
        self._server = ""
        self._slabs = Slabs(client, paging, manifest, place.shard, log)
        self._loads: list[Job] = []
        self._stores: dict[int, Job] = {}
        self._spoiled = 0
        """The plan whose loads failed while its step computed on: it stores nothing."""
        self._failed_blocks: set[int] = set()
        self._received: set[str] = set()
        self._finished: set[str] = set()
        self._report = WorkerReport()
        self._stats = ConnectorStats()

    def start(self) -> None:
        """Connect, and map the slabs that hold blocks already, so that no hit waits for it."""
        self._client.before_loss = self._wait_for_copies
        self._client.start()
        if (welcome := self._client.meet()) is not None:
            self._server = welcome.server
            for slab in welcome.slabs:
                self._slabs.map(slab)

    # vLLM's hooks, in the order of a step.

    def begin(self, plan: StepPlan) -> None:
        """Make sure that blocks which this step writes have been read by earlier stores.

        A worker seldom asks the server anything, so it looks here whether that is still there.
        """
        self._client.look()
        self._paging.begin_step()
        jobs = (self._stores.get(seq) for seq in plan.fences)
        if waited_for := [job.transfer for job in jobs if job is not None]:
            self._paging.fence(waited_for)

    def load(self, plan: StepPlan) -> None:
        """Copy slots into blocks, or start to."""
        for load in plan.loads:
            self._load(plan.seq, load)
        if plan.loads:
            self._poll_loads()

    def store(self, plan: StepPlan) -> None:
        """Copy blocks into slots, after the forward pass that filled them, or start to."""
        if plan.stores:
            self._store(plan)
            self._poll_stores()
        self._finished.update(plan.finished)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return requests whose blocks may be freed, and those whose loads are over."""
        self._poll_loads()
        self._poll_stores()
        finished, self._finished = self._finished, set()
        received, self._received = self._received, set()
        return finished, received

    def take_failed_blocks(self) -> set[int]:
        """Return blocks that were not loaded since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_stats(self) -> ConnectorStats | None:
        """Return what was copied since the last call; None if nothing was."""
        stats, self._stats = self._stats, ConnectorStats()
        return None if stats.is_empty() else stats

    def take_report(self) -> WorkerReport | None:
        """Return what was done since the last call; None if nothing came to its end."""
        if self._report.empty:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def close(self) -> None:
        """Let go of the server's memory when all copies are over, and leave."""
        self._paging.close()
        self._slabs.clear()
        self._client.close()

    # Loads.

    def _load(self, seq: int, load: Load) -> None:
        job = Job(seq, load.request, time.perf_counter())
        if self._valid(load.by):
            for move in load.moves:
                whole = self._slabs.shard(move.slot)
                if whole is not None and self._sound(move, whole):
                    job.add(move, whole)
                elif whole is not None:
                    job.unreadable.add(move.slot)
        if self._valid(load.by):
            copies = zip(job.moves, job.shards, strict=True)
            job.transfer = self._paging.load([self._copy(*each) for each in copies])
        else:
            job.moves.clear()
        copied = {move.slot for move in job.moves}
        if failed := [move for move in load.moves if move.slot not in copied]:
            job.failed = {move.slot for move in failed}
            self._failed_blocks.update(move.block for move in failed)
            if not self._paging.asynchronous:
                self._spoiled = seq
            self._stats.add("load_failed_blocks", len(failed))
            self._log.warning(
                "%d of %d blocks could not be loaded and are computed again",
                len(failed),
                len(load.moves),
            )
        self._loads.append(job)

    def _sound(self, move: Move, whole: torch.Tensor) -> bool:
        """Return whether a shard is what was sealed. Where nothing is sealed it is believed."""
        size = self._manifest.shard_bytes
        if not self._manifest.seal_bytes or sound(whole[:size], whole[size:], move.seed):
            return True
        self._stats.add("corrupt_blocks", 1)
        return False

    def _poll_loads(self) -> None:
        going_on = []
        for job in self._loads:
            if not job.transfer.done():
                going_on.append(job)
                continue
            self._count("load", "loaded", job)
            self._report.unloaded |= job.failed
            self._report.unreadable |= job.unreadable
            if self._paging.asynchronous:
                self._received.add(job.request)
        over = {job.plan for job in self._loads} - {job.plan for job in going_on}
        self._report.loaded.update(dict.fromkeys(over, 1))
        self._loads = going_on

    # Stores.

    def _store(self, plan: StepPlan) -> None:
        job = Job(plan.seq, "", time.perf_counter())
        spoiled = plan.seq == self._spoiled
        ours = [move for move in plan.stores if spoiled or self._place.writes(move.slot)]
        if not spoiled and self._valid(plan.by):
            for move in ours:
                if (whole := self._slabs.shard(move.slot)) is not None:
                    job.add(move, whole)
        if not spoiled and self._valid(plan.by):
            copies = zip(job.moves, job.shards, strict=True)
            job.transfer = self._paging.store([self._copy(*each) for each in copies])
        else:
            job.moves.clear()
        copied = {move.slot for move in job.moves}
        job.failed = {move.slot for move in ours} - copied
        if job.failed:
            self._stats.add("store_failed_blocks", len(job.failed))
        self._stores[plan.seq] = job

    def _poll_stores(self) -> None:
        over = [job for job in self._stores.values() if job.transfer.done()]
        size = self._manifest.shard_bytes
        for job in over:
            del self._stores[job.plan]
            if self._manifest.seal_bytes:
                for move, whole in zip(job.moves, job.shards, strict=True):
                    seal(whole[:size], whole[size:], move.seed)
            self._count("store", "stored", job)
            self._report.unwritten |= job.failed
            self._report.stored[job.plan] = 1

    # What both need.

    def _wait_for_copies(self) -> None:
        """Wait, for a bounded time, until nothing is copied any more.

        The server gives slots away when it sees that no worker of the engine is connected.
        """
        end = time.monotonic() + COPIES_SECONDS
        self._paging.fence([job.transfer for job in self._stores.values()])  # None stays put off.
        jobs = [*self._loads, *self._stores.values()]
        while not all(job.transfer.done() for job in jobs):
            if time.monotonic() > end:
                self._log.error(
                    "copies have not ended in %g s, and the server is lost", COPIES_SECONDS
                )
                return
            time.sleep(COPIES_SECONDS / 1e4)

    def _copy(self, move: Move, whole: torch.Tensor) -> Copy:
        return Copy(move.block, whole[: self._manifest.shard_bytes])

    def _count(self, kind: str, done: str, job: Job) -> None:
        if job.moves:
            self._stats.add(f"{kind}_seconds", time.perf_counter() - job.began)
            self._stats.add(f"{done}_blocks", len(job.moves))
            self._stats.add(f"{done}_bytes", len(job.moves) * self._manifest.shard_bytes)

    def _valid(self, by: Promise) -> bool:
        """Return whether slots are still promised, and by the server that we are with.

        Asked again right before a copy starts: the connection may be lost while a slab is mapped,
        and the server gives slots away once no worker of the engine is there.
        """
        welcome = self._client.meet()
        if welcome is None or welcome.server != by.server or by.session <= welcome.released:
            return False
        if welcome.server != self._server:
            self._slabs.clear()
            self._server = welcome.server
        return True
