"""Start of the two halves: checks, manifest, connection.

The scheduler half knows the layout of the pages, and so the namespace, only once vLLM has handed
over what the workers found; it connects then.
"""

from __future__ import annotations

from logging import Logger
from typing import Any

from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from ..client import Client
from ..core import Manifest, Role
from ..errors import EngineError
from ..protocol import PROTOCOL_VERSION, Hello
from .account import Account
from .devices import page_caches
from .events import EventFeed
from .manifest import WorkerLayout, check_engine, kv_replicas, make_manifest
from .options import read_options
from .scheduler import SchedulerOptions, SchedulerSide
from .tracing import make_tracer
from .worker import Place, WorkerSide


class Half:
    """What both halves know from vLLM's configuration. Raises EngineError at start."""

    layout: WorkerLayout | None = None

    def __init__(self, vllm_config: Any, kv_cache_config: Any, log: Logger) -> None:
        transfer = vllm_config.kv_transfer_config
        self.options = read_options(transfer.kv_connector_extra_config)
        check_engine(vllm_config, kv_cache_config)
        if transfer.kv_load_failure_policy != "recompute":
            log.warning(
                "kv_load_failure_policy is %r: a block that cannot be loaded fails its request. "
                'Set it to "recompute" in --kv-transfer-config',
                transfer.kv_load_failure_policy,
            )
        self.config = vllm_config
        self.cache_config = kv_cache_config
        self.log = log

    def client(self, role: Role, rank: int, manifest: Manifest, *, events: bool = False) -> Client:
        """Return a client that is not started yet; `events` if it is to be told of changes."""
        engine = str(self.config.kv_transfer_config.engine_id)
        hello = Hello(PROTOCOL_VERSION, role, engine, rank, manifest, events)
        return Client(self.options.client(), hello, self.log)


class Scheduler(Half):
    """The half beside vLLM's scheduler. `side` is None until the workers are known."""

    side: SchedulerSide | None = None
    cache_manager: Any = None

    def meet_workers(self, layouts: dict[int, WorkerLayout]) -> None:
        """Make the manifest from what the workers found, and connect."""
        if not all(isinstance(each, WorkerLayout) for each in layouts.values()):
            raise EngineError(
                "another connector took the handshake that kvtier needs: list KVTierConnector "
                "first among the connectors of MultiConnector"
            )
        different = {(each.shard_bytes, each.layout) for each in layouts.values()}
        if len(different) != 1:
            raise EngineError(
                f"the ranks of this engine lay out their KV caches in {len(different)} ways, and "
                f"kvtier needs one"
            )
        layout = next(iter(layouts.values()))
        manifest = make_manifest(self.config, layout, self.options.checksum)
        events = self.config.kv_events_config
        feed = None
        if events is not None and events.enable_kv_cache_events:
            [group] = self.cache_config.kv_cache_groups
            kind = get_kv_cache_spec_kind(group.kv_cache_spec)
            feed = EventFeed(manifest.block_tokens, spec_kind=kind.value)
        tracer = make_tracer(self.options.otlp_endpoint, self.log)
        client = self.client(Role.SCHEDULER, 0, manifest, events=feed is not None)
        client.start()
        options = SchedulerOptions(
            block_tokens=manifest.block_tokens,
            block_bytes=manifest.shard_bytes * manifest.shards,
            ranks=self.config.parallel_config.tensor_parallel_size,
            asynchronous=layout.asynchronous,
        )
        self.side = SchedulerSide(Account(client, self.log), options, self.log, tracer, feed)
        self.side.cache_manager = self.cache_manager

    def bind(self, cache_manager: Any) -> None:
        """Take vLLM's own cache manager, which comes before the workers are known."""
        self.cache_manager = cache_manager

    def close(self) -> None:
        """Leave the server."""
        if self.side is not None:
            self.side.close()


class Worker(Half):
    """The half of one rank. `side` is None until vLLM has registered its KV caches."""

    side: WorkerSide | None = None
    page_caches = staticmethod(page_caches)

    def register(self, caches: dict[str, Any]) -> None:
        """Find out how pages lie in the caches, connect, and map slabs."""
        group = self.cache_config.kv_cache_groups[0]
        tensors = [caches[name] for name in group.layer_names]
        paging = self.page_caches(tensors, self.cache_config.num_blocks)
        self.layout = WorkerLayout(
            paging.shard_bytes, paging.layout, paging.layers, paging.asynchronous
        )
        manifest = make_manifest(self.config, self.layout, self.options.checksum)
        rank, replicas = self.config.parallel_config.rank, kv_replicas(self.config)
        client = self.client(Role.WORKER, rank, manifest)
        place = Place(rank // replicas, rank % replicas, replicas)
        self.side = WorkerSide(client, paging, manifest, place, self.log)
        self.side.start()

    def close(self) -> None:
        """Leave the server and let go of its memory."""
        if self.side is not None:
            self.side.close()
