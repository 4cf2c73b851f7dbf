# SPDX-License-Identifier: Apache-2.0
"""One operation of the API: a controller method that WSME describes and pecan calls.

The decorator declares the policy rule, the first microversion, the parameters, the body and the
response. The OpenAPI document is generated from it, and the method gets validated values.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import pecan
import webob
import wsme.api
from webob import exc
from wsme import types as wtypes

from cyborg.api import controller, types, versions
from cyborg.api.controller import Request, RequestContext
from cyborg.api.middleware import JSON
from cyborg.core.errors import CyborgError, Invalid, NotFound, ServiceTokenRequired

# The types of the parameters in paths, unless an operation declares another one.
PATH_TYPES: Mapping[str, Any] = {
    "uuid": types.Uuid(),
    "key": types.UuidOrName(),
    "suffix": types.UuidOrName(),
}
_PATH_PARAMETER = re.compile(r"{(\w+)}")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """The declaration of an operation; types are WSME types."""

    method: str
    template: str  # path with parameters, such as devices/{uuid}/enable
    rule: str  # policy rule
    answer: Any = None  # type of the response; None if it is empty
    status: int = 200
    since: versions.Version = versions.MINIMUM
    path: Mapping[str, Any] = field(default_factory=dict)  # parameters by name, in order
    query: Mapping[str, Any] = field(default_factory=dict)
    query_since: Mapping[str, versions.Version] = field(default_factory=dict)  # if not ``since``
    paged: bool = False  # adds the paging parameters; the method gets them as ``page``
    body: Any = None
    single_item_list: bool = False  # the body may be a list of exactly one object
    envelope: str | None = None  # the body may be the only value of an object, under this key
    ignore_unknown: bool = False  # the body may have unknown fields
    optional: bool = False  # the body may be missing
    service: str | None = None  # if a service token is required: the action, for the error message
    raises: tuple[type[CyborgError], ...] = ()  # in addition to those that any operation can raise

    @property
    def route(self) -> str:
        """Return the path with ``*`` for each parameter."""
        return _PATH_PARAMETER.sub("*", self.template)

    def describe(self, method: Callable[..., Any]) -> wsme.api.FunctionDefinition:
        """Return the WSME definition of the operation."""
        definition = wsme.api.FunctionDefinition(method)
        definition.return_type = self.answer
        definition.body_type = self.body
        definition.status_code = self.status
        parameters = {**self.path, **self.query, **(controller.PARAMETERS if self.paged else {})}
        definition.arguments = [
            wsme.api.FunctionArgument(name, datatype, name in self.path, None)
            for name, datatype in parameters.items()
        ]
        if self.body is not None:
            definition.arguments.append(
                wsme.api.FunctionArgument("body", self.body, not self.optional, None)
            )
        definition.resolve_types(wtypes.registry)
        return definition


class ControllerMethod(Protocol):
    """A controller method that ``operation`` has exposed."""

    operation: Operation

    def __call__(self, *arguments: Any, **parameters: Any) -> Any:
        """Serve one request."""


def operation(
    call: str,
    rule: str,
    *,
    path: Mapping[str, Any] = PATH_TYPES,
    query: Mapping[str, Any] = MappingProxyType({}),
    paged: bool = False,
    raises: tuple[type[CyborgError], ...] = (),
    **fields: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Expose a controller method with pecan; ``fields`` are more fields of its ``Operation``.

    ``call`` is the HTTP method and the path, such as ``GET devices/{uuid}``; ``path`` has the types
    of the path parameters. The type of the body is by default the annotation of ``body``.

    The method gets the ``RequestContext`` and, by name, the parameters (None if not given),
    ``page`` and ``body``. It returns a JSON value.
    """
    verb, template = call.split()
    parameters = {name: path[name] for name in _PATH_PARAMETER.findall(template)}
    # An object of the path may not exist; ``check_host`` answers 404 for a list of an unknown host.
    if parameters or (paged and not {"host", "hostname"}.isdisjoint(query)):
        raises = (*raises, NotFound)

    def decorate(method: Callable[..., Any]) -> Any:
        spec = Operation(
            method=verb,
            template=template,
            rule=rule,
            path=parameters,
            query=query,
            paged=paged,
            raises=raises,
            **{"body": method.__annotations__.get("body"), **fields},
        )

        @functools.wraps(method)
        def controller(self: Any, req: Request, resp: webob.Response, *segments: str) -> Any:
            context = RequestContext(req, resp)
            # Before the policy: for an older version the operation does not exist, for anybody.
            if context.version < spec.since:
                raise NotFound(f"{req.path_info} requires microversion {_text(spec.since)}")
            # Before the parameters, whose errors would tell others what exists.
            context.caller.require(spec.rule)
            if spec.service and not context.caller.is_service:
                raise ServiceTokenRequired(f"{spec.service} requires a service token")
            max_limit = self.context.conf.api.max_limit
            values = _parameters(spec, req, segments, context.version, max_limit)
            if spec.body is not None:
                values["body"] = _body(spec, req)
            resp.status_int = spec.status
            result = method(self, context, **values)
            if spec.paged and values["page"].count is not None:
                result["count"] = values["page"].count
            if spec.paged:
                self.check_host(context, values.get("host") or values.get("hostname"), result)
            _set_result(resp, result)
            return resp

        # Pecan must not see the inner signature, which functools.wraps leaves here.
        del controller.__wrapped__
        exposed = pecan.expose(content_type=JSON)(controller)
        exposed._wsme_definition = spec.describe(method)
        exposed.operation = spec
        return exposed

    return decorate


def _parameters(
    spec: Operation,
    req: Request,
    segments: tuple[str, ...],
    version: versions.Version,
    max_limit: int,
) -> dict[str, Any]:
    values = {
        name: types.load(datatype, segment, name)
        for (name, datatype), segment in zip(spec.path.items(), segments, strict=True)
    }
    supported = {
        name: datatype
        for name, datatype in spec.query.items()
        if version >= spec.query_since.get(name, versions.MINIMUM)
    }
    supported |= controller.PARAMETERS if spec.paged else {}
    given: dict[str, Any] = {}
    for name, text in req.GET.items():
        if name not in supported:
            shown = name[: types.MAX_SHOWN]
            raise Invalid(
                f"{shown}: unknown parameter, supported: {', '.join(sorted(supported)) or 'none'}",
                field=shown,
            )
        repeated = getattr(supported[name], "repeated", False)
        if name in given and not repeated:
            raise Invalid(f"{name}: duplicate parameter", field=name)
        value = types.load(supported[name], text, name)
        if repeated:
            given.setdefault(name, []).append(value)
        else:
            given[name] = value
    if spec.paged:
        values["page"] = controller.PageRequest(given, max_limit)
    names = spec.query.keys() - {controller.WITH_COUNT}
    return values | {name: given.get(name) for name in names}


def _body(spec: Operation, req: Request) -> Any:
    # Before the content type: a client without a body sends none.
    if not req.body:
        if spec.optional:
            return types.load(spec.body, {}, "body")
        raise Invalid("body: missing, expected JSON", field="body")
    if req.content_type != JSON:
        raise exc.HTTPUnsupportedMediaType(f"Content-Type must be {JSON}")
    try:
        value = req.json
    except ValueError as error:
        raise Invalid(f"body: not JSON: {error}", field="body") from error
    # OpenStack Cyborg takes a list of one device profile.
    if spec.single_item_list and isinstance(value, list):
        if len(value) != 1:
            raise Invalid(
                f"body: expected a list of one object, got {len(value)} objects", field="body"
            )
        value = value[0]
    # openstacksdk wraps the object in its name.
    if spec.envelope and isinstance(value, dict) and set(value) == {spec.envelope}:
        value = value[spec.envelope]
    if spec.ignore_unknown and isinstance(value, dict):
        fields = {attribute.name for attribute in wtypes.list_attributes(spec.body)}
        value = {name: item for name, item in value.items() if name in fields}
    return types.load(spec.body, value, "body")


def _set_result(resp: webob.Response, result: Any) -> None:
    if result is None:
        # webob would send text/html with an empty body, and 204 must have no type.
        resp.content_type = None
    else:
        resp.content_type = JSON
        resp.body = json.dumps(result).encode()


def _text(version: versions.Version) -> str:
    return f"{version[0]}.{version[1]}"
