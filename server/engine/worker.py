"""The worker side: copies between vLLM's pages and slots, as the plan of each step says.

Copies are done when the call returns, so a block is stored after the forward pass that filled it
and before anyone can reuse it. What cannot be read is reported to vLLM by block, which computes it
again; what cannot be written is reported to the scheduler side, which never commits it.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from logging import Logger

import torch

from ..client import Client
from ..core import Manifest, unpack_slot
from ..errors import EngineError
from .paging import HostPaging
from .plan import StepPlan, WorkerReport
from .stats import ConnectorStats


class WorkerSide:
    """One rank's half of the connector."""

    def __init__(
        self, client: Client, paging: HostPaging, manifest: Manifest, rank: int, log: Logger
    ) -> None:
        self._stats = ConnectorStats()
        self._client = client
        self._paging = paging
        self._manifest = manifest
        self._offset = rank * manifest.shard_stride
        self._log = log
        self._server = ""
        self._slabs: dict[int, torch.Tensor] = {}
        self._failed_blocks: set[int] = set()
        self._finished: set[str] = set()
        self._report = WorkerReport()

    def start(self) -> None:
        """Connect, and map the slabs that hold blocks already, so that no hit waits for it."""
        self._client.start()
        if (welcome := self._client.meet()) is not None:
            self._server = welcome.server
            for slab in welcome.slabs:
                self._map(slab)

    def load(self, plan: StepPlan) -> None:
        """Copy slots into blocks, before the forward pass that reads them."""
        if not plan.loads:
            return
        began = time.perf_counter()
        valid = self._valid(plan)
        failed = set()
        for block, slot in plan.loads:
            shard = self._shard(slot) if valid else None
            if shard is None:
                failed.add(block)
            else:
                self._paging.load(block, shard)
        self._count("load", "loaded", len(plan.loads), len(failed), began)
        if failed:
            self._failed_blocks |= failed
            self._log.warning(
                "%d of %d blocks could not be loaded and are computed again",
                len(failed),
                len(plan.loads),
            )

    def store(self, plan: StepPlan) -> None:
        """Copy blocks into slots, after the forward pass that filled them."""
        if plan.stores:
            began = time.perf_counter()
            valid = self._valid(plan)
            failed = set()
            for block, slot in plan.stores:
                shard = self._shard(slot) if valid else None
                if shard is None:
                    failed.add(slot)
                else:
                    self._paging.store(block, shard)
            self._count("store", "stored", len(plan.stores), len(failed), began)
            self._report.failed |= failed
        if plan.seq:
            self._report.done[plan.seq] = 1
        self._finished.update(plan.finished)

    def take_stats(self) -> ConnectorStats | None:
        """Return what was copied since the last call; None if nothing was."""
        stats, self._stats = self._stats, ConnectorStats()
        return None if stats.is_empty() else stats

    def take_finished(self) -> set[str]:
        """Return requests whose blocks may be freed since the last call."""
        finished, self._finished = self._finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Return blocks that were not loaded since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """Return what was done since the last call; None if there was nothing to do."""
        report, self._report = self._report, WorkerReport()
        return report if report.done else None

    def close(self) -> None:
        """Leave the server and let go of its memory."""
        self._client.close()
        self._slabs.clear()

    def _count(self, kind: str, done: str, blocks: int, failed: int, began: float) -> None:
        self._stats.add(f"{kind}_seconds", time.perf_counter() - began)
        self._stats.add(f"{done}_blocks", blocks - failed)
        self._stats.add(f"{done}_bytes", (blocks - failed) * self._manifest.shard_bytes)
        self._stats.add(f"{kind}_failed_blocks", failed)

    def _valid(self, plan: StepPlan) -> bool:
        """Return whether the plan's slots are still promised, and by the server we are with."""
        welcome = self._client.meet()
        if welcome is None or welcome.server != plan.server or plan.session <= welcome.released:
            return False
        if welcome.server != self._server:
            self._slabs.clear()
            self._server = welcome.server
        return True

    def _shard(self, slot: int) -> torch.Tensor | None:
        ref = unpack_slot(slot)
        slab = self._slabs.get(ref.slab)
        if slab is None and (slab := self._map(ref.slab)) is None:
            return None
        start = ref.index * self._manifest.slot_bytes + self._offset
        return slab[start : start + self._manifest.shard_bytes]

    def _map(self, number: int) -> torch.Tensor | None:
        mapped = self._client.map_slab(number)
        if mapped is None:
            return None
        descriptor, size = mapped
        try:
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            self._log.warning("cannot map slab %d of %d bytes: %s", number, size, error)
            return None
        finally:
            os.close(descriptor)
        slab = self._slabs[number] = torch.frombuffer(memory, dtype=torch.uint8)
        return slab


def page_host(caches: Sequence[torch.Tensor], blocks: int) -> HostPaging:
    """Return the paging of caches in host memory. Raises EngineError for another device."""
    if caches[0].device.type != "cpu":
        raise EngineError(
            f"kvtier copies from and to KV caches in host memory only, and these are on "
            f"{caches[0].device.type}: run vLLM on CPU for now"
        )
    return HostPaging(caches, blocks)
