"""What `kv_connector_extra_config` may say, read strictly."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..client import ClientOptions
from ..config import default_socket
from ..errors import EngineError
from .tracing import check_endpoint

KEYS = ("socket", "deadline_ms", "verify_loads", "otlp_endpoint")
DEADLINE_MS_AT_MOST = 60_000


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """How this engine deals with the server."""

    socket: Path
    deadline_ms: int = 250
    """Longest wait for one call."""
    verify_loads: bool = False
    """Seal what is stored and check it when it is loaded. Such engines share with each other."""
    otlp_endpoint: str | None = None
    """Where OpenTelemetry spans go (OTLP over HTTP); None for no spans."""

    @property
    def checksum(self) -> str:
        """Name of the checksum that seals blocks, for the manifest."""
        return "xxh3_128" if self.verify_loads else "none"

    def client(self) -> ClientOptions:
        """Return the client's options."""
        return ClientOptions(self.socket, deadline=self.deadline_ms / 1000)


def read_options(extra: Mapping[str, Any]) -> ConnectorOptions:
    """Return the options. Raises EngineError that names an unknown key or a bad value."""
    for key in extra:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1, cutoff=0.4)
            hint = f": did you mean {near[0]}?" if near else f": the keys are {', '.join(KEYS)}"
            raise EngineError(f"kv_connector_extra_config has an unknown key {key!r}{hint}")
    path = extra.get("socket", None)
    if path is not None and (not isinstance(path, str) or not path):
        raise EngineError(f"kv_connector_extra_config: socket is {path!r}, and must be a path")
    deadline = extra.get("deadline_ms", 250)
    if type(deadline) is not int or not 0 < deadline <= DEADLINE_MS_AT_MOST:
        raise EngineError(
            f"kv_connector_extra_config: deadline_ms is {deadline!r}, and must be a whole number "
            f"of milliseconds from 1 to {DEADLINE_MS_AT_MOST}"
        )
    verify = extra.get("verify_loads", False)
    if type(verify) is not bool:
        raise EngineError(
            f"kv_connector_extra_config: verify_loads is {verify!r}, and must be true or false"
        )
    if (endpoint := extra.get("otlp_endpoint")) is not None:
        check_endpoint(str(endpoint))
    return ConnectorOptions(Path(path) if path else default_socket(), deadline, verify, endpoint)
