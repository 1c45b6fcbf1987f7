"""Spans reach a real OTLP receiver below the request's own; a bad receiver disturbs nobody."""

from __future__ import annotations

import logging
import re
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import get_type_hints

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from kvtier.core import Tier
from kvtier.engine import otlp
from kvtier.engine.tracing import LOAD, LOOKUP, STORE, Attributes, NoTracer, make_tracer
from kvtier.errors import EngineError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support import until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
LOG = logging.getLogger("test.tracing")


class Receiver:
    """An OTLP receiver over HTTP. `status` is what it answers; `gate` holds answers back."""

    def __init__(self):
        self.requests = []
        self.status = 200
        self.gate = threading.Event()
        self.gate.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = receiver.status
                receiver.requests.append((self.path, self.headers["Content-Type"], body))
                receiver.gate.wait(30)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def scopes(self):
        """Return (resource attributes, span) of all spans that came."""
        found = []
        for _, _, body in list(self.requests):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = {each.key: each.value.string_value for each in resource.resource.attributes}
                found += [(about, span) for scope in resource.scope_spans for span in scope.spans]
        return found

    def spans(self):
        return {span.name: span for _, span in self.scopes()}

    def stop(self):
        self.gate.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(otlp, "SEND_MILLISECONDS", 20)
    monkeypatch.setattr(otlp, "EXPORT_SECONDS", 0.3)


@pytest.fixture
def receiver():
    started = Receiver()
    yield started
    started.stop()


@pytest.fixture
def tracers(receiver):
    """Makes tracers that end with the test, with every thread that they started.

    A thread that goes on draws random numbers for its pauses, and disturbs Hypothesis elsewhere.
    """
    started = []

    def start(endpoint):
        started.append(make_tracer(endpoint, LOG))
        return started[-1]

    yield start
    receiver.gate.set()
    for tracer in started:
        tracer.close()
    names = ("OtelBatch", "OtelClose")
    until(lambda: not any(t.name.startswith(names) for t in threading.enumerate()), "their end")


def values(span):
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


def test_spans_arrive_below_the_requests_with_their_attributes_and_times(receiver, tracers):
    tracer = tracers(receiver.endpoint)
    before = time.time_ns()
    load = tracer.span(LOAD, HEADERS)
    tracer.span(LOOKUP, HEADERS).end(
        requested_tokens=96, device_tokens=32, hit_tokens=64, tier=Tier.HOST
    )
    load.end(tokens=64, bytes=1 << 40, failed_blocks=0, tier="host")
    until(lambda: len(receiver.scopes()) == 2, "both spans")
    after = time.time_ns()
    spans = receiver.spans()
    for span in spans.values():
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert before <= span.start_time_unix_nano <= span.end_time_unix_nano <= after
    assert spans[LOAD].start_time_unix_nano <= spans[LOOKUP].start_time_unix_nano
    assert spans[LOAD].end_time_unix_nano >= spans[LOOKUP].end_time_unix_nano
    assert values(spans[LOOKUP]) == {
        "requested_tokens": 96, "device_tokens": 32, "hit_tokens": 64, "tier": "host",
    }  # fmt: skip
    assert values(spans[LOAD]) == {
        "tokens": 64, "bytes": 1 << 40, "failed_blocks": 0, "tier": "host",
    }  # fmt: skip


def test_they_say_that_an_engine_of_kvtier_sent_them_as_otlp_over_http(receiver, tracers):
    tracers(receiver.endpoint).span(STORE, HEADERS).end(tier="host")
    until(receiver.scopes, "the span")
    assert receiver.scopes()[0][0]["service.name"] == "kvtier-engine"
    assert receiver.requests[0][:2] == ("/v1/traces", "application/x-protobuf")


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "rubbish"}, {"b3": "1"}])
def test_without_a_parent_a_span_stands_on_its_own(receiver, tracers, headers):
    tracers(receiver.endpoint).span(LOOKUP, headers).end()
    until(receiver.scopes, "the span")
    span = receiver.spans()[LOOKUP]
    assert span.parent_span_id == b""
    assert span.trace_id.hex() != TRACE


def test_a_request_that_its_client_does_not_trace_leaves_no_span(receiver, tracers):
    tracer = tracers(receiver.endpoint)
    tracer.span(LOOKUP, UNSAMPLED).end()
    tracer.span(LOAD, HEADERS).end()
    tracer.close()
    assert [span.name for _, span in receiver.scopes()] == [LOAD]


def test_attributes_are_counts_and_the_tier_and_nothing_that_tells_who_asked():
    kinds = get_type_hints(Attributes)
    assert {name for name, kind in kinds.items() if kind is not int} == {"tier"}
    assert not {"request", "key", "salt", "tenant", "prompt"} & set(kinds)


def test_close_sends_what_is_left(receiver, tracers, monkeypatch):
    monkeypatch.setattr(otlp, "SEND_MILLISECONDS", 60_000)
    tracer = tracers(receiver.endpoint)
    for _ in range(3):
        tracer.span(STORE, HEADERS).end(tokens=1)
    assert not receiver.requests
    tracer.close()
    assert len(receiver.scopes()) == 3


def outlived(tracer):
    """Use a tracer whose receiver is bad, and close it in bounded time."""
    for _ in range(2 * otlp.QUEUE_SPANS):
        tracer.span(LOOKUP, HEADERS).end(hit_tokens=1)
    closing = threading.Thread(target=tracer.close)
    closing.start()
    closing.join(otlp.CLOSE_SECONDS + 10)
    assert not closing.is_alive()


def test_a_receiver_that_hangs_holds_up_nothing(receiver, tracers, monkeypatch):
    monkeypatch.setattr(otlp, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(otlp, "EXPORT_SECONDS", 60.0)
    receiver.gate.clear()
    tracer = tracers(receiver.endpoint)
    tracer.span(LOAD, HEADERS).end()
    until(lambda: receiver.requests, "a request that gets no answer")
    outlived(tracer)
    assert len(receiver.scopes()) < otlp.QUEUE_SPANS


def test_an_absent_receiver_holds_up_nothing_and_is_said_once(tracers, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tracer = tracers(f"http://127.0.0.1:{port}/v1/traces")
    tracer.span(LOAD, HEADERS).end()
    until(lambda: "do not arrive" in caplog.text, "the line")
    outlived(tracer)
    lines = [each for each in caplog.records if str(port) in each.getMessage()]
    assert [each.name for each in lines] == [LOG.name]


def test_an_outage_is_said_at_its_beginning_and_its_end(receiver, tracers, caplog):
    receiver.status = 500
    tracer = tracers(receiver.endpoint)
    tracer.span(LOAD, HEADERS).end()
    until(lambda: "do not arrive" in caplog.text, "the first line")
    tracer.span(LOAD, HEADERS).end()
    until(lambda: len(receiver.requests) == 2, "the second try")
    receiver.status = 200
    tracer.span(LOAD, HEADERS).end()
    until(lambda: "again" in caplog.records[-1].getMessage(), "the last line")
    assert [each.getMessage() for each in caplog.records] == [
        f"spans do not arrive at {receiver.endpoint} and are dropped until they do",
        f"spans arrive at {receiver.endpoint} again; 2 were lost",
    ]


def test_a_fault_in_opentelemetry_is_said_once_and_never_reaches_vllm(
    receiver, tracers, monkeypatch, caplog
):
    def broken(*arguments, **options):
        raise RuntimeError("broken")

    tracer = tracers(receiver.endpoint)
    whole = tracer.span(LOAD, HEADERS)
    monkeypatch.setattr(type(whole._span), "end", broken)
    whole.end()
    monkeypatch.setattr(tracer._headers, "extract", broken)
    tracer.span(LOAD, HEADERS).end(tokens=1)
    assert [each.getMessage() for each in caplog.records] == [
        "OpenTelemetry failed, and spans are missing: RuntimeError('broken')"
    ]


def test_without_an_endpoint_there_are_no_spans_and_opentelemetry_is_not_touched(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvtier.engine.otlp", None)
    tracer = make_tracer(None, LOG)
    assert isinstance(tracer, NoTracer)
    assert tracer.span(LOOKUP, HEADERS) is tracer.span(LOAD, None)
    tracer.span(LOOKUP, HEADERS).end(hit_tokens=1)
    tracer.close()


def test_without_opentelemetry_the_start_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvtier.engine.otlp")
    monkeypatch.delattr("kvtier.engine.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(EngineError, match="pip install opentelemetry-sdk"):
        make_tracer("http://127.0.0.1:4318/v1/traces", LOG)


@pytest.mark.parametrize(
    "endpoint",
    ["", "127.0.0.1:4318", "http://127.0.0.1:4318", "http://127.0.0.1:4318/", "grpc://h:4317/v1",
     "http:///v1/traces", "http://h:99999/v1/traces", "http://h:0/v1/traces", "http://[h/v1"],
)  # fmt: skip
def test_an_endpoint_that_no_receiver_has_is_refused(endpoint):
    with pytest.raises(EngineError, match="must be the whole URL of an OTLP receiver"):
        make_tracer(endpoint, LOG)


def test_the_reference_has_exactly_the_spans_and_their_attributes():
    page = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text("utf-8")
    rows = page.split("<!-- spans -->")[1].split("<!-- /spans -->")[0].split("\n| `")[1:]
    names = {row.split("`")[0] for row in rows}
    attributes = {name for row in rows for name in re.findall("`([a-z_]+)`", row)}
    assert names == {LOOKUP, LOAD, STORE}
    assert attributes == set(get_type_hints(Attributes))
