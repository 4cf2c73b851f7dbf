# SPDX-License-Identifier: Apache-2.0
"""The layer before authentication: serves public documents and checks the request headers.

It does not read bodies: ``body`` reads them after authentication.

::

    /healthcheck             for load balancers
    /, /v2, /v2/             version documents
    /v2/openapi.json         the description of the API
    everything else          microversion, Accept, Content-Length, then the layers below
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import webob
from oslo_config import cfg
from webob import acceptparse, exc

from cyborg.api import body, versions
from cyborg.api.access_log import HEALTHCHECK, App
from cyborg.api.health import Health
from cyborg.core.errors import Invalid

ROOT = "cyborg.root"
JSON = "application/json"
_JSON_ACCEPTED = frozenset({"", "*/*", JSON})  # sent by nearly every client
Documents = Mapping[str, Callable[[str], Mapping[str, Any]]]
VERSIONS: Documents = {
    "": versions.root_document,
    "/": versions.root_document,
    "/v2": versions.v2_document,
    "/v2/": versions.v2_document,
}


class EntryMiddleware:
    """A WSGI layer that serves public documents, and checks the headers of all other requests.

    It puts the root URL, with which all links start, into the environ. ``documents`` maps paths of
    public documents to functions that return the document for a root URL.
    """

    def __init__(
        self, app: App, conf: cfg.ConfigOpts, health: Health, documents: Documents
    ) -> None:
        self._app = app
        self._conf = conf
        self._health = health
        self._documents = {**VERSIONS, **documents}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request. Raise an exception that ``faults`` maps to a response."""
        path = _path(environ)
        if path == HEALTHCHECK:
            require_get(environ)
            healthy, document = self._health.check()
            return _json_response(document, 200 if healthy else 503)(environ, start_response)
        environ[ROOT] = root_url(environ, self._conf)
        if path in self._documents:
            require_get(environ)
            return _json_response(self._documents[path](environ[ROOT]))(environ, start_response)
        environ[versions.ENVIRON] = versions.requested_version(environ)
        require_json(environ)
        check_content_length(environ, self._conf.api.max_body_size)
        return self._app(environ, start_response)


def root_url(environ: dict[str, Any], conf: cfg.ConfigOpts) -> str:
    """Return the URL of the root of the API, without a slash at its end."""
    public: str | None = conf.api.public_endpoint
    if public:
        return public.rstrip("/").removesuffix("/v2")
    return webob.Request(environ).application_url.rstrip("/")


def require_json(environ: dict[str, Any]) -> None:
    """Raise HTTPNotAcceptable if the client does not accept JSON."""
    # Removed from the environ: pecan would check it again and log a mismatch as a server error.
    accept = environ.pop("HTTP_ACCEPT", "")
    if accept in _JSON_ACCEPTED:
        return
    if not acceptparse.create_accept_header(accept).acceptable_offers([JSON]):
        raise exc.HTTPNotAcceptable(f"Accept: this API supports {JSON} only")


def check_content_length(environ: dict[str, Any], limit: int) -> None:
    """Check and normalize Content-Length.

    Raise HTTPRequestEntityTooLarge if it exceeds ``limit``, Invalid if it is not a number.
    """
    length = environ.get("CONTENT_LENGTH")
    if not length:
        return
    if not (length.isascii() and length.isdigit()):
        raise Invalid("Content-Length is not a number", field="Content-Length")
    # 20 digits are enough for any limit: int() rejects strings of thousands of digits.
    size = int(length.lstrip("0")[:20] or 0)
    if size > limit:
        raise body.too_large(limit)
    environ["CONTENT_LENGTH"] = str(size)


def _path(environ: Mapping[str, Any]) -> str:
    try:
        return str(environ.get("PATH_INFO", "").encode("latin-1").decode())
    except UnicodeDecodeError:
        raise Invalid("the path of the URL is not UTF-8", field="path") from None


def require_get(environ: Mapping[str, Any]) -> None:
    """Raise HTTPMethodNotAllowed for a method other than GET and HEAD."""
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        raise exc.HTTPMethodNotAllowed(
            f"{environ['REQUEST_METHOD']} is not supported for {_path(environ)[:200]}, use GET "
            "or HEAD",
            headers={"Allow": "GET, HEAD"},
        )


def _json_response(document: Mapping[str, Any], status: int = 200) -> webob.Response:
    return webob.Response(body=json.dumps(document).encode(), status=status, content_type=JSON)
