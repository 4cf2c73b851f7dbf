# SPDX-License-Identifier: Apache-2.0
"""Request context of the caller, which is sent with every message."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import oslo_messaging
from oslo_context import context

from cyborg import tracing
from cyborg.core import log, text

# A credential allows its bearer everything, so none is sent to another process.
_SECRETS = ("auth_token",)

# Context key under which the receiver stores the sender of a message.
SENDER = "sender"

# Context key of the id of a call.
CALL_ID = "call_id"

# Context key of the time until which the caller waits. An older peer ignores it.
ANSWER_BY = "answer_by"

# Characters of a call id.
MAX_ID = 64

# Context key of the trace of a call. A peer of a release without it ignores it.
TRACE_CONTEXT = "traceparent"

# The types of oslo.context: all other values are texts.
_LISTS = ("roles",)
_FLAGS = ("is_admin", "read_only", "show_deleted", "is_admin_project")
_MAX_LENGTH = 255  # characters of one value, and values of a list


class CallContext(context.RequestContext):
    """Context of a call that was received over the bus.

    ``sender`` describes the sender for the log. Copies of one call have the same ``call_id``; it is
    None if the caller sends none. ``trace_context`` is the span of the caller, None without one.
    ``answer_by`` is until when the caller waits, in the database's time (naive UTC), None if it
    does not say.
    """

    sender: str = "an unknown sender"
    call_id: str | None = None
    trace_context: str | None = None
    answer_by: datetime | None = None


class OutgoingContext(context.RequestContext):
    """Context of a call to send: all copies of the call have its id and the time of its end."""

    new_call_id: str | None = None
    answer_by: datetime | None = None


def for_call(answer_by: datetime | None = None) -> context.RequestContext:
    """Return the current context with the id of a new call, for which the caller waits so long."""
    # A copy: the context of the request lives on, and each of its calls needs an id of its own.
    found: OutgoingContext = OutgoingContext.from_dict(current().to_dict(), overwrite=False)
    found.new_call_id = uuid4().hex
    found.answer_by = answer_by
    return found


def current() -> context.RequestContext:
    """Return the context of the request that this thread serves, or a context of the service."""
    return context.get_current() or context.RequestContext(overwrite=False)


class ContextSerializer(oslo_messaging.NoOpSerializer):  # type: ignore[misc]
    """Serializer of contexts to plain values, without credentials."""

    def serialize_context(self, ctxt: context.RequestContext) -> dict[str, Any]:
        """Return the values that are set."""
        values = ctxt.to_dict()
        return {
            key: value
            for key, value in values.items()
            if key not in _SECRETS and value not in (None, [])
        }

    def deserialize_context(self, ctxt: Mapping[str, Any]) -> CallContext:
        """Return the context of a message; unknown and malformed values are left out."""
        # The log shows the context with each line, so a value must not contain a line break.
        values = {key: value for key, value in ctxt.items() if _is_valid(key, value)}
        call_context: CallContext = CallContext.from_dict(values, overwrite=False)
        call_context.sender = str(ctxt.get(SENDER, CallContext.sender))
        call_id = values.get(CALL_ID)
        # A longer id would not fit into the column of the recorded calls.
        if isinstance(call_id, str) and 0 < len(call_id) <= MAX_ID:
            call_context.call_id = call_id
        call_context.trace_context = log.parse_trace_context(values.get(TRACE_CONTEXT))
        call_context.answer_by = _parse_time(values.get(ANSWER_BY))
        return call_context


class CallSerializer(ContextSerializer):
    """Serializer of a client, which gives each call an id."""

    def serialize_context(self, ctxt: context.RequestContext) -> dict[str, Any]:
        """Return the context with a new call id; called once for a call and all its copies."""
        call_id = getattr(ctxt, "new_call_id", None) or uuid4().hex
        values = super().serialize_context(ctxt) | {CALL_ID: call_id}
        if (answer_by := getattr(ctxt, "answer_by", None)) is not None:
            values[ANSWER_BY] = text.to_iso(answer_by)
        trace_context = tracing.current_context()
        return values if trace_context is None else values | {TRACE_CONTEXT: trace_context}


def _is_valid(key: str, value: Any) -> bool:
    """Return whether a value of a context may be kept: no secret, and of the type of its key."""
    if key in _SECRETS:
        return False
    if key in _FLAGS:
        return isinstance(value, bool)
    if key in _LISTS:
        return (
            isinstance(value, list)
            and len(value) <= _MAX_LENGTH
            and all(map(_is_short_text, value))
        )
    return _is_short_text(value)


def _parse_time(value: Any) -> datetime | None:
    """Return a time of ``to_iso`` as naive UTC, None for anything else."""
    try:
        # Naive, as the times of the database.
        return datetime.fromisoformat(value).astimezone(UTC).replace(tzinfo=None)
    except (TypeError, ValueError, OverflowError):
        return None


def _is_short_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_LENGTH and value.isprintable()
