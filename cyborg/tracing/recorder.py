# SPDX-License-Identifier: Apache-2.0
"""Record spans with the SDK of OpenTelemetry, and export them to a collector over OTLP.

Imported only with ``[tracing] enabled``. Spans wait in a queue of bounded size; if it is full, the
oldest are dropped. A thread sends them. A request never waits for the collector, and no request
fails because of it.
"""

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, TraceIdRatioBased
from oslo_config import cfg

from cyborg.core.errors import CyborgError
from cyborg.core.log import MAX_LENGTH, MAX_VALUES, get_logger, log_fields, parse_trace_context
from cyborg.tracing import SpanKind

LOG = get_logger(__name__)

# The first HTTP status with which a span of the API is an error.
SERVER_ERRORS = 500

# The names of OpenTelemetry's semantic conventions; all others begin with ``cyborg.``
_CONVENTIONS: Mapping[str, str] = {
    "database": "db.system.name",
    "method": "http.request.method",
    "path": "url.path",
    "route": "http.route",
    "status": "http.response.status_code",
}

_NO_SPAN = nullcontext()


class SpanRecorder:
    """Recorder of the spans of a process, to the processors of a tracer provider."""

    def __init__(self, provider: TracerProvider, sample_ratio: float = 1.0) -> None:
        """``sample_ratio`` is the share of the traces of clients that are recorded."""
        self._tracer = provider.get_tracer("cyborg")
        self._sampler = TraceIdRatioBased(sample_ratio)

    def root_span(
        self, name: str, trace_context: Any, kind: SpanKind, attributes: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Return a block that is a span of a client's trace, or of a new trace.

        A client that is not authenticated may send any context, so that its flag ``sampled`` is
        not enough: the trace id decides, as in clients with the same ratio.
        """
        parent = _parse(trace_context, self._sampler) or Context()
        return self._span(name, kind, parent, attributes)

    def child_span(
        self, name: str, kind: SpanKind, attributes: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Return a block that is a span of the current trace, if it is recorded."""
        if not trace.get_current_span().is_recording():
            return _NO_SPAN
        return self._span(name, kind, None, attributes)

    def remote_span(
        self, name: str, trace_context: Any, kind: SpanKind, attributes: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Return a block that is a span of the trace of a context, if it is well-formed."""
        parent = _parse(trace_context)
        # Without a parent it would be a trace of its own, for each round of a loop.
        return _NO_SPAN if parent is None else self._span(name, kind, parent, attributes)

    @contextmanager
    def remote_spans(
        self, name: str, trace_contexts: Iterable[Any], attributes: Mapping[str, Any]
    ) -> Iterator[None]:
        """Record a span of each trace of a batch; the first is current within the block."""
        # Several messages of a batch may be of one trace, which gets one span.
        contexts = list(dict.fromkeys(text for text in trace_contexts if text is not None))
        with contextlib.ExitStack() as stack:
            # The last one that is entered is the current one.
            for text in reversed(contexts):
                span = self.remote_span(name, text, SpanKind.CONSUMER, attributes)
                stack.enter_context(span)
            yield

    def current_context(self) -> str | None:
        """Return the context of the current span, also if it is not recorded, or None."""
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return None
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def annotate(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes to the current span; a status of 500 or more makes it an error."""
        span = trace.get_current_span()
        if span.is_recording():
            span.set_attributes(_render(attributes))
            # A 4xx is the mistake of a client, and no failure of the service.
            if attributes.get("status", 0) >= SERVER_ERRORS:
                span.set_status(trace.StatusCode.ERROR)

    @contextmanager
    def _span(
        self, name: str, kind: SpanKind, parent: Context | None, attributes: Mapping[str, Any]
    ) -> Iterator[None]:
        """Record the block as a span; an error that leaves the block is its status."""
        span = self._tracer.start_span(name, parent, trace.SpanKind[kind], _render(attributes))
        trace_id = f"{span.get_span_context().trace_id:032x}"
        # Not the record of the library: messages of exceptions may have addresses and names.
        with (
            trace.use_span(
                span, end_on_exit=True, record_exception=False, set_status_on_exception=False
            ),
            log_fields(trace_id=trace_id),
        ):
            try:
                yield
            except Exception as exc:
                text = exc.code if isinstance(exc, CyborgError) else type(exc).__name__
                span.set_status(trace.Status(trace.StatusCode.ERROR, text))
                raise


def _parse(text: Any, sampler: Sampler | None = None) -> Context | None:
    """Return the context of the parent that a text names, None if it is malformed.

    The trace is recorded if the context says so and, with a ``sampler``, this one agrees.
    """
    if (checked := parse_trace_context(text)) is None:
        return None
    _, trace_text, span_id, flag_text = checked.split("-")
    trace_id, flags = int(trace_text, 16), int(flag_text, 16)
    if sampler and sampler.should_sample(None, trace_id, "").decision is Decision.DROP:
        flags &= ~trace.TraceFlags.SAMPLED
    context = trace.SpanContext(
        trace_id, int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(flags)
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(context), Context())


def _render(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes with their full names and values of bounded size."""
    return {
        _CONVENTIONS.get(name, f"cyborg.{name}"): _plain(value)
        for name, value in attributes.items()
        if value is not None
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | set | frozenset):
        # Sorted, so that equal sets have equal texts in the collector.
        values = sorted(value) if isinstance(value, set | frozenset) else value
        return [str(item)[:MAX_LENGTH] for item in values[:MAX_VALUES]]
    return value if isinstance(value, int | float) else str(value)[:MAX_LENGTH]


# Seconds between two exports.
INTERVAL = 2.0

# Spans of one export.
BATCH = 256

# Seconds for the export of the remaining spans when a service stops.
STOP_TIMEOUT = 2.0

# Exceptions are not recorded as events: their messages may have addresses and names.
_LIMITS = SpanLimits(max_attributes=32, max_events=0, max_links=0, max_attribute_length=MAX_LENGTH)


def make_provider(
    conf: cfg.ConfigOpts, service: str, processor: SpanProcessor | None = None
) -> TracerProvider:
    """Return a provider that exports the spans of a service as ``[tracing]`` describes.

    ``processor`` replaces the export.
    """
    # Resource.create() would read environment variables and run detectors.
    resource = Resource(
        {
            "service.namespace": "cyborg",
            "service.name": service,
            "service.version": metadata.version("cyborg"),
            "host.name": conf.host,
        }
    )
    provider = TracerProvider(
        # A service follows the decision of its caller, so that a trace is complete or absent.
        sampler=ParentBased(TraceIdRatioBased(conf.tracing.sample_ratio)),
        resource=resource,
        # The provider's own hook at exit would wait for the collector without a limit.
        shutdown_on_exit=False,
        span_limits=_LIMITS,
    )
    provider.add_span_processor(processor or _make_processor(conf))
    return provider


def stop_provider(provider: TracerProvider, seconds: float = STOP_TIMEOUT) -> None:
    """Export the remaining spans; abandon them after ``seconds``."""
    # The provider waits for the collector without a limit of its own.
    thread = threading.Thread(target=provider.shutdown, name="tracing-stop", daemon=True)
    thread.start()
    thread.join(seconds)


def _make_processor(conf: cfg.ConfigOpts) -> SpanProcessor:
    """Return the processor that sends spans to the collector, in batches by a thread."""
    options = conf.tracing
    # _LoggedExporter logs the begin and the end of an outage; the library would log each failure.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    exporter = OTLPSpanExporter(
        endpoint=options.otlp_endpoint,
        certificate_file=options.cafile,
        timeout=options.timeout,
        compression=Compression.Gzip,
    )
    return BatchSpanProcessor(
        _LoggedExporter(exporter, options.otlp_endpoint),
        max_queue_size=options.queue_size,
        schedule_delay_millis=INTERVAL * 1000,
        max_export_batch_size=min(BATCH, options.queue_size),
    )


@dataclass(eq=False)
class _LoggedExporter(SpanExporter):
    """Exporter that logs the begin and the end of an outage of the collector."""

    exporter: SpanExporter
    endpoint: str

    def __post_init__(self) -> None:
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; a batch that fails is dropped."""
        result = self.exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            LOG.warning(
                "The collector of traces at %s accepts no spans, they are dropped until it does; "
                "check [tracing] otlp_endpoint",
                self.endpoint,
            )
        elif self._failing and not failed:
            LOG.info("The collector of traces accepts spans again")
        self._failing = failed
        return result

    def shutdown(self) -> None:
        """Close the connections."""
        self.exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True: nothing waits here."""
        return True
