# SPDX-License-Identifier: Apache-2.0
"""The routes of the API. Every path is served with and without the prefix /v2."""

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import pecan
from webob import exc

from cyborg.api import v2
from cyborg.api.controller import ApiContext, Resource
from cyborg.api.faults import OBJECT
from cyborg.api.middleware import UNKNOWN
from cyborg.api.operation import ControllerMethod

RouteTable = Mapping[str, Mapping[str, ControllerMethod]]
# Path of the document with all operations.
DOCUMENT = "/v2/openapi.json"
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
# POST is that of the sign-in of the console.
_DOCUMENT_METHODS = frozenset({"GET", "HEAD", "POST"})


def build_routes(context: ApiContext) -> RouteTable:
    """Return the operations by path and method; ``*`` stands for one name or uuid.

    Each module in ``cyborg.api.v2`` has controllers, whose operations declare their routes.
    """
    operations = []
    for module in pkgutil.iter_modules(v2.__path__, f"{v2.__name__}."):
        for controller in _controllers(importlib.import_module(module.name)):
            resource = controller(context)
            # Its own attributes only: those of the base class are no operations.
            bound = (getattr(resource, name) for name in vars(controller))
            operations += [method for method in bound if hasattr(method, "operation")]
    # The order of the OpenAPI document, whatever the order in the modules.
    operations.sort(key=lambda method: _METHODS.index(method.operation.method))
    table: dict[str, dict[str, ControllerMethod]] = {}
    for method in sorted(operations, key=lambda method: method.operation.route):
        table.setdefault(method.operation.route, {})[method.operation.method] = method
    return table


def _controllers(module: ModuleType) -> list[type[Resource]]:
    """Return the controllers that a module defines; imported ones belong to their own module."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Resource)
        and value.__module__ == module.__name__
    ]


def match_path(args: Sequence[str]) -> tuple[str, list[str]]:
    """Return the key of the route table for the segments of a path, and the names in the path."""
    segments = list(args[1:] if args and args[0] == "v2" else args)
    if segments and segments[-1] == "":
        segments.pop()
    # Every second segment is a name or uuid, which is a star in the table.
    pattern = "/".join("*" if n % 2 else s for n, s in enumerate(segments))
    return pattern, segments[1::2]


def make_route_finder(
    routes: RouteTable, documents: Collection[str]
) -> Callable[[str, str], tuple[str, str]]:
    """Return a function that maps a method and a path to the method and the route to show.

    A route is such as ``/v2/devices/{uuid}``; each path in ``documents`` is its own route. An
    unknown route, and a method that its route does not serve, are shown as UNKNOWN, so that a
    client cannot choose what is shown.
    """
    rendered = {
        pattern: f"/v2/{next(iter(methods.values())).operation.template}"
        for pattern, methods in routes.items()
    }
    served = {
        pattern: {*methods, *(("HEAD",) if "GET" in methods else ())}
        for pattern, methods in routes.items()
    }

    def find_route(method: str, path: str) -> tuple[str, str]:
        if path in documents:
            served_method = method if method in _DOCUMENT_METHODS else UNKNOWN
            return served_method, path or "/"
        pattern, _ = match_path(path.split("/")[1:])
        route = rendered.get(pattern)
        if route is None:
            return UNKNOWN, UNKNOWN
        served_method = method if method in served[pattern] else UNKNOWN
        return served_method, route

    return find_route


class Root:
    """The root controller of pecan; dispatches by the route table only."""

    def __init__(self, routes: RouteTable) -> None:
        self._routes = routes

    @pecan.expose()  # type: ignore[untyped-decorator]
    def _route(self, args: Sequence[str], request: Any) -> tuple[Callable[..., Any], list[str]]:
        """Return the method of the controller for a path and its parameters."""
        pattern, names = match_path(args)
        methods = self._routes.get(pattern)
        # A name is empty in a path such as /devices//enable.
        if methods is None or "" in names:
            raise exc.HTTPNotFound(
                f"unknown path {request.path_info[:200]}; {DOCUMENT} has the known ones"
            )
        collection = pattern.split("/")[0]
        # For errors about the first object in the path: where its list is, if it has one.
        if names and "GET" in self._routes.get(collection, {}):
            request.environ[OBJECT] = names[0], f"/v2/{collection}"
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods:
            allowed = ", ".join(sorted({*methods, *(("HEAD",) if "GET" in methods else ())}))
            message = f"{method} is not supported for {request.path_info}, use {allowed}"
            raise exc.HTTPMethodNotAllowed(message[:255], headers={"Allow": allowed})
        return methods[method], names
