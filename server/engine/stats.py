"""What the connector did, in vLLM's own `/metrics`: copies, their time, and misses by reason.

Names are `kvtier_engine_<what>_total`. vLLM carries the numbers of each interval from the workers
and the scheduler to the process that serves `/metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ..client import FAILURES
from .requests import Bypass

COPIES = {
    "loaded_blocks": "Blocks copied from the kvtier server's slots into the KV cache.",
    "loaded_bytes": "Bytes of these blocks, on all ranks.",
    "load_seconds": "Time that these copies took, summed over ranks.",
    "load_failed_blocks": "Blocks that could not be loaded and were computed again.",
    "corrupt_blocks": "Blocks whose checksum was wrong when they were to be loaded.",
    "stored_blocks": "Blocks copied from the KV cache into the kvtier server's slots.",
    "stored_bytes": "Bytes of these blocks, on all ranks.",
    "store_seconds": "Time that these copies took, summed over ranks.",
    "store_failed_blocks": "Blocks that could not be stored.",
}
MISSES = "misses"
BYPASSED = "bypassed_requests"
NOT_NUMBERS = "bad_deltas"


class ConnectorStats(KVConnectorStats):
    """Sums of one interval by name; a miss counts under `misses` and its reason."""

    def add(self, name: str, amount: float) -> None:
        """Add to one sum."""
        self.data[name] = self.data.get(name, 0) + amount

    def reset(self) -> None:
        """Forget the interval."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return this one with the sums of another added."""
        for name, amount in other.data.items():
            self.add(name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the sums for vLLM's log line."""
        return {name: round(amount, 4) for name, amount in self.data.items()}

    def is_empty(self) -> bool:
        """Return whether nothing happened."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """The counters, in the classes that vLLM registers its own with."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[int, str], Any] = {}
        for name, about in COPIES.items():
            counter = self._counter_cls(
                name=f"kvtier_engine_{name}", documentation=about, labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = counter.labels(*values)
        self._by_reason(MISSES, "Calls to the kvtier server that failed: each is a miss.", FAILURES)
        self._by_reason(
            BYPASSED, "Requests that neither load nor store, by what they are.", tuple(Bypass)
        )
        self._by_reason(NOT_NUMBERS, "Readings that were no counts and were left out.", ("value",))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval. What is negative or no number is left out and counted."""
        for name, amount in transfer_stats_data.items():
            counter = self._counters.get((engine_idx, name))
            sound = isinstance(amount, int | float) and math.isfinite(amount) and amount >= 0
            if counter is None or not sound:
                self._counters[engine_idx, f"{NOT_NUMBERS}:value"].inc()
            else:
                counter.inc(amount)

    def _by_reason(self, name: str, about: str, reasons: tuple[str, ...]) -> None:
        counter = self._counter_cls(
            name=f"kvtier_engine_{name}",
            documentation=about,
            labelnames=[*self._labelnames, "reason"],
        )
        for engine, values in self.per_engine_labelvalues.items():
            for reason in reasons:
                self._counters[engine, f"{name}:{reason}"] = counter.labels(*values, reason)
