# SPDX-License-Identifier: Apache-2.0
"""What a service answers, good or bad, as the command line takes it."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from cyborg.core.text import clean


class Refused(Exception):
    """The service or the way to it said no; the text is one line for the person at the keyboard."""


class Answer(dict[str, Any]):
    """What the service answers: an object that has what its version promises.

    Raises Refused for a key that it lacks: then something else answers, such as a proxy.
    """

    def __init__(self, body: Mapping[str, Any], url: str) -> None:
        super().__init__(body)
        self._url = url

    def __missing__(self, key: str) -> Any:
        raise Refused(f"{self._url} answered without {key!r}: this is not what was asked")


def at(collection: str, name: str) -> str:
    """Return the path of one object. Raises Refused for a name that would be another path."""
    if name.strip(".") == "":
        raise Refused(f"{name!r} names no object")
    return f"{collection}/{quote(name, safe='')}"


def fault(status: int, text: str) -> str:
    r"""Return the message of an error answer, whoever wrote it: this service or a proxy before it.

    >>> fault(404, '{"error_message": "{\\"faultstring\\": \\"no such ARQ\\"}"}')
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
    # A proxy may say anything, to a terminal too.
    said = clean(str(message) if message else text.strip()[:300]).strip() or "no explanation"
    return f"{' '.join(said.split())} (HTTP {status})"


def one_line(error: Exception) -> str:
    """Return what went wrong on the way, without what only a programmer reads."""
    # urllib3's own words, after the first colon that follows the URL, tell only of Python objects.
    text = " ".join(str(error).split())
    return text.split(": HTTPConnectionPool")[0].split(": HTTPSConnectionPool")[0]
