"""Spans through OpenTelemetry: queued without waiting, sent by a thread of their own.

A receiver that is slow, absent or wrong costs spans and nothing else: at most `QUEUE_SPANS` wait,
and what comes on top is dropped. Needs opentelemetry-sdk and its OTLP exporter over HTTP.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from logging import Logger
from typing import Any, Unpack

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .tracing import Attributes, NoSpan, Span

SERVICE = "kvtier-engine"
QUEUE_SPANS = 2048
BATCH_SPANS = 512
SEND_MILLISECONDS = 1000
"""How long spans wait for company."""
EXPORT_SECONDS = 3.0
"""Longest try to deliver one batch."""
CLOSE_SECONDS = 2.0


class OTLPTracer:
    """Tracing that is switched on. Makes no use of OpenTelemetry's globals: those are vLLM's."""

    def __init__(self, endpoint: str, log: Logger) -> None:
        self._log = log
        self._faulty = False
        # At the process's end, the provider's own hook would wait half a minute.
        self._provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: SERVICE}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                QuietExporter(endpoint, log),
                max_queue_size=QUEUE_SPANS,
                max_export_batch_size=BATCH_SPANS,
                schedule_delay_millis=SEND_MILLISECONDS,
            )
        )
        self._tracer = self._provider.get_tracer("kvtier")
        self._headers = TraceContextTextMapPropagator()

    def span(self, name: str, headers: Mapping[str, str] | None) -> Span:
        """Begin a span; see `tracing.Tracer`."""
        try:
            parent = self._headers.extract(headers or {})
            return OTLPSpan(self._tracer.start_span(name, context=parent), self.failed)
        except Exception as error:  # noqa: BLE001 (tracing never makes vLLM fail)
            self.failed(error)
            return NoSpan()

    def failed(self, error: Exception) -> None:
        """Say once that OpenTelemetry raised, which it should not."""
        if not self._faulty:
            self._log.warning("OpenTelemetry failed, and spans are missing: %r", error)
        self._faulty = True

    def close(self) -> None:
        """Send what is left, for `CLOSE_SECONDS` at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="OtelClose", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class OTLPSpan:
    """A span of OpenTelemetry."""

    def __init__(self, span: Any, failed: Any) -> None:
        self._span = span
        self._failed = failed

    def end(self, **attributes: Unpack[Attributes]) -> None:
        """Queue it; see `tracing.Span`."""
        try:
            self._span.set_attributes(attributes)
            self._span.end()
        except Exception as error:  # noqa: BLE001 (tracing never makes vLLM fail)
            self._failed(error)


class QuietExporter(SpanExporter):
    """OpenTelemetry's exporter, which says once that an outage began, and once that it is over.

    By itself, it writes several lines for each batch.
    """

    def __init__(self, endpoint: str, log: Logger) -> None:
        self._exporter: Any = trace_exporter.OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)
        self._endpoint = endpoint
        self._log = log
        self._lost = 0
        logging.getLogger(trace_exporter.__name__).addFilter(_from_other_threads)

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Send a batch. Blocks for `EXPORT_SECONDS`; runs in the processor's thread."""
        _EXPORTING.now = True
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                self._log.warning(
                    "spans arrive at %s again; %d were lost", self._endpoint, self._lost
                )
            self._lost = 0
        else:
            if not self._lost:
                self._log.warning(
                    "spans do not arrive at %s and are dropped until they do", self._endpoint
                )
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Let go of the connection."""
        self._exporter.shutdown()


_EXPORTING = threading.local()


def _from_other_threads(_record: logging.LogRecord) -> bool:
    """Return whether a record of the exporter's is not about ours."""
    return not getattr(_EXPORTING, "now", False)
