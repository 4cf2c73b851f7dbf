# SPDX-License-Identifier: Apache-2.0
"""Export of spans to a collector over OTLP, outside of the threads that serve requests.

Spans wait in a queue of bounded size; if it is full, the oldest are dropped. A thread sends them. A
request never waits for the collector, and no request fails because of it.
"""

import logging
import threading
from collections.abc import Sequence
from importlib import metadata

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from oslo_config import cfg

from cyborg.core.log import MAX_LENGTH, get_logger

LOG = get_logger(__name__)

INTERVAL = 2.0
"""Seconds between two exports."""

BATCH = 256
"""Spans of one export."""

STOP_TIMEOUT = 2.0
"""Seconds for the export of the remaining spans when a service stops."""

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
        sampler=ParentBased(TraceIdRatioBased(conf.tracing.sample_ratio)),
        resource=resource,
        # It would wait for the collector without a limit of its own.
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
    options = conf.tracing
    # This exporter reports failures, at a limited rate; the library's logs each one.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    exporter = OTLPSpanExporter(
        endpoint=options.otlp_endpoint,
        certificate_file=options.cafile,
        headers={},
        timeout=options.timeout,
        compression=Compression.Gzip,
    )
    return BatchSpanProcessor(
        _LoggedExporter(exporter, options.otlp_endpoint),
        max_queue_size=options.queue_size,
        schedule_delay_millis=INTERVAL * 1000,
        max_export_batch_size=min(BATCH, options.queue_size),
    )


class _LoggedExporter(SpanExporter):
    """Exporter that logs the begin and the end of an outage of the collector."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; a batch that fails is dropped."""
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            LOG.warning(
                "The collector of traces at %s accepts no spans, they are dropped until it does; "
                "check [tracing] otlp_endpoint",
                self._endpoint,
            )
        elif self._failing and not failed:
            LOG.info("The collector of traces accepts spans again")
        self._failing = failed
        return result

    def shutdown(self) -> None:
        """Close the connections."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True: nothing waits here."""
        return True
