# SPDX-License-Identifier: Apache-2.0
"""The WSGI layers around the API: access log, host check, public documents, audit."""

import ipaddress
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import webob
from oslo_config import cfg
from oslo_context import context
from webob import acceptparse, exc

from cyborg.api import body, versions
from cyborg.api.health import Health
from cyborg.compat.api import EventNotifier, make_audit_middleware
from cyborg.core.errors import Forbidden, Invalid, Misconfigured
from cyborg.core.log import get_logger
from cyborg.rpc.notifications import AuditNotifier
from cyborg.telemetry.recorder import API_REQUESTS, API_SECONDS, MetricRecorder

LOG = get_logger("cyborg.api.access")

HEALTHCHECK = "/healthcheck"

# What is shown instead of an unknown method or route.
UNKNOWN = "-"

# The methods that a log line shows.
METHODS = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"}
)

App = Callable[..., Iterable[bytes]]
FindRoute = Callable[[str, str], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class AccessLog:
    """A WSGI layer that logs and counts each request.

    ``find_route`` is that of ``cyborg.api.routes``.
    """

    app: App
    find_route: FindRoute
    recorder: MetricRecorder
    clock: Callable[[], float] = time.monotonic

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        started = self.clock()
        _reset_context(environ)
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "")
        status = 500  # if a layer fails without a response

        def start(line: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            nonlocal status
            status = int(line.split(" ", 1)[0])
            return start_response(line, headers, *more)

        try:
            return self.app(environ, start)
        finally:
            seconds = self.clock() - started
            # Only known methods and routes: a client could add series to the metrics by any others,
            # also without a token.
            served_method, route = self.find_route(method, path)
            self.recorder.count(API_REQUESTS, served_method, route, str(status))
            self.recorder.observe(API_SECONDS, seconds, served_method, route)
            self._log(method if method in METHODS else UNKNOWN, route, status, seconds * 1000)

    def _log(self, shown: str, route: str, status: int, ms: float) -> None:
        # Load balancers probe several times a second.
        level = logging.DEBUG if route == HEALTHCHECK else logging.INFO
        if not LOG.isEnabledFor(level):
            return
        fields = {"method": shown, "route": route, "status": status, "ms": round(ms, 1)}
        LOG.log(level, "%s %s %d %.1f ms", shown, route, status, ms, extra=fields)


def _reset_context(environ: dict[str, Any]) -> None:
    """Give the thread a context with the request id only, until the caller is authenticated."""
    # Otherwise the log lines of a request that is rejected before authentication would have the
    # request id and the user of the previous request of the thread.
    context.RequestContext(
        request_id=environ.get("openstack.request_id"),
        global_request_id=environ.get("openstack.global_request_id"),
    )


# Key of the WSGI environ: the Host header of the client, before proxy headers replace it.
HOST = "cyborg.host"
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\s\[\]:/@]+)(?::[0-9]{1,5})?")


class HostCheck:
    """A WSGI layer that rejects requests unless ``Host`` is a loopback address or in ``names``."""

    def __init__(self, app: App, names: Collection[str] = ()) -> None:
        self._app = app
        self._names = {_normalize(name) for name in names}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request. Raise Forbidden if Host or Origin has another name."""
        # HOST is the header as it arrived; a proxy header may have replaced HTTP_HOST.
        host = environ.get(HOST, environ.get("HTTP_HOST"))
        # A browser always sends Host.
        if host is not None and not self._is_allowed(host):
            raise Forbidden(
                f"Host: {host[:255]!r} is not a name of this service. Without authentication, only "
                "localhost, loopback addresses and the names in [api] server_names are accepted"
            )
        # A page of another site can send requests to localhost: the port of the API is known, and
        # without authentication nothing else tells them from those of the user.
        origin = environ.get("HTTP_ORIGIN")
        if origin is not None and origin.partition("://")[2].lower() != (host or "").lower():
            raise Forbidden(
                f"Origin: {origin[:255]!r} is another site. Without authentication, cross-origin "
                "requests are rejected"
            )
        return self._app(environ, start_response)

    def _is_allowed(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = _normalize(match["name"])
        return name == "localhost" or name in self._names or _is_loopback(name)


def _normalize(name: str) -> str:
    # A trailing dot names the same host.
    return name.strip("[]").rstrip(".").lower()


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


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


@dataclass(frozen=True, slots=True)
class EntryMiddleware:
    """A WSGI layer that serves public documents, and checks the headers of all other requests.

    It puts the root URL, with which all links start, into the environ. ``documents`` maps paths of
    public documents to functions that return the document for a root URL.
    """

    app: App
    conf: cfg.ConfigOpts
    health: Health
    documents: Documents

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request. Raise an exception that ``faults`` maps to a response."""
        path = _path(environ)
        # Before everything else: a probe has no microversion, and may have any Accept.
        if path == HEALTHCHECK:
            require_get(environ)
            healthy, document = self.health.check()
            return json_response(document, 200 if healthy else 503)(environ, start_response)
        # Before the documents: their links start with it, too.
        environ[ROOT] = root_url(environ, self.conf)
        if path in self.documents:
            require_get(environ)
            return json_response(self.documents[path](environ[ROOT]))(environ, start_response)
        environ[versions.ENVIRON] = versions.requested_version(environ)
        require_json(environ)
        check_content_length(environ, self.conf.api.max_body_size)
        return self.app(environ, start_response)


def root_url(environ: dict[str, Any], conf: cfg.ConfigOpts) -> str:
    """Return the URL of the root of the API, without a slash at its end."""
    # The operator's URL precedes the Host header: a client chooses the latter.
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
    # Normalized for the layers below, which parse it again.
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


def json_response(document: Mapping[str, Any], status: int = 200, **headers: Any) -> webob.Response:
    """Return a response with a JSON object; ``headers`` are attributes of ``webob.Response``."""
    body = json.dumps(document).encode()
    return webob.Response(body=body, status=status, content_type=JSON, **headers)


SERVICE_TYPE = "accelerator"

# Characters of a path, of a query and of the name of a client that an event has.
MAX_LENGTH = 1024

_ENVIRON = "cyborg.audited_environ"
# A client can send any X-Forwarded-For; HTTPProxyToWSGI has evaluated that of a proxy.
_REMOVED = ("HTTP_X_AUTH_TOKEN", "HTTP_X_SERVICE_TOKEN", "HTTP_X_FORWARDED_FOR", "HTTP_COOKIE")
_BOUNDED = ("PATH_INFO", "QUERY_STRING", "HTTP_USER_AGENT")


def add_audit(app: App, conf: cfg.ConfigOpts) -> App:
    """Wrap an app in the audit layer if ``[api] audit_map_file`` is set. Raise Misconfigured."""
    return AuditLayer(app, conf, AuditNotifier(conf)) if conf.api.audit_map_file else app


class AuditLayer:
    """A WSGI layer that sends two events for each request: before it, and with its outcome."""

    def __init__(self, app: App, conf: cfg.ConfigOpts, notifier: EventNotifier) -> None:
        """Raise Misconfigured if the map file cannot be read."""
        self._app = app
        self._ignored = frozenset(method.upper() for method in conf.api.audit_ignored_methods)
        try:
            self._audited = make_audit_middleware(self._serve, conf.api.audit_map_file, notifier)
        except (OSError, ValueError) as exc:
            raise Misconfigured(
                f"[api] audit_map_file: {exc}", option="[api] audit_map_file"
            ) from exc

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        if environ["REQUEST_METHOD"] in self._ignored:
            return self._app(environ, start_response)
        # A token may lack the catalogue, by which keystonemiddleware names the target of an event.
        endpoint = {"publicURL": environ[ROOT]}
        service = {"type": SERVICE_TYPE, "name": "cyborg", "endpoints": [endpoint]}
        audited = {name: value for name, value in environ.items() if name not in _REMOVED}
        audited |= {name: environ[name][:MAX_LENGTH] for name in _BOUNDED if name in environ}
        audited |= {"HTTP_X_SERVICE_CATALOG": json.dumps([service]), _ENVIRON: environ}
        return self._audited(audited, start_response)  # type: ignore[no-any-return]

    def _serve(self, audited: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return self._app(audited[_ENVIRON], start_response)
