# SPDX-License-Identifier: Apache-2.0
"""Spans of requests, calls, transactions and host work, for a collector of OpenTelemetry.

Without ``[tracing] enabled`` each function returns after one check, and opentelemetry is not
imported. A request of the API starts a trace or continues that of its client, and the publishing of
a host to Placement starts one. Every other span belongs to a trace in progress, so that other
periodic work records none.

::

    root_span       starts a trace, or continues the trace of a context from outside
    child_span      part of the trace that this thread works on, if any
    remote_span     continues a trace in another thread or process, or after a row was stored
"""

import atexit
import os
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from oslo_config import cfg

from cyborg.core.errors import Misconfigured

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

    from cyborg.tracing.recorder import SpanRecorder

App = Callable[..., Iterable[bytes]]

# One for all calls: it has no state.
_NO_SPAN = nullcontext()


# An object, so that the functions need no global statement; each process has one recorder.
class _State:
    """The recorder of this process and its provider, and the number of services that use it."""

    recorder: "SpanRecorder | None" = None
    provider: "TracerProvider | None" = None
    users = 0
    pid = os.getpid()
    lock = threading.Lock()


_state = _State()


class SpanKind(StrEnum):
    """Which side of a call a span is, by the names of OpenTelemetry."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"
    CONSUMER = "CONSUMER"


def use_recorder(recorder: "SpanRecorder | None") -> None:
    """Set the recorder of this process; None disables tracing."""
    _state.recorder = recorder


def root_span(
    name: str, trace_context: Any, kind: SpanKind, /, **attributes: Any
) -> AbstractContextManager[None]:
    """Return a block that is a span of the trace of a client, or of a new trace.

    A malformed ``trace_context`` is ignored. None omits an attribute.
    """
    if (recorder := _state.recorder) is None:
        return _NO_SPAN
    return recorder.root_span(name, trace_context, kind, attributes)


def child_span(
    name: str, kind: SpanKind = SpanKind.INTERNAL, /, **attributes: Any
) -> AbstractContextManager[None]:
    """Return a block that is a span of the current trace; no span without a trace."""
    if (recorder := _state.recorder) is None:
        return _NO_SPAN
    return recorder.child_span(name, kind, attributes)


def remote_span(
    name: str, trace_context: Any, kind: SpanKind = SpanKind.INTERNAL, /, **attributes: Any
) -> AbstractContextManager[None]:
    """Return a block that is a span of the trace of a context; no span for a malformed one."""
    if (recorder := _state.recorder) is None:
        return _NO_SPAN
    return recorder.remote_span(name, trace_context, kind, attributes)


def remote_spans(
    name: str, trace_contexts: Iterable[Any], /, **attributes: Any
) -> AbstractContextManager[None]:
    """Return a block that is a span of each of several traces, such as those of a batch.

    The spans within the block belong to the first trace.
    """
    if (recorder := _state.recorder) is None:
        return _NO_SPAN
    return recorder.remote_spans(name, trace_contexts, attributes)


def current_context() -> str | None:
    """Return the context of the current span, to continue its trace elsewhere; None without one."""
    return None if (recorder := _state.recorder) is None else recorder.current_context()


def annotate(**attributes: Any) -> None:
    """Add attributes to the current span, such as ``arq``, ``instance`` and ``host``."""
    if (recorder := _state.recorder) is not None:
        recorder.annotate(attributes)


def check_config(conf: cfg.ConfigOpts) -> None:
    """Raise Misconfigured if tracing is enabled and its libraries are missing."""
    if not conf.tracing.enabled:
        return
    try:
        import cyborg.tracing.recorder  # noqa: F401
    except ImportError as exc:
        raise Misconfigured(
            f"[tracing] enabled = true needs pip install 'cyborg[tracing]': {exc}",
            option="[tracing] enabled",
        ) from exc


def start(conf: cfg.ConfigOpts, service: str, processor: "SpanProcessor | None" = None) -> None:
    """Record the spans of this process if ``[tracing] enabled``. Raise Misconfigured.

    Call it in each process after the fork: threads and connections of the export do not survive a
    fork. A second service of the process uses the recorder of the first. ``processor`` replaces the
    export to the collector.
    """
    check_config(conf)
    if not conf.tracing.enabled:
        return
    from cyborg.tracing.recorder import SpanRecorder, make_provider

    with _state.lock:
        # A fork has copied the provider, but not the thread that exports its spans.
        if _state.pid != os.getpid():
            _state.provider = None
            _state.pid = os.getpid()
            _state.users = 0
        # The stand-alone service runs all services in one process.
        _state.users += 1
        if _state.provider is None:
            _state.provider = make_provider(conf, service, processor)
            use_recorder(SpanRecorder(_state.provider, conf.tracing.sample_ratio))


def stop() -> None:
    """Export the remaining spans when the last service of the process stops.

    Return within ``recorder.STOP_TIMEOUT`` seconds.
    """
    with _state.lock:
        _state.users = max(0, _state.users - 1)
        # Another service of the process still uses the provider, or there is none. After a fork
        # without a start, the provider is that of the parent process.
        if _state.users or _state.provider is None or _state.pid != os.getpid():
            return
        provider, _state.provider = _state.provider, None
        use_recorder(None)
    from cyborg.tracing.recorder import stop_provider

    stop_provider(provider)


# Web servers have no common hook for the end of a worker.
atexit.register(stop)


@dataclass(eq=False)
class TracingMiddleware:
    """A WSGI layer that records the requests of an app.

    The header ``traceparent`` of the client is used if it is well-formed. The name of a span has
    the method and the route, such as ``GET /v2/devices/{uuid}``, so that a client cannot choose it.

    ``find_route`` returns the method and the route to show of a method and a path.
    """

    app: App
    find_route: Callable[[str, str], tuple[str, str]]
    ignored_paths: Collection[str]

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        path = environ.get("PATH_INFO", "")
        if path in self.ignored_paths:
            return self.app(environ, start_response)

        def start(line: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            annotate(status=int(line.split(" ", 1)[0]))
            return start_response(line, headers, *more)

        method, route = self.find_route(environ["REQUEST_METHOD"], path)
        with root_span(
            f"{method} {route}",
            environ.get("HTTP_TRACEPARENT"),
            SpanKind.SERVER,
            method=method,
            route=route,
            request_id=environ.get("openstack.request_id"),
        ):
            return self.app(environ, start)
