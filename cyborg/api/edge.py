# SPDX-License-Identifier: Apache-2.0
"""The outermost layers of our own: what is refused, or answered, before anybody is asked who he is.

::

    /healthcheck             for load balancers
    /, /v2, /v2/             version documents
    /v2/openapi.json         the description of all that follows
    everything else          microversion, form of the answer, authentication, resources
"""

import io
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import webob
from oslo_config import cfg
from webob import acceptparse, exc

from cyborg.api import versions
from cyborg.api.health import Health
from cyborg.core.errors import Invalid

ROOT = "cyborg.root"
JSON = "application/json"
_TAKERS = frozenset({"", "*/*", JSON})  # what nearly every client sends
Documents = Mapping[str, Callable[[str], Mapping[str, Any]]]
_VERSIONS: Documents = {
    "": versions.root_document,
    "/": versions.root_document,
    "/v2": versions.v2_document,
    "/v2/": versions.v2_document,
}

App = Callable[..., Iterable[bytes]]


class Edge:
    """Answers what is public and hands the rest on, with the URL that links start with.

    ``documents`` are, by path, what is public beside the version documents; each is made from that
    URL.
    """

    def __init__(
        self, app: App, conf: cfg.ConfigOpts, health: Health, documents: Documents
    ) -> None:
        self._app = app
        self._conf = conf
        self._health = health
        self._documents = {**_VERSIONS, **documents}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request. Raises what ``faults`` answers."""
        path = _path(environ)
        if path == "/healthcheck":
            _only_reading(environ)
            well, body = self._health.look()
            return _answer(body, 200 if well else 503)(environ, start_response)
        environ[ROOT] = self._root(environ)
        if path in self._documents:
            _only_reading(environ)
            return _answer(self._documents[path](environ[ROOT]))(environ, start_response)
        environ[versions.ENVIRON] = versions.asked_for(environ)
        take_json(environ)
        bound_body(environ, self._conf.api.max_body_size)
        return self._app(environ, start_response)

    def _root(self, environ: Mapping[str, Any]) -> str:
        public = self._conf.api.public_endpoint
        if public:
            return public.rstrip("/").removesuffix("/v2")  # type: ignore[no-any-return]
        return webob.Request(environ).application_url.rstrip("/")


def take_json(environ: dict[str, Any]) -> None:
    """Refuse a client that does not take JSON. Raises HTTPNotAcceptable."""
    # Taken away: pecan would look at it again, and log a client's wish as an error of ours.
    wanted = environ.pop("HTTP_ACCEPT", "")
    if wanted in _TAKERS:
        return
    if not acceptparse.create_accept_header(wanted).acceptable_offers([JSON]):
        raise exc.HTTPNotAcceptable(f"Accept: this API answers {JSON} alone")


def bound_body(environ: dict[str, Any], limit: int) -> None:
    """Refuse a body of more bytes than the limit. Raises HTTPRequestEntityTooLarge, Invalid."""
    told = environ.get("CONTENT_LENGTH") or ""
    if told:
        if not (told.isascii() and told.isdigit()):
            raise Invalid("Content-Length is not a number", field="Content-Length")
        if int(told[:20]) > limit:
            raise _too_large(limit)
    elif environ.get("wsgi.input_terminated") and "HTTP_TRANSFER_ENCODING" in environ:
        # Sent in chunks, of which nobody knows how many there are.
        body = environ["wsgi.input"].read(limit + 1)
        if len(body) > limit:
            raise _too_large(limit)
        environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}


def _too_large(limit: int) -> exc.HTTPException:
    return exc.HTTPRequestEntityTooLarge(f"the body may have at most {limit} bytes")


def _path(environ: Mapping[str, Any]) -> str:
    try:
        return str(environ.get("PATH_INFO", "").encode("latin-1").decode())
    except UnicodeDecodeError:
        raise Invalid("the path of the URL is not UTF-8", field="path") from None


def _only_reading(environ: Mapping[str, Any]) -> None:
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        raise exc.HTTPMethodNotAllowed(
            f"{environ['REQUEST_METHOD']} is not for {_path(environ)[:200]}: GET, HEAD",
            headers={"Allow": "GET, HEAD"},
        )


def _answer(body: Mapping[str, Any], status: int = 200) -> webob.Response:
    return webob.Response(body=json.dumps(body).encode(), status=status, content_type=JSON)
