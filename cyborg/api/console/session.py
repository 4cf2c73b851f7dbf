# SPDX-License-Identifier: Apache-2.0
"""GET /ui/session: who the user of the console is, and what the policy allows.

It is no part of the REST API and has no microversion: the page is of the same release.
"""

import json
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import webob
from oslo_config import cfg

from cyborg.api import identity
from cyborg.api.access_log import App
from cyborg.api.middleware import JSON, require_get
from cyborg.policies.rules import OPERATION_RULES

SESSION = "/ui/session"


class ConsoleSession:
    """A WSGI layer, after authentication, that serves the session of the console's user."""

    def __init__(self, app: App, conf: cfg.ConfigOpts) -> None:
        self._app = app
        self._conf = conf

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        if environ.get("PATH_INFO") != SESSION:
            return self._app(environ, start_response)
        require_get(environ)
        document = self._show(environ[identity.ENVIRON])
        response = webob.Response(body=json.dumps(document).encode(), content_type=JSON)
        response.headers["Cache-Control"] = "no-store"
        return response(environ, start_response)

    def _show(self, caller: identity.Caller) -> dict[str, Any]:
        """Return the caller, and the operations that the policy allows in the caller's project."""
        context = caller.context
        rules = [f"cyborg:{rule[0]}" for rule in OPERATION_RULES]
        return {
            "release": metadata.version("cyborg"),
            "auth": self._conf.auth_strategy,
            "user": context.user_name or context.user_id,
            "project": context.project_name or caller.project_id,
            "roles": sorted(context.roles),
            "all_projects": caller.project_scope is None,
            "rules": [rule for rule in rules if caller.allows(rule)],
        }
