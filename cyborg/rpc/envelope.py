# SPDX-License-Identifier: Apache-2.0
"""Envelope of RPC messages: arguments and responses as JSON of a bounded size.

A response is ``{"ok": value}`` or ``{"error": {"code", "message", "details"}}``, with the errors of
``cyborg.core.errors``. oslo.messaging's exceptions are not used: they have names of Python classes
and tracebacks.
"""

import json
from collections.abc import Mapping
from typing import Any

from cyborg.core.errors import STOPPING, CyborgError, Invalid, Unavailable, from_wire


def encoded_size(body: Any, subject: str) -> int:
    """Return the size of a message as JSON in bytes. Raise Invalid if JSON cannot encode it.

    Half a surrogate pair is invalid too: no database stores it, and no log can show it.
    """
    try:
        text = json.dumps(body, separators=(",", ":"), allow_nan=False)
        # A search is cheap, and a second encoding is not: few messages have such an escape at all.
        if "\\ud" in text:
            json.dumps(body, ensure_ascii=False).encode()
        # Characters are bytes here: json.dumps has escaped all that is not ASCII.
        return len(text)
    except (TypeError, ValueError, RecursionError) as exc:
        raise Invalid(f"{subject}: not plain JSON values: {exc}", field=subject) from exc


def check_size(body: Any, limit: int, subject: str) -> None:
    """Raise Invalid if a message has more than ``limit`` bytes."""
    size = encoded_size(body, subject)
    if size > limit:
        raise Invalid(f"{subject}: {size} bytes are more than the limit of {limit}", field=subject)


def wrap_result(value: Any) -> dict[str, Any]:
    """Return the response for the result of a method."""
    return {"ok": value}


def wrap_error(error: CyborgError) -> dict[str, Any]:
    """Return the response for an error; details that JSON cannot encode are left out."""
    body = error.to_wire()
    try:
        encoded_size(body, "error")
    except Invalid:
        # The caller must get the code and the message in any case.
        body["details"] = {}
    return {"error": body}


def is_stopping(body: Any) -> bool:
    """Return whether a response says that its server stops and has carried out nothing."""
    error = body.get("error") if isinstance(body, Mapping) else None
    details = error.get("details") if isinstance(error, Mapping) else None
    return isinstance(details, Mapping) and details.get(STOPPING) is True


def unwrap(body: Any, subject: str) -> Any:
    """Return the result of a response, or raise its error."""
    if isinstance(body, Mapping):
        if "ok" in body:
            return body["ok"]
        error = body.get("error")
        if isinstance(error, Mapping):
            raise from_wire(error)
    raise Unavailable(f"{subject}: invalid RPC response envelope")
