# SPDX-License-Identifier: Apache-2.0
"""Responses and errors of the service on the command line."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from cyborg.core.text import sanitize


class CommandError(Exception):
    """Error of the service or of the connection to it; the text is one line for the user.

    ``status`` is that of the response of the service, if there is one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Response(dict[str, Any]):
    """JSON object of a response.

    A missing key raises CommandError, because it means that a proxy or another service responded.
    """

    def __init__(self, body: Mapping[str, Any], url: str) -> None:
        super().__init__(body)
        self._url = url

    def __missing__(self, key: str) -> Any:
        raise CommandError(f"unexpected response from {self._url}: {key!r} is missing")


def object_path(collection: str, name: str) -> str:
    """Return the path of an object. Raise CommandError for a name that changes the path."""
    if name.strip(".") == "":
        raise CommandError(f"{name!r} is not a valid name of an object")
    return f"{collection}/{quote(name, safe='')}"


def format_fault(status: int, text: str) -> str:
    r"""Return the message of an error response of the service or of a proxy.

    >>> format_fault(404, '{"error_message": "{\\"faultstring\\": \\"no such ARQ\\"}"}')
    'no such ARQ (HTTP 404)'
    """
    message: Any = None
    try:
        body = json.loads(text)
        message = body.get("error_message", body)
        if isinstance(message, str) and message.startswith("{"):
            message = json.loads(message)
        if isinstance(message, dict):
            inner = message.get("error", message)
            message = inner.get("faultstring") or inner.get("message")
    except (ValueError, AttributeError, RecursionError):
        message = None
    # The response of a proxy can contain control characters.
    text = sanitize(str(message) if message else text.strip()[:300]).strip() or "no error message"
    return f"{' '.join(text.split())} (HTTP {status})"


def format_exception(error: Exception) -> str:
    """Return a connection error in one line, without details for programmers."""
    # The text of urllib3 after the URL describes only Python objects.
    text = " ".join(str(error).split())
    return text.split(": HTTPConnectionPool")[0].split(": HTTPSConnectionPool")[0]
