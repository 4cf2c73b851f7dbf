# SPDX-License-Identifier: Apache-2.0
"""Map exceptions to HTTP error responses: status and body.

The body is ``{"error_message": "<text>"}``. The text is itself a JSON object with faultcode,
faultstring and debuginfo, as the clients of this API expect.
"""

import http
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import webob
from pecan.hooks import PecanHook
from webob import exc

from cyborg.api.auth import ENVIRON, Caller
from cyborg.core import errors
from cyborg.core.log import get_logger

LOG = get_logger(__name__)

STATUSES: Mapping[type[errors.CyborgError], int] = {
    errors.CyborgError: 500,
    errors.Invalid: 400,
    errors.NotFound: 404,
    errors.Forbidden: 403,
    errors.ServiceTokenRequired: 403,
    errors.OverLimit: 403,
    errors.Conflict: 409,
    errors.InUse: 409,
    errors.WrongState: 409,
    errors.NoHandle: 409,
    # Locked: by it Nova knows that not all ARQs of the instance are resolved.
    errors.Unresolved: 423,
    errors.Stale: 409,
    errors.Unavailable: 503,
    errors.TimedOut: 504,
    errors.DriverFailed: 500,
    errors.Misconfigured: 500,
}
_UNAVAILABLE_MESSAGES = {
    503: "a component of this service is unavailable, retry later",
    504: "a component of this service did not respond in time, the request may have taken effect",
}

# Not the route table: an error can arise before routing, and in layers that do not know it.
_OBJECT_PATH = re.compile(r"(?:/v2)?/(\w+)/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:/|$)")
# Log fields of the uuids of collections.
_FIELDS = {
    "accelerator_requests": "arq",
    "accelerators": "accelerator",
    "attachments": "attachment",
    "audits": "audit",
    "deployables": "deployable",
    "device_contexts": "device_context",
    "devices": "device",
    "discoveries": "discovery",
    "jobs": "job",
    "outbox": "message_id",
    "services": "service",
}

# Key of the WSGI environ for the first uuid or name in the path, and the path of its list.
OBJECT = "cyborg.object"


def http_status(error: Exception) -> int:
    """Return the HTTP status of an exception; 500 unless it is a CyborgError or HTTPException."""
    if isinstance(error, errors.CyborgError):
        # The nearest base: a new error has the status of its base class.
        return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    return error.status_int if isinstance(error, exc.WSGIHTTPException) else 500


def client_message(
    error: Exception, status: int, request_id: str, *, elevated: bool = False
) -> str:
    """Return the message for the client.

    For a server error it has no details, only the request id to find them in the log. An
    ``elevated`` caller, who administers the cloud, is told which component is unavailable.
    """
    if status >= 500:
        message = _UNAVAILABLE_MESSAGES.get(status, "internal error")
        if elevated and isinstance(error, errors.Unavailable):
            message += f": {error.message}"
        return f"{message} (request {request_id})"
    if isinstance(error, errors.CyborgError):
        return error.message
    return str(getattr(error, "detail", None) or http.HTTPStatus(status).phrase)


def _add_list(error: Exception, message: str, environ: Mapping[str, Any]) -> str:
    """Return the message and how to list the known objects, if the one in the path is wrong.

    A message that says what to do is returned unchanged.
    """
    # Set by the routing; without it no list of known objects exists for the path.
    name, path = environ.get(OBJECT, ("", ""))
    is_wrong = isinstance(error, errors.Invalid | errors.NotFound) and name and name in message
    # Messages give advice after a semicolon, or as a question.
    has_advice = "; " in message or message.endswith("?")
    if not is_wrong or has_advice:
        return message
    return f"{message}; GET {path} lists the known ones"


def error_body(status: int, message: str) -> bytes:
    """Return the body of an error response."""
    text = {
        "faultcode": "Client" if status < 500 else "Server",
        "faultstring": message,
        "debuginfo": None,
    }
    return json.dumps({"error_message": json.dumps(text)}).encode()


def log_failure(error: Exception, environ: Mapping[str, Any]) -> None:
    """Log why a request failed, with the details that the client does not get."""
    status = http_status(error)
    message = client_message(error, status, environ.get("openstack.request_id", "-"))
    request = f"{environ['REQUEST_METHOD']} {environ.get('PATH_INFO', '')!r}"
    fields = _path_fields(environ.get("PATH_INFO", ""))
    # A component of the cloud is down or slow: that is no defect, and needs no traceback.
    if status in _UNAVAILABLE_MESSAGES:
        LOG.warning("%s: %s", request, error, **fields)
    elif isinstance(error, errors.CyborgError) and status >= 500:
        # The failed service has logged its traceback; the one of this process is of no use.
        LOG.error("%s failed: %s", request, error, **fields)
    elif status >= 500:
        LOG.error("%s failed", request, exc_info=error, **fields)
    else:
        # Nova keeps only the status of a response; the message can be found here.
        LOG.info("%s: %s %r", request, status, message, **fields)


def _path_fields(path: str) -> dict[str, Any]:
    """Return the log field of the object whose uuid is in a path."""
    match = _OBJECT_PATH.match(path)
    return {_FIELDS[match[1]]: match[2]} if match and match[1] in _FIELDS else {}


def error_response(error: Exception, environ: Mapping[str, Any]) -> webob.Response:
    """Return the response to a failed request."""
    status = http_status(error)
    caller: Caller | None = environ.get(ENVIRON)
    message = client_message(
        error,
        status,
        environ.get("openstack.request_id", "-"),
        elevated=caller is not None and caller.is_elevated,
    )
    message = _add_list(error, message, environ)
    response = webob.Response(
        body=error_body(status, message),
        status=status,
        content_type="application/json",
    )
    if isinstance(error, exc.HTTPMethodNotAllowed) and error.allow:
        # webob's own response to the exception has these headers; ours replaces it.
        response.allow = error.allow
    if isinstance(error, exc.HTTPUnauthorized):
        response.headers["WWW-Authenticate"] = error.headers["WWW-Authenticate"]
    if isinstance(error, exc.HTTPTooManyRequests):
        response.headers["Retry-After"] = error.headers["Retry-After"]
    return response


# Key of the WSGI environ for an exception that has its response but is not logged yet.
FAILURE = "cyborg.failure"


class FaultMiddleware:
    """A WSGI layer that turns exceptions of the layers below into error responses."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request."""
        response: Iterable[bytes] | None = None
        try:
            response = self._app(environ, start_response)
        except Exception as error:  # noqa: BLE001  every failure gets a response here
            environ[FAILURE] = error
        # Set above, or by FaultHook, which has made the response. Popped, so that an outer
        # FaultMiddleware does not log it again.
        failure = environ.pop(FAILURE, None)
        if failure is not None:
            log_failure(failure, environ)
        if response is None:
            response = error_response(failure, environ)(environ, start_response)
        return response


class FaultHook(PecanHook):  # type: ignore[misc]
    """A pecan hook for exceptions that pecan catches itself and would answer in HTML."""

    def on_error(self, state: Any, e: Exception) -> webob.Response:
        """Return the response to a request whose controller or routing raised an exception."""
        # FaultMiddleware logs it, as the failures of all other layers.
        state.request.environ[FAILURE] = e
        return error_response(e, state.request.environ)
