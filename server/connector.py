"""The vLLM connector: a façade, one line a hook, over the two halves in `engine/`.

Found by name through the `vllm.general_plugins` entry point, or by the module path
`kvtier.connector`. Needs `kv_load_failure_policy` "recompute": a block that cannot be loaded is
then computed, and no request fails because of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .engine.halves import Scheduler, Worker
from .engine.plan import StepPlan, WorkerReport
from .engine.stats import ConnectorMetrics, ConnectorStats

NAME = "KVTierConnector"
log = init_logger("vllm.kvtier")


def register() -> None:
    """Make the connector known to vLLM by name. Called in every process, any number of times."""
    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 (it has no question for this)
        KVConnectorFactory.register_connector(NAME, __name__, NAME)


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads and stores prefix blocks through the kvtier server on this host."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        half = Scheduler if role is KVConnectorRole.SCHEDULER else Worker
        self._half: Any = half(vllm_config, kv_cache_config, log)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is only a later miss."""
        return False

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._half.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._half.layout

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Start of a step, before vLLM writes any block in it."""
        assert isinstance(kv_connector_metadata, StepPlan), "the scheduler side built it"
        self._half.side.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._half.side.load(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No forward pass needs a load that is under way: see `get_num_new_matched_tokens`."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """Blocks are stored whole, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        self._half.side.store(self._plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._half.side.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._half.side.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._half.side.take_report()

    # Scheduler side.

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._half.meet_workers(metadata)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._half.bind(kv_cache_manager)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        matched = self._half.side.matched_tokens(request, num_computed_tokens)
        return matched, bool(matched) and self._half.side.asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._half.side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._half.side.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._half.side.stepped()
        if connector_output.invalid_block_ids:
            self._half.side.distrust()
        if isinstance(report := connector_output.kv_connector_worker_meta, WorkerReport):
            self._half.side.reported(report)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._half.side.finished(request, block_ids[0] if block_ids else ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, as MultiConnector says it beside a child that knows one group only."""
        return self._half.side.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether vLLM should go on stepping although no request is left."""
        return self._half.side.busy

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._half.side.take_stats()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        return self._half.side.reset()

    def take_events(self) -> Iterable[Any]:
        return self._half.side.take_events()

    def shutdown(self) -> None:
        self._half.close()

    @property
    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan), "vLLM hands over what the scheduler side built"
        return plan
