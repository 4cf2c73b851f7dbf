# SPDX-License-Identifier: Apache-2.0
"""The WSGI application, layer by layer.

::

    request id       X-Openstack-Request-Id in the response and in every log line
    tracing          a span of each request if [tracing] is enabled
    access log       one line for each request
    proxy headers    if [oslo_middleware] enable_proxy_headers_parsing is set
    versions         the microversion headers of the response
    faults           turns exceptions of the layers below into error bodies
    host             with noauth only: accepts only the names of this machine
    console          if [api] console is set: the files of /ui, and the sign-in
    entry            health check, public documents, microversion, Content-Length
    authentication   keystone, or noauth for loopback connections only
    console          if [api] console is set: the session of its user
    audit            CADF events if [api] audit_map_file is set
    body             reads the whole body, limited in size and time
    pecan            routes and operations
"""

from collections.abc import Iterable
from typing import Any

from oslo_config import cfg
from oslo_middleware import http_proxy_to_wsgi, request_id
from pecan.core import Pecan

from cyborg.api import auth, middleware, versions
from cyborg.api.body import BodyReader
from cyborg.api.console.sign_in import ConsoleSession
from cyborg.api.console.site import ConsoleSite
from cyborg.api.controller import ApiContext, Request
from cyborg.api.faults import FaultHook, FaultMiddleware
from cyborg.api.health import Health
from cyborg.api.openapi.document import DOCUMENT_PATHS, OpenApiDocument
from cyborg.api.routes import Root, build_routes, make_route_finder
from cyborg.compat.api import cache_pecan_signatures
from cyborg.db.engine import Reader
from cyborg.policies.enforcer import make_enforcer
from cyborg.rpc.contract import ConductorAPI
from cyborg.telemetry.recorder import MetricRecorder
from cyborg.tracing import TracingMiddleware


class Api:
    """The WSGI application; ``health`` is the state behind ``/healthcheck``."""

    def __init__(self, conf: cfg.ConfigOpts, context: ApiContext, recorder: MetricRecorder) -> None:
        """Build the application with its middleware, the outermost last."""
        self.health = Health(context.reader)
        cache_pecan_signatures()
        routes = build_routes(context)
        resources = Pecan(
            Root(routes),
            default_renderer="json",
            hooks=lambda: [FaultHook()],
            force_canonical=False,
            guess_content_type_from_ext=False,
            use_context_locals=False,
            request_cls=Request,
        )
        # From the innermost layer to the outermost; a request passes them in the opposite order.
        app: middleware.App = BodyReader(resources, conf)
        if conf.api.console:
            app = ConsoleSession(app, conf)
        # Within authentication: keystonemiddleware would answer exceptions in its own format.
        app = middleware.add_audit(FaultMiddleware(app), conf)
        app = auth.add_authentication(app, conf, make_enforcer(conf))
        documents = dict(middleware.VERSIONS)
        documents |= dict.fromkeys(DOCUMENT_PATHS, OpenApiDocument(routes).document)
        # Outside of authentication: the documents are public, and headers are checked before
        # keystone is called.
        app = middleware.EntryMiddleware(app, conf, self.health, documents)
        # The paths that no route of the table has, for the log and the metrics.
        paths = {middleware.HEALTHCHECK, *documents}
        if conf.api.console:
            app = site = ConsoleSite(app, conf)
            paths |= site.paths
        if conf.auth_strategy == "noauth":
            # Outside of all that answers: after a DNS rebinding, another site must not read even
            # the public documents.
            app = middleware.HostCheck(app, conf.api.server_names)
        app = versions.MicroversionHeaders(FaultMiddleware(app))
        # Always constructed: it registers the option that the next line reads.
        proxied = http_proxy_to_wsgi.HTTPProxyToWSGI(app, conf)
        if conf.oslo_middleware.enable_proxy_headers_parsing:
            app = proxied
        find_route = make_route_finder(routes, paths)
        # Outside of the proxy layer and of errors: it counts every request, with its last status.
        app = middleware.AccessLog(app, find_route, recorder)
        if conf.tracing.enabled:
            ignored_paths = {middleware.HEALTHCHECK}
            app = TracingMiddleware(app, find_route, ignored_paths)
        # The outermost: all lines of the log have the request id.
        self._app = request_id.RequestId(app, conf)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        # Saved before the proxy headers, which any client can forge, replace these values.
        environ[auth.PEER] = environ.get("REMOTE_ADDR")
        environ[middleware.HOST] = environ.get("HTTP_HOST")
        return self._app(environ, start_response)


def make_app(
    conf: cfg.ConfigOpts,
    conductor: ConductorAPI,
    reader: Reader,
    recorder: MetricRecorder | None = None,
) -> Api:
    """Return the API, which uses a conductor client and a database reader. Opens no connection.

    ``recorder`` records its metrics.
    """
    return Api(conf, ApiContext(conf, conductor, reader), recorder or MetricRecorder())
