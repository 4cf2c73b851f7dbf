# SPDX-License-Identifier: Apache-2.0
"""A WSGI layer that audits requests by the middleware of keystonemiddleware.

The middleware sees a copy of the environ: without tokens, of which it would publish both ends, and
with this service as the only one of the catalogue, which a token may lack.
"""

import json
from collections.abc import Iterable
from typing import Any

from oslo_config import cfg

from cyborg.api.access_log import App
from cyborg.api.middleware import ROOT
from cyborg.compat import api as audit_middleware
from cyborg.core.errors import Misconfigured
from cyborg.rpc.notifiers import AuditNotifier

SERVICE_TYPE = "accelerator"

MAX_LENGTH = 1024
"""Characters of a path, of a query and of the name of a client that an event has."""

_ENVIRON = "cyborg.audited_environ"
# A client can send any X-Forwarded-For; HTTPProxyToWSGI has evaluated that of a proxy.
_REMOVED = ("HTTP_X_AUTH_TOKEN", "HTTP_X_SERVICE_TOKEN", "HTTP_X_FORWARDED_FOR", "HTTP_COOKIE")
_BOUNDED = ("PATH_INFO", "QUERY_STRING", "HTTP_USER_AGENT")


def add_audit(app: App, conf: cfg.ConfigOpts) -> App:
    """Wrap an app in the audit layer if ``[api] audit_map_file`` is set. Raise Misconfigured."""
    return AuditLayer(app, conf, AuditNotifier(conf)) if conf.api.audit_map_file else app


class AuditLayer:
    """A WSGI layer that sends two events for each request: before it, and with its outcome."""

    def __init__(
        self, app: App, conf: cfg.ConfigOpts, notifier: audit_middleware.EventNotifier
    ) -> None:
        """Raise Misconfigured if the map file cannot be read."""
        self._app = app
        self._ignored = frozenset(method.upper() for method in conf.api.audit_ignored_methods)
        try:
            self._audited = audit_middleware.make_audit_middleware(
                self._serve, conf.api.audit_map_file, notifier
            )
        except (OSError, ValueError) as exc:
            raise Misconfigured(
                f"[api] audit_map_file: {exc}", option="[api] audit_map_file"
            ) from exc

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        if environ["REQUEST_METHOD"] in self._ignored:
            return self._app(environ, start_response)
        endpoint = {"publicURL": environ[ROOT]}
        service = {"type": SERVICE_TYPE, "name": "cyborg", "endpoints": [endpoint]}
        audited = {name: value for name, value in environ.items() if name not in _REMOVED}
        audited |= {name: environ[name][:MAX_LENGTH] for name in _BOUNDED if name in environ}
        audited |= {"HTTP_X_SERVICE_CATALOG": json.dumps([service]), _ENVIRON: environ}
        return self._audited(audited, start_response)  # type: ignore[no-any-return]

    def _serve(self, audited: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return self._app(audited[_ENVIRON], start_response)
