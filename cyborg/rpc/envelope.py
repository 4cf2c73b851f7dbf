# SPDX-License-Identifier: Apache-2.0
"""The form of messages: arguments and answers as JSON of a bounded size, errors as answers.

An answer is ``{"ok": value}`` or ``{"error": {"code", "message", "details"}}``; the errors are
those of ``cyborg.core.errors``. oslo.messaging's own way of carrying exceptions names Python
classes on the wire and sends tracebacks along: it is not used.
"""

import json
from collections.abc import Mapping
from typing import Any

from cyborg.core.errors import CyborgError, Invalid, Unavailable, from_wire


def size(body: Any, what: str) -> int:
    """Return the bytes of a message as JSON. Raises Invalid for what JSON cannot hold.

    Half a surrogate pair is no text: no database takes it, and no log can show it.
    """
    try:
        text = json.dumps(body, separators=(",", ":"), allow_nan=False)
        if "\\ud" in text:
            json.dumps(body, ensure_ascii=False).encode()
        return len(text)
    except (TypeError, ValueError, RecursionError) as bad:
        raise Invalid(f"{what}: not plain JSON values: {bad}", field=what) from bad


def bounded(body: Any, limit: int, what: str) -> None:
    """Refuse a message of more bytes than ``limit``. Raises Invalid."""
    found = size(body, what)
    if found > limit:
        raise Invalid(f"{what}: {found} bytes are more than the limit of {limit}", field=what)


def answer(value: Any) -> dict[str, Any]:
    """Wrap what a method returned."""
    return {"ok": value}


def failure(error: CyborgError) -> dict[str, Any]:
    """Wrap what a method raised; details that JSON cannot hold are left out."""
    body = error.to_wire()
    try:
        size(body, "error")
    except Invalid:
        body["details"] = {}
    return {"error": body}


def opened(body: Any, what: str) -> Any:
    """Return what an answer holds or raise the error that it carries."""
    if isinstance(body, Mapping):
        if "ok" in body:
            return body["ok"]
        error = body.get("error")
        if isinstance(error, Mapping):
            raise from_wire(error)
    raise Unavailable(f"{what}: the answer is none of ours")
