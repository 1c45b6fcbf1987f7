"""Where a process answers HTTP, and whether it does. Used to watch children of this machine."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""Addresses that mean all of a machine's, and where the machine itself reaches them."""
PROBE_SECONDS = 2.0
"""Longest wait of one question. None of them is worth more: it is asked again."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a process answers HTTP: a host and port, or a unix socket."""

    host: str
    port: int
    tls: bool = False
    uds: str | None = None

    @property
    def url(self) -> str:
        """Return what a client connects to."""
        if self.uds:
            return f"http+unix://{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes] | None:
        """Return status and body of a GET, or None if nobody answers. Takes PROBE_SECONDS."""
        connection = self._connection()
        try:
            if self.uds:
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(PROBE_SECONDS)
                connection.sock.connect(self.uds)
            connection.request("GET", path, headers=dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def is_taken(self) -> bool:
        """Return whether another process listens there already."""
        if self.uds:
            return listens(Path(self.uds))
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            with socket.create_server((self.host, self.port), family=family):
                return False
        except OSError as error:
            return error.errno == errno.EADDRINUSE

    def _connection(self) -> http.client.HTTPConnection:
        if not self.tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=PROBE_SECONDS)
        # Only to see whether our own child is up: its certificate is for others to check.
        context = ssl._create_unverified_context()  # noqa: S323, SLF001
        return http.client.HTTPSConnection(
            self.host, self.port, timeout=PROBE_SECONDS, context=context
        )


def listens(path: Path) -> bool:
    """Return whether a living process listens on the unix socket `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    """Return a TCP port that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
        return port
