# SPDX-License-Identifier: Apache-2.0
"""A WSGI layer that records a span of each request, which starts a trace or continues one."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from cyborg import tracing

App = Callable[..., Iterable[bytes]]


@dataclass(eq=False)
class TracingMiddleware:
    """A WSGI layer that records the requests of an app.

    The header ``traceparent`` of the client is used if it is well-formed. The name of a span has
    the method and the route, such as ``GET /v2/devices/{uuid}``, so that a client cannot choose it.

    ``find_route`` returns the method and the route to show of a method and a path.
    """

    app: App
    find_route: Callable[[str, str], tuple[str, str]]
    ignored_paths: Collection[str]

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        path = environ.get("PATH_INFO", "")
        if path in self.ignored_paths:
            return self.app(environ, start_response)

        def start(line: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            tracing.annotate(status=int(line.split(" ", 1)[0]))
            return start_response(line, headers, *more)

        method, route = self.find_route(environ["REQUEST_METHOD"], path)
        with tracing.root_span(
            f"{method} {route}",
            environ.get("HTTP_TRACEPARENT"),
            tracing.SpanKind.SERVER,
            method=method,
            route=route,
            request_id=environ.get("openstack.request_id"),
        ):
            return self.app(environ, start)
