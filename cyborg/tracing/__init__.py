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

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyborg.tracing.recorder import SpanRecorder

_NO_SPAN = nullcontext()


# An object, so that the functions need no global statement; each process has one recorder.
class _State:
    recorder: "SpanRecorder | None" = None


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
