"""Start of the two halves: checks, manifest, connection.

The scheduler half knows the layout of the pages, and so the namespace, only once vLLM has handed
over what the workers found; it connects then.
"""

from __future__ import annotations

from logging import Logger
from typing import Any

from ..client import Client
from ..core import Manifest, Role
from ..errors import EngineError
from ..protocol import PROTOCOL_VERSION, Hello
from .manifest import WorkerLayout, check_engine, make_manifest
from .options import read_options
from .scheduler import SchedulerSide
from .worker import WorkerSide, page_host


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

    def client(self, role: Role, rank: int, manifest: Manifest) -> Client:
        """Return a client that is not started yet."""
        engine = str(self.config.kv_transfer_config.engine_id)
        hello = Hello(PROTOCOL_VERSION, role, engine, rank, manifest)
        return Client(self.options.client(), hello, self.log)


class Scheduler(Half):
    """The half beside vLLM's scheduler. `side` is None until the workers are known."""

    side: SchedulerSide | None = None

    def meet_workers(self, layouts: dict[int, WorkerLayout]) -> None:
        """Make the manifest from what the workers found, and connect."""
        different = {(each.shard_bytes, each.layout) for each in layouts.values()}
        if len(different) != 1:
            raise EngineError(
                f"the ranks of this engine lay out their KV caches in {len(different)} ways, and "
                f"kvtier needs one"
            )
        manifest = make_manifest(self.config, next(iter(layouts.values())))
        client = self.client(Role.SCHEDULER, 0, manifest)
        client.start()
        self.side = SchedulerSide(client, manifest.block_tokens, manifest.shards)

    def close(self) -> None:
        """Leave the server."""
        if self.side is not None:
            self.side.close()


class Worker(Half):
    """The half of one rank. `side` is None until vLLM has registered its KV caches."""

    side: WorkerSide | None = None

    def register(self, caches: dict[str, Any]) -> None:
        """Find out how pages lie in the caches, connect, and map slabs."""
        group = self.cache_config.kv_cache_groups[0]
        tensors = [caches[name] for name in group.layer_names]
        paging = page_host(tensors, self.cache_config.num_blocks)
        self.layout = WorkerLayout(paging.shard_bytes, paging.layout, paging.layers)
        manifest = make_manifest(self.config, self.layout)
        rank = self.config.parallel_config.rank
        client = self.client(Role.WORKER, rank, manifest)
        self.side = WorkerSide(client, paging, manifest, rank, self.log)
        self.side.start()

    def close(self) -> None:
        """Leave the server and let go of its memory."""
        if self.side is not None:
            self.side.close()
