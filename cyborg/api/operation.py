# SPDX-License-Identifier: Apache-2.0
"""The operations of the API: controller methods that WSME describes and pecan calls.

The decorator declares the policy rule, the first microversion, the parameters, the body and the
response. The OpenAPI document is generated from it, and the method gets validated values. A
collection has what its operations share: the policy rules, the version, the list, the objects.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType, ModuleType, new_class
from typing import Any, Protocol

import pecan
import sqlalchemy as sa
import webob
import wsme.api
from webob import exc
from wsme import types as wtypes

from cyborg.api import controller, types, versions
from cyborg.api.controller import PageRequest, Request, RequestContext, Resource
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
    takes_turns: bool = False  # 429 while others are served: ``ApiContext.evaluations``
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
            wsme.api.FunctionArgument(name, datatype, mandatory=name in self.path, default=None)
            for name, datatype in parameters.items()
        ]
        if self.body is not None:
            definition.arguments.append(
                wsme.api.FunctionArgument(
                    "body", self.body, mandatory=not self.optional, default=None
                )
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
            # ``fields`` may have another type of the body.
            **{"body": method.__annotations__.get("body"), **fields},
        )

        @functools.wraps(method)
        def serve(self: Any, req: Request, resp: webob.Response, *segments: str) -> Any:
            context = RequestContext(req, resp)
            # Before the policy: for an older version the operation does not exist, for anybody.
            if context.version < spec.since:
                since = ".".join(map(str, spec.since))
                raise NotFound(f"{req.path_info} requires microversion {since}")
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
                # 404 if the list of a host is empty because no such host is known. Its filter has
                # one of these names.
                self.check_host(context, values.get("host") or values.get("hostname"), result)
            if result is None:
                # webob would send text/html with an empty body, and 204 must have no type.
                resp.content_type = None
            else:
                resp.content_type = JSON
                resp.body = json.dumps(result).encode()
            return resp

        # Pecan must not see the inner signature, which functools.wraps leaves here.
        del serve.__wrapped__
        exposed = pecan.expose(content_type=JSON)(serve)
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
    """Return the values of path and query, and the page, by name. Raise Invalid.

    A query parameter is None if it is not given, or if the version does not have it.
    """
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
        # Only of a Repeated: other WSME types have no such attribute.
        repeated = getattr(supported[name], "repeated", False)
        if name in given and not repeated:
            raise Invalid(f"{name}: duplicate parameter", field=name)
        value = types.load(supported[name], text, name)
        if repeated:
            given.setdefault(name, []).append(value)
        else:
            given[name] = value
    if spec.paged:
        values["page"] = PageRequest(given, max_limit)
    # The page has ``with_count``, which is no filter of the operation.
    names = spec.query.keys() - {controller.WITH_COUNT}
    return values | {name: given.get(name) for name in names}


def _body(spec: Operation, req: Request) -> Any:
    """Return the parsed body, unwrapped as ``spec`` permits. Raise Invalid."""
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


# The class of the rows depends on the module ``read``, so that it is Any here.
Show = Callable[[RequestContext, Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Collection:
    """A collection of the API.

    Rows are shown as the WSME type ``datatype`` describes, or by the function ``show``.
    """

    name: str  # first segment of its paths
    resource: str  # in the policy rules cyborg:<resource>:<action>
    read: ModuleType  # with the functions find and get that its operations use
    datatype: Any
    _: KW_ONLY
    since: versions.Version = versions.MINIMUM
    key: str = ""  # of the rows in the list; by default the name
    noun: str = ""  # of one object in error messages; by default from the resource
    nouns: str = ""  # of the objects in the description of the list; by default the name
    list_name: str = ""  # of the type of the list; by default the nouns
    show: Show | None = None
    scoped: bool = False  # callers see the rows of their project only

    # One class for all uses: WSME knows a type by its identity.
    @functools.cached_property
    def list_type(self) -> Any:
        """Return the WSME type of the list."""
        key = self.key or self.name
        links = f"{key}_links"
        nouns = self.nouns or self.name.replace("_", " ")
        attributes = {
            "__doc__": f"A list of {nouns}.",
            key: types.required([self.datatype]),
            links: types.optional([types.Link]),
            "count": types.optional(int),
        }
        name = self.list_name or nouns.title().replace(" ", "")
        return new_class(name, (types.JsonObject,), exec_body=lambda body: body.update(attributes))

    def operation(self, call: str, action: str = "", **fields: Any) -> Callable[..., Any]:
        """Expose a controller method, as the function ``operation`` of this module does.

        ``action`` is the end of the name of the policy rule, by default the name of the method;
        ``fields`` are further arguments of that function.
        """
        # An operation without an answer has an empty body.
        fields.setdefault("status", 200 if "answer" in fields else 204)
        fields.setdefault("since", self.since)

        def decorate(method: Callable[..., Any]) -> Any:
            rule = f"cyborg:{self.resource}:{action or method.__name__}"
            return operation(call, rule, **fields)(method)

        return decorate

    def list_operation(self, **fields: Any) -> Callable[..., Any]:
        """Expose a controller method that returns a page of the list, and counts it on request."""
        count, since = controller.WITH_COUNT, controller.COUNT_SINCE
        fields["query"] = {**fields.get("query", {}), count: types.TRUTH}
        fields["query_since"] = {**fields.get("query_since", {}), count: since}
        return self.operation(
            f"GET {self.name}", "get_all", answer=self.list_type, paged=True, **fields
        )

    def find(
        self,
        description: str,
        columns: Mapping[str, str] | None = None,
        read: Callable[..., list[Any]] | None = None,
        query_since: Mapping[str, versions.Version] | None = None,
        **query: Any,
    ) -> Any:
        """Return the operation that lists the collection; ``query`` has the types of the filters.

        Filters are passed to ``read``, by default the function ``find`` of the module ``read``, as
        parameters of the same name, or of the name in ``columns``. ``query_since`` has the versions
        of newer filters.
        """

        # The name is the end of the operation id in the OpenAPI document.
        def find(
            resource: Resource, request: RequestContext, page: PageRequest, **filters: Any
        ) -> Any:
            criteria = {(columns or {}).get(name, name): value for name, value in filters.items()}
            if self.scoped:
                criteria["project_id"] = request.caller.project_scope
            rows = resource.read_page(page, read or self.read.find, **criteria)
            return self.document(request, rows)

        find.__doc__ = description
        return self.list_operation(query=query, query_since=query_since or {})(find)

    def get(self, description: str, path: Mapping[str, Any] = PATH_TYPES) -> Any:
        """Return the operation that shows one object; ``path`` is that of ``operation``."""

        def get(resource: Resource, request: RequestContext, uuid: str) -> Any:
            return self.show_row(request, self.read_row(resource, request, uuid))

        get.__doc__ = description
        expose = self.operation(
            f"GET {self.name}/{{uuid}}", "get_one", answer=self.datatype, path=path
        )
        return expose(get)

    def read_row(self, resource: Resource, request: RequestContext, key: str) -> Any:
        """Return the row of one object. Raise NotFound if it is not visible to the caller."""
        scope = (request.caller.project_scope,) if self.scoped else ()
        with resource.context.reader.connect() as connection:
            return self.find_row(connection, key, *scope)

    def find_row(self, connection: sa.Connection, key: str, *scope: str | None) -> Any:
        """Return the row of one object, of the projects in ``scope``. Raise NotFound."""
        row = self.read.get(connection, key, *scope)
        if row is None:
            raise NotFound(f"no {self.noun or self.resource.replace('_', ' ')} {key}")
        return row

    def show_row(self, request: RequestContext, row: Any) -> Mapping[str, Any]:
        """Return a row as JSON."""
        if self.show is not None:
            return self.show(request, row)
        return request.serialize(self.datatype, row, self.name)

    def document(
        self, request: RequestContext, page: tuple[list[Any], str | None], show: Show | None = None
    ) -> dict[str, Any]:
        """Return a page of the list as JSON; every page but the last has a link to the next page.

        ``page`` is the rows and the marker of the next page, None on the last page.
        """
        rows, marker = page
        key, show_row = self.key or self.name, show or self.show_row
        document: dict[str, Any] = {key: [show_row(request, row) for row in rows]}
        return request.add_next_link(document, self.name, key, marker)
