# SPDX-License-Identifier: Apache-2.0
"""Access log and metrics: method, route, status and duration of each request.

A log line has the request id, user and project of the context. Neither has text from the client:
an unknown method or path is shown as ``-``. Metrics also show a method that the route does not
serve as ``-``.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from oslo_context import context

from cyborg.core.log import get_logger
from cyborg.telemetry.recorder import API_REQUESTS, API_SECONDS, MetricRecorder

LOG = get_logger("cyborg.api.access")

HEALTHCHECK = "/healthcheck"

UNKNOWN = "-"
"""What is shown instead of an unknown method or route."""

METHODS = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"}
)
"""The methods that a log line shows."""

App = Callable[..., Iterable[bytes]]
FindRoute = Callable[[str, str], tuple[str, str]]


class AccessLog:
    """A WSGI layer that logs and counts each request.

    ``find_route`` is that of ``cyborg.api.routes``.
    """

    def __init__(
        self,
        app: App,
        find_route: FindRoute,
        recorder: MetricRecorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._find_route = find_route
        self._recorder = recorder
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
            seconds = self._clock() - started
            # Not each method of each route: anybody could add series, also without a token.
            served, route = self._find_route(method, path)
            self._recorder.count(API_REQUESTS, served, route, str(status))
            self._recorder.observe(API_SECONDS, seconds, served, route)
            self._log(method if method in METHODS else UNKNOWN, route, status, seconds * 1000)

    def _log(self, shown: str, route: str, status: int, ms: float) -> None:
        # Load balancers probe several times a second.
        level = logging.DEBUG if route == HEALTHCHECK else logging.INFO
        if not LOG.isEnabledFor(level):
            return
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
