"""Spans of what the cache does for a request: `kvtier.lookup`, `kvtier.load`, `kvtier.store`.

Off unless the connector's option `otlp_endpoint` is set; OpenTelemetry is imported only then, by
`otlp.py`. No call here raises or blocks, and no attribute says who asked, or for what: they are
those of `Attributes`, whatever a caller has.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import Logger
from typing import Protocol, TypedDict, Unpack
from urllib.parse import urlsplit

from ..errors import EngineError

LOOKUP = "kvtier.lookup"
LOAD = "kvtier.load"
STORE = "kvtier.store"


class Attributes(TypedDict, total=False):
    """What a span may say. Tokens are those of whole blocks."""

    requested_tokens: int
    """Of a lookup: of the request, as far as a cache may serve it."""
    device_tokens: int
    """Of a lookup: what the device held already."""
    hit_tokens: int
    """Of a lookup: what the server has ready beyond that."""
    tokens: int
    """Of a load or store: how much was to be copied."""
    bytes: int
    """Of a load or store: the same in bytes, on all ranks."""
    failed_blocks: int
    """Of a load or store: what could not be copied."""
    tier: str
    """Of all: the tier that was asked, or copied from or to."""


class Span(Protocol):
    """Something that began when it was made."""

    def end(self, **attributes: Unpack[Attributes]) -> None:
        """Say that it is over, and what came of it. A span that never ends is never sent."""


class Tracer(Protocol):
    """Where spans come from and go to."""

    def span(self, name: str, headers: Mapping[str, str] | None) -> Span:
        """Begin a span below the one that W3C trace headers name; without them, on its own."""

    def close(self) -> None:
        """Send what is left, for a bounded time."""


class NoSpan:
    """A span that nobody sees."""

    def end(self, **attributes: Unpack[Attributes]) -> None:
        """Do nothing."""


class NoTracer:
    """Tracing that is switched off."""

    def span(self, name: str, headers: Mapping[str, str] | None) -> Span:
        """Return the span that nobody sees."""
        return _NO_SPAN

    def close(self) -> None:
        """Do nothing."""


_NO_SPAN = NoSpan()


def make_tracer(endpoint: str | None, log: Logger) -> Tracer:
    """Return a tracer that sends to `endpoint`, an OTLP receiver's URL; without one, none.

    Raises EngineError if that is no such URL, or if OpenTelemetry is not installed.
    """
    if endpoint is None:
        return NoTracer()
    check_endpoint(endpoint)
    try:
        from .otlp import OTLPTracer  # noqa: PLC0415 (it needs OpenTelemetry)
    except ImportError as error:
        raise EngineError(
            f"otlp_endpoint is set, and OpenTelemetry is not installed ({error}): pip install "
            f"opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or leave otlp_endpoint out"
        ) from error
    return OTLPTracer(endpoint, log)


def check_endpoint(endpoint: str) -> None:
    """Raise EngineError unless this is the whole URL of an OTLP receiver."""
    if not _is_whole_url(endpoint):
        raise EngineError(
            f"kv_connector_extra_config: otlp_endpoint is {endpoint!r}, and must be the whole URL "
            f"of an OTLP receiver over HTTP, such as http://127.0.0.1:4318/v1/traces"
        )


def _is_whole_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    whole = bool(parts.hostname and parts.path.strip("/"))
    return whole and parts.scheme in {"http", "https"} and port != 0
