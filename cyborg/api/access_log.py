# SPDX-License-Identifier: Apache-2.0
"""Access log: one line for each request, with its request id, user and project in the context.

The line has no text from the client: an unknown method or path is shown as ``-``.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from oslo_context import context

from cyborg.core.log import get_logger

LOG = get_logger("cyborg.api.access")

UNKNOWN = "-"
METHODS = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"}
)
HEALTHCHECK = "/healthcheck"

App = Callable[..., Iterable[bytes]]


class AccessLog:
    """A WSGI layer that logs method, route, status and duration of each request.

    ``find_route`` maps a path to its route, such as ``/v2/devices/{uuid}``; None if there is none.
    """

    def __init__(
        self,
        app: App,
        find_route: Callable[[str], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._find_route = find_route
        self._clock = clock

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        started = self._clock()
        _reset_context(environ)
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "")
        status = 500  # if a layer fails without a response

        def start(line: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            nonlocal status
            status = int(line.split(" ", 1)[0])
            return start_response(line, headers, *more)

        try:
            return self._app(environ, start)
        finally:
            self._log(method, path, status, (self._clock() - started) * 1000)

    def _log(self, method: str, path: str, status: int, ms: float) -> None:
        # Load balancers probe several times a second.
        level = logging.DEBUG if path == HEALTHCHECK else logging.INFO
        if not LOG.isEnabledFor(level):
            return
        shown = method if method in METHODS else UNKNOWN
        route = self._find_route(path) or UNKNOWN
        fields = {"method": shown, "route": route, "status": status, "ms": round(ms, 1)}
        LOG.log(level, "%s %s %d %.1f ms", shown, route, status, ms, extra=fields)


def _reset_context(environ: dict[str, Any]) -> None:
    """Give the thread a context with the request id only, until the caller is authenticated.

    Otherwise the log lines of a request that is rejected before authentication would have the
    request id and the user of the previous request of the thread.
    """
    context.RequestContext(
        request_id=environ.get("openstack.request_id"),
        global_request_id=environ.get("openstack.global_request_id"),
    )
