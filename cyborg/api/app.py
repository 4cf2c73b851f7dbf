# SPDX-License-Identifier: Apache-2.0
"""The WSGI application, layer by layer.

::

    request id       X-Openstack-Request-Id of the answer, and of every line of the log
    proxy headers    if [oslo_middleware] enable_proxy_headers_parsing is set
    versions         the microversion headers of the answer
    faults           whatever is raised below becomes an error's body
    edge             health check, public documents, microversion, size of the body
    authentication   keystone, or loopback alone
    pecan            routes, operations
"""

import functools
from collections.abc import Iterable
from typing import Any

import pecan.core
import pecan.routing
from oslo_config import cfg
from oslo_middleware import http_proxy_to_wsgi, request_id
from pecan.core import Pecan

from cyborg.api import auth, openapi, versions
from cyborg.api.call import Request
from cyborg.api.edge import Edge
from cyborg.api.faults import FaultHook, Faults
from cyborg.api.health import Health
from cyborg.api.resource import Desk
from cyborg.api.routes import Root, table
from cyborg.db.reader import Reader
from cyborg.policies.enforcer import make_enforcer
from cyborg.rpc.conductor import ConductorClient

# At each request pecan works out the signatures of the same few methods, and makes a class for each
# answer: a tenth of what a request costs. There is no setting for it.
for _place in (pecan.core, pecan.routing):
    _place.getargspec = functools.lru_cache(maxsize=1024)(_place.getargspec)


class Api:
    """The application; ``health`` is what its health check tells."""

    def __init__(self, conf: cfg.ConfigOpts, desk: Desk) -> None:
        self.health = Health(desk.reader)
        routes = table(desk)
        resources = Pecan(
            Root(routes),
            default_renderer="json",
            hooks=lambda: [FaultHook()],
            force_canonical=False,
            guess_content_type_from_ext=False,
            use_context_locals=False,
            request_cls=Request,
        )
        app = auth.wrap(resources, conf, make_enforcer(conf))
        documents = dict.fromkeys(openapi.PATHS, openapi.Description(routes).document)
        app = versions.Telling(Faults(Edge(app, conf, self.health, documents)))
        proxied = http_proxy_to_wsgi.HTTPProxyToWSGI(app, conf)
        if conf.oslo_middleware.enable_proxy_headers_parsing:
            app = proxied
        self._app = request_id.RequestId(app, conf)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        # Before the proxy's headers, which anybody can send, may say something else.
        environ[auth.PEER] = environ.get("REMOTE_ADDR")
        return self._app(environ, start_response)  # type: ignore[no-any-return]


def make_app(conf: cfg.ConfigOpts, conductor: ConductorClient, reader: Reader) -> Api:
    """Return the API over a conductor and the read side of the database. Nothing is connected."""
    return Api(conf, Desk(conf, conductor, reader))
