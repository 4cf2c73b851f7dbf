# SPDX-License-Identifier: Apache-2.0
"""What a failure is to an HTTP client: its status and its body, chosen here alone.

The body is ``{"error_message": "<text>"}`` where the text is JSON itself, of faultcode, faultstring
and debuginfo: this is what the clients of this API decode.
"""

import http
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import webob
from oslo_log import log
from pecan.hooks import PecanHook
from webob import exc

from cyborg.core import errors

LOG = log.getLogger(__name__)

STATUSES: Mapping[type[errors.CyborgError], int] = {
    errors.CyborgError: 500,
    errors.Invalid: 400,
    errors.NotFound: 404,
    errors.Forbidden: 403,
    errors.ServiceTokenRequired: 403,
    errors.Conflict: 409,
    errors.InUse: 409,
    errors.WrongState: 409,
    errors.NoHandle: 409,
    errors.Unresolved: 423,
    errors.Stale: 409,
    errors.Unavailable: 503,
    errors.TimedOut: 504,
    errors.DriverFailed: 500,
    errors.Misconfigured: 500,
}
_AWAY = {
    503: "a part of this service does not answer: try again later",
    504: "a part of this service did not answer in time, so what came of the request is not known",
}

StartResponse = Callable[..., Any]


def status_of(error: Exception) -> int:
    """Return the HTTP status of an exception; 500 for any that is not ours or HTTP's."""
    if isinstance(error, errors.CyborgError):
        return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    return error.status_int if isinstance(error, exc.HTTPException) else 500


def message_of(error: Exception, status: int, request_id: str) -> str:
    """Return what the client is told; of a fault of our own only where the log has more."""
    if status >= 500:
        told = _AWAY.get(status, "internal error")
        return f"{told} (request {request_id})"
    if isinstance(error, errors.CyborgError):
        return error.message
    return str(getattr(error, "detail", None) or http.HTTPStatus(status).phrase)


def body(status: int, message: str) -> bytes:
    """Return the body of an error."""
    text = {
        "faultcode": "Client" if status < 500 else "Server",
        "faultstring": message,
        "debuginfo": None,
    }
    return json.dumps({"error_message": json.dumps(text)}).encode()


def answer(error: Exception, environ: Mapping[str, Any]) -> webob.Response:
    """Return the whole response to a request that failed, and log what the client is not told."""
    status = status_of(error)
    request_id = environ.get("openstack.request_id", "-")
    told = message_of(error, status, request_id)
    what = f"{environ['REQUEST_METHOD']} {environ.get('PATH_INFO', '')!r}"
    if status in _AWAY:
        LOG.warning("%s: %s", what, error)
    elif status >= 500:
        LOG.error("%s failed", what, exc_info=error)
    else:
        # Nova keeps the status of an answer and drops its text: here is where it can be found.
        LOG.info("%s: %s %r", what, status, told)
    response = webob.Response(
        body=body(status, told),
        status=status,
        content_type="application/json",
    )
    if isinstance(error, exc.HTTPMethodNotAllowed) and error.allow:
        response.allow = error.allow
    return response


class Faults:
    """A WSGI layer that turns whatever the layers below raise into an error's response."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        try:
            return self._app(environ, start_response)
        except Exception as error:  # noqa: BLE001  here every failure gets its answer
            return answer(error, environ)(environ, start_response)


class FaultHook(PecanHook):  # type: ignore[misc]
    """The same for what pecan catches itself, which it would answer in HTML."""

    def on_error(self, state: Any, e: Exception) -> webob.Response:
        """Return the response to a request whose controller, or whose routing, raised."""
        return answer(e, state.request.environ)
