"""HTTP clients of the load generator: no proxy, no limit of connections."""

from __future__ import annotations

import functools
import ssl

import httpx

IDLE_SECONDS = 2.0
"""After which a connection is not used again: servers close idle ones after 5 s."""


def new_client(timeout: httpx.Timeout) -> httpx.AsyncClient:
    """Return a client that ignores the environment and opens a connection whenever it needs one."""
    no_limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_SECONDS
    )
    return httpx.AsyncClient(timeout=timeout, limits=no_limits, trust_env=False, verify=_tls())


@functools.cache
def _tls() -> ssl.SSLContext:
    # Made once: reading the certificates takes longer than many an answer.
    return ssl.create_default_context()
