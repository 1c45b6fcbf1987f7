"""kvtier: a server of its own, to which engines connect by its socket."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ..rig import counter, transfer_config
from ..stack import start_server
from .base import ServerHost, Tiers

SETTINGS = """
disk: {admission: always}
redis: {timeout_seconds: 5}
"""
"""The other systems write every block to the lower tier, so this one does too. On a machine that is
as busy as these, Redis is given more time. All else is the default."""
LOWER = {Tiers.DISK: "disk", Tiers.REDIS: "redis"}


class KVTierHost(ServerHost):
    """`kvtier serve` with its socket and its blocks in one folder."""

    offers = frozenset({Tiers.HOST, Tiers.DISK, Tiers.REDIS})

    def start(self) -> None:
        """Start the server; its memory is there when it is ready."""
        self._server = start_server(self.place.folder, *self._options())
        self._server.wait()

    def settings(self) -> Mapping[str, object]:
        """Return its settings in force."""
        config: dict[str, object] = json.loads(self.server.get("/v1/config"))
        return config

    def engine_options(self) -> list[str]:
        """Return the connector's configuration, which names the socket."""
        extra = self.place.setup.kvtier_connector
        return ["--kv-transfer-config", transfer_config(self.server, **extra)]

    def counts_at(self) -> Sequence[str]:
        """Return the server's URL: to vLLM, all that comes through the connector is from L1."""
        return (self.server.url,)

    def engines(self) -> int:
        """Return the open sessions: a scheduler's and its workers' for each engine."""
        return len(json.loads(self.server.get("/v1/sessions")))

    def empty_memory(self) -> None:
        """Drop all namespaces from the host tier."""
        for space in json.loads(self.server.get("/v1/namespaces")):
            where = {"namespace": space["digest"], "tier": "host"}
            self.server.post("/v1/blocks/drop", where)

    def waiting(self) -> float:
        """Return the bytes that wait to be written to a lower tier."""
        tier = LOWER.get(self.place.setup.tiers)
        if tier is None:
            return 0.0
        return counter(self.server, "kvtier_queued_bytes", tier=tier, op="write")

    def stored(self) -> float:
        """Return the blocks that engines have stored."""
        return counter(self.server, "kvtier_stores_total", outcome="committed")

    def served(self) -> Mapping[Tiers, float]:
        """Return the tokens that each tier served."""
        return {
            tier: counter(self.server, "kvtier_tokens_hit_total", tier=tier.value)
            for tier in (Tiers.HOST, Tiers.DISK, Tiers.REDIS)
        }

    def _options(self) -> list[str]:
        settings = self.place.folder / "kvtier.yaml"
        settings.write_text(SETTINGS + self.place.setup.kvtier_settings)
        options = ["--config", str(settings), "--capacity", f"{self.place.setup.host_mib}MiB"]
        if self.place.setup.tiers is Tiers.DISK:
            options += ["--disk", str(self.place.blocks)]
        if self.place.redis is not None:
            options += ["--redis", self.place.redis.url]
        return options
