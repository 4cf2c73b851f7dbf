# SPDX-License-Identifier: Apache-2.0
"""Spans: their parents, attributes and errors; and what is recorded without a trace."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from oslo_context.context import RequestContext

from cyborg import tracing
from cyborg.core.errors import NotFound, Unavailable
from cyborg.core.log import MAX_LENGTH, MAX_VALUES, get_logger
from cyborg.rpc.context import CallSerializer, ContextSerializer, current
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.tracing.boot import CALLER, TRACE, TRACEPARENT, plain
from cyborg.tracing import SpanKind, TracingMiddleware

SERVER, INTERNAL = SpanKind.SERVER, SpanKind.INTERNAL


class Spans:
    """The spans that this process has recorded."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def by_name(self) -> dict[str, dict[str, Any]]:
        """Return each span by its name."""
        return {span.name: plain(span) for span in self._exporter.get_finished_spans()}


def start(**options: Any) -> InMemorySpanExporter:
    """Record in memory with these options of ``[tracing]``."""
    exporter = InMemorySpanExporter()
    conf = make_conf(tracing={"enabled": True, **options})
    tracing.start(conf, "test", SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
def spans() -> Iterator[Spans]:
    exporter = start()
    try:
        yield Spans(exporter)
    finally:
        tracing.stop()
    assert tracing.current_context() is None


def test_span_without_a_trace_is_not_recorded(spans: Spans) -> None:
    with tracing.child_span("a"), tracing.remote_span("b", None), tracing.remote_span("c", "junk"):
        assert tracing.current_context() is None
        with tracing.remote_spans("d", [None, "junk"]):
            tracing.annotate(arq="x")
    assert spans.by_name() == {}


def test_spans_of_a_thread_are_nested(spans: Spans) -> None:
    with tracing.root_span("root", TRACEPARENT, SERVER):
        with tracing.child_span("first", SpanKind.CLIENT):
            stored = tracing.current_context()
        with tracing.child_span("second"):
            tracing.annotate(arq=["a", "b"], instance="i", host=None)
    found = spans.by_name()
    assert {span["trace"] for span in found.values()} == {TRACE}
    assert found["root"]["parent"] == CALLER
    assert found["first"]["parent"] == found["second"]["parent"] == found["root"]["span"]
    assert stored == f"00-{TRACE}-{found['first']['span']}-01"
    assert found["second"]["attributes"] == {"cyborg.arq": ["a", "b"], "cyborg.instance": "i"}
    assert (found["root"]["kind"], found["first"]["kind"]) == ("SERVER", "CLIENT")


@pytest.mark.parametrize("value", [None, "junk", TRACEPARENT + "\n", 5])
def test_root_without_a_valid_context_starts_a_trace(spans: Spans, value: Any) -> None:
    with tracing.root_span("root", value, SERVER):
        pass
    root = spans.by_name()["root"]
    assert root["parent"] is None
    assert root["trace"] != TRACE


def test_remote_span_continues_a_trace_in_another_thread(spans: Spans) -> None:
    with tracing.root_span("root", None, SERVER):
        stored = tracing.current_context()

    def work() -> None:
        with tracing.remote_span("work", stored), tracing.child_span("step"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    found = spans.by_name()
    assert found["work"]["parent"] == found["root"]["span"]
    assert found["step"]["parent"] == found["work"]["span"]


def test_batch_has_a_span_in_each_trace(spans: Spans) -> None:
    contexts = []
    for name in ("one", "two"):
        with tracing.root_span(name, None, SERVER):
            contexts.append(tracing.current_context())
    with tracing.remote_spans("deliver", [None, *contexts, contexts[0]]), tracing.child_span("x"):
        pass
    exported = [plain(span) for span in spans._exporter.get_finished_spans()]
    parents = {span["parent"] for span in exported if span["name"] == "deliver"}
    found = spans.by_name()
    assert parents == {found["one"]["span"], found["two"]["span"]}
    assert found["x"]["trace"] == found["one"]["trace"], "the first trace is the current one"


@pytest.mark.parametrize(
    ("error", "text"),
    [(NotFound("no device d at 10.0.0.1"), "NotFound"), (KeyError("secret"), "KeyError")],
)
def test_error_marks_its_span_without_its_message(
    spans: Spans, error: Exception, text: str
) -> None:
    with pytest.raises(type(error)), tracing.root_span("root", None, SERVER):
        raise error
    (span,) = spans._exporter.get_finished_spans()
    assert span.status.status_code.name == "ERROR"
    assert span.status.description == (error.code if isinstance(error, NotFound) else text)
    assert span.events == ()
    assert "10.0.0.1" not in span.to_json()
    assert "secret" not in span.to_json()


def test_attributes_are_bounded(spans: Spans) -> None:
    values = [f"{number}" for number in range(MAX_VALUES + 5)]
    with tracing.root_span("root", None, SERVER, arq=values, host="h" * 999, count=3, kind="k"):
        pass
    attributes = spans.by_name()["root"]["attributes"]
    assert len(attributes["cyborg.arq"]) == MAX_VALUES
    assert len(attributes["cyborg.host"]) == MAX_LENGTH
    assert (attributes["cyborg.count"], attributes["cyborg.kind"]) == (3, "k")


def test_log_lines_of_a_span_have_the_trace(spans: Spans, caplog: pytest.LogCaptureFixture) -> None:
    with tracing.root_span("root", TRACEPARENT, SERVER):
        get_logger("cyborg.test").warning("inner")
    get_logger("cyborg.test").warning("outer")
    inner, outer = (getattr(record, "extra", {}) for record in caplog.records)
    assert inner == {"trace_id": TRACE}
    assert "trace_id" not in outer


def test_call_carries_the_trace_and_an_older_peer_ignores_it(spans: Spans) -> None:
    with tracing.root_span("root", TRACEPARENT, SERVER):
        values = CallSerializer().serialize_context(current())
        assert values["traceparent"] == tracing.current_context()
    received = ContextSerializer().deserialize_context(values)
    assert received.trace_context == values["traceparent"]
    # What a release without the field does with the same values.
    older = RequestContext.from_dict(values, overwrite=False)
    assert older.request_id == values["request_id"]
    assert TRACE not in str(older.to_dict())


def test_call_of_an_older_peer_records_no_span(spans: Spans) -> None:
    values = CallSerializer().serialize_context(current())
    assert "traceparent" not in values
    received = ContextSerializer().deserialize_context(values)
    assert received.trace_context is None
    with tracing.remote_span("served", received.trace_context):
        pass
    assert spans.by_name() == {}


@pytest.mark.parametrize("value", ["junk", 7, [TRACEPARENT], TRACEPARENT + "x", "\n", None])
def test_malformed_context_of_a_peer_is_ignored(value: Any) -> None:
    received = ContextSerializer().deserialize_context({"traceparent": value})
    assert received.trace_context is None


def call(path: str, status: str, **environ: Any) -> list[Any]:
    """Send a request through the middleware; return its response."""
    answers: list[Any] = []

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response(status, [])
        return [b"body"]

    middleware = TracingMiddleware(
        app,
        lambda method, path: (method, "/v2/devices") if "devices" in path else ("-", "-"),
        {"/healthcheck"},
    )
    request = {"REQUEST_METHOD": "GET", "PATH_INFO": path, **environ}
    answers += middleware(request, lambda line, headers, *more: answers.append(line))
    return answers


def test_request_is_named_by_method_and_route(spans: Spans) -> None:
    assert call("/devices/1", "200 OK", HTTP_TRACEPARENT=TRACEPARENT) == ["200 OK", b"body"]
    call("/secret", "404 Not Found", REQUEST_METHOD="STEAL")
    call("/healthcheck", "200 OK")
    found = spans.by_name()
    assert found.keys() == {"GET /v2/devices", "- -"}
    assert found["GET /v2/devices"]["parent"] == CALLER
    assert found["- -"]["attributes"]["http.response.status_code"] == 404
    assert {span["status"] for span in found.values()} == {"UNSET"}


def test_server_error_marks_the_request(spans: Spans) -> None:
    call("/devices", "503 Service Unavailable")
    assert spans.by_name()["GET /v2/devices"]["status"] == "ERROR"


def is_sampled(trace_context: str | None) -> bool:
    """Return the lowest of the flags of a context."""
    assert trace_context is not None
    return bool(int(trace_context[-2:], 16) & 1)


def test_unsampled_trace_is_continued_but_not_recorded() -> None:
    exporter = start(sample_ratio=0.0)
    try:
        with tracing.root_span("root", None, SERVER), tracing.child_span("child"):
            stored = tracing.current_context()
            assert not is_sampled(stored)
        with tracing.remote_span("later", stored):
            assert not is_sampled(tracing.current_context())
        with tracing.root_span("client", TRACEPARENT, SERVER):  # whatever the client wants
            pass
        assert exporter.get_finished_spans() == ()
    finally:
        tracing.stop()


@pytest.mark.parametrize(("trace_id", "expected"), [("1" * 32, ["client"]), ("f" * 32, [])])
def test_trace_of_a_client_is_recorded_if_its_id_is_in_the_share(
    trace_id: str, expected: list[str]
) -> None:
    exporter = start(sample_ratio=0.5)
    try:
        for flags in ("01", "00"):
            with tracing.root_span("client", f"00-{trace_id}-{'2' * 16}-{flags}", SERVER):
                stored = tracing.current_context()
            assert is_sampled(stored) is (bool(expected) and flags == "01")
        assert [span.name for span in exporter.get_finished_spans()] == expected
    finally:
        tracing.stop()


def test_failed_block_raises_its_own_error(spans: Spans) -> None:
    with pytest.raises(Unavailable), tracing.root_span("root", None, INTERNAL):
        raise Unavailable("away")
    assert spans.by_name()["root"]["status"] == "ERROR"
