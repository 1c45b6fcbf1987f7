"""LMCache in its multiprocess mode: a server of its own, from an environment of its own.

`make venv-lmcache` makes that environment. Settings are those of its documentation's quick start:
LRU and its watermarks, all transfer modes, shared memory between server and engines, and every
other one at its default. Its file adapter reads and writes through the page cache by default.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from kvtier.endpoints import free_port

from ..model import REPOSITORY
from ..stack import LOOPBACK, start_part
from .base import PeerError, Place, ServerHost, Tiers, tokens

ENVIRONMENT = REPOSITORY / ".venv-lmcache"
PYTHON = ENVIRONMENT / "bin" / "python"
SHARED_MEMORY = Path("/dev/shm")
ENTRY = "import sys; from lmcache.cli.main import main; sys.exit(main())"
DEFAULT_CHUNK = 256
START_SECONDS = 120.0
"""Importing it takes long."""
HEARTBEAT_SECONDS = 10.0
"""The default interval at which both halves of an engine look for the server, each by itself."""
LOWER_METRIC = "lmcache_mp_lookup_hit_l2_tokens_total"
HOST_METRIC = "lmcache_mp_lookup_hit_l1_tokens_total"


class LMCacheHost(ServerHost):
    """`lmcache server` with its blocks on disk in one folder."""

    offers = frozenset({Tiers.HOST, Tiers.DISK, Tiers.REDIS})
    python = str(PYTHON)
    away_seconds = 2.5 * HEARTBEAT_SECONDS
    environment: Mapping[str, str] = {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
    }

    def __init__(self, place: Place, chunk: int = DEFAULT_CHUNK) -> None:
        super().__init__(place)
        self._chunk = chunk
        """Tokens that it stores and finds together: a multiple of vLLM's block."""
        self._port = free_port(LOOPBACK)
        """The same after a restart: engines know it."""
        self._memory = f"lmcache-{self._port}"

    def start(self) -> None:
        """Start the server and wait for it. Raises PeerError where it is not installed."""
        if not PYTHON.exists():
            raise PeerError("LMCache is not installed: run `make venv-lmcache`.")
        web = free_port(LOOPBACK)
        command = ["-c", ENTRY, "server", *self._options(), "--http-port", str(web)]
        command += ["--prometheus-port", str(free_port(LOOPBACK))]
        part = start_part(self.place.folder, "lmcache", command, self.environment, self.python)
        url = f"http://{LOOPBACK}:{web}"
        self._server = dataclasses.replace(
            part, url=url, health="/healthcheck", limit=START_SECONDS
        )
        self._server.wait()

    def stop(self) -> None:
        """End the server; its memory goes too, which a server that is killed leaves behind."""
        super().stop()
        (SHARED_MEMORY / f"lmcache_l1_pool_{self._memory}").unlink(missing_ok=True)

    def restart(self) -> None:
        """End the server and start it again, and wait until its engines have found it.

        They look for it every 10 s, and wait 10 s for its answer. A server that is back before one
        of these looks has failed is never told of them again. A request that comes before they
        have found it waits for minutes, and so does one that comes while there is no server.
        """
        super().restart()
        time.sleep(HEARTBEAT_SECONDS)

    def settings(self) -> Mapping[str, object]:
        """Return the server's options."""
        return {"options": self._options(), "environment": dict(self.environment)}

    def engine_options(self) -> list[str]:
        """Return the connector's configuration, which names the server."""
        config = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{LOOPBACK}",
                "lmcache.mp.port": self._port,
                "lmcache.mp.mp_transfer_mode": "auto",
            },
        }
        return ["--kv-transfer-config", json.dumps(config)]

    def empty_memory(self) -> None:
        """Clear L1."""
        self.server.post("/cache/clear")

    def waiting(self) -> float:
        """Return the objects that are being written or read, to L1 or from there."""
        storage = json.loads(self.server.get("/status"))["storage_manager"]
        lower, host = storage["store_controller"], storage["l1_manager"]
        waits: int = lower["pending_keys_count"] + lower["in_flight_task_count"]
        return waits + float(host["write_locked_count"] + host["read_locked_count"])

    def stored(self) -> float:
        """Return the chunks that were written to L1."""
        return tokens(self.server, "lmcache_mp_l1_write_chunks_total")

    def served(self) -> Mapping[Tiers, float]:
        """Return the tokens that L1 and L2 served."""
        served = {Tiers.HOST: tokens(self.server, HOST_METRIC)}
        if (lower := self.place.setup.tiers) is not Tiers.HOST:
            served[lower] = tokens(self.server, LOWER_METRIC)
        return served

    def engines(self) -> int:
        """Return how many workers have said where their KV caches are."""
        status = json.loads(self.server.get("/status"))
        return len(status["registered_non_cuda_instance_ids"]) + len(status["registered_gpu_ids"])

    def _options(self) -> list[str]:
        """Return what the quick start sets, and what there must be one of for each server."""
        options = ["--host", LOOPBACK, "--port", str(self._port), "--http-host", LOOPBACK]
        options += ["--shm-name", self._memory, "--supported-transfer-mode", "auto"]
        options += ["--l1-size-gb", str(self.place.setup.host_mib / 1024)]
        options += ["--eviction-policy", "LRU", "--chunk-size", str(self._chunk)]
        for adapter in self._adapters():
            options += ["--l2-adapter", json.dumps(adapter)]
        return options

    def _adapters(self) -> list[dict[str, object]]:
        """Return its native adapters, which are its fastest: files or RESP."""
        if self.place.redis is not None:
            address = urlsplit(self.place.redis.url)
            return [{"type": "resp", "host": address.hostname, "port": address.port}]
        if self.place.setup.tiers is Tiers.DISK:
            return [{"type": "fs_native", "base_path": str(self.place.blocks)}]
        return []
