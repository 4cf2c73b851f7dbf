# SPDX-License-Identifier: Apache-2.0
"""Common parts of the operations on a collection: policy rule, version, list, single object."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from types import ModuleType, new_class
from typing import Any

import sqlalchemy as sa

from cyborg.api import types, versions
from cyborg.api.controller import COUNT_SINCE, WITH_COUNT, PageRequest, RequestContext, Resource
from cyborg.api.operation import operation
from cyborg.core.errors import NotFound

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
        """Expose a controller method, as ``operation.operation`` does.

        ``action`` is the end of the name of the policy rule, by default the name of the method.
        """
        fields.setdefault("status", 200 if "answer" in fields else 204)
        fields.setdefault("since", self.since)

        def decorate(method: Callable[..., Any]) -> Any:
            rule = f"cyborg:{self.resource}:{action or method.__name__}"
            return operation(call, rule, **fields)(method)

        return decorate

    def list_operation(self, **fields: Any) -> Callable[..., Any]:
        """Expose a controller method that returns a page of the list."""
        fields |= {"answer": self.list_type, "paged": True}
        fields["query"] = {**fields.get("query", {}), WITH_COUNT: types.Enum("true", "false")}
        fields["query_since"] = {**fields.get("query_since", {}), WITH_COUNT: COUNT_SINCE}
        return self.operation(f"GET {self.name}", "get_all", **fields)

    def find(
        self,
        description: str,
        columns: Mapping[str, str] | None = None,
        read: Callable[..., list[Any]] | None = None,
        query_since: Mapping[str, versions.Version] | None = None,
        **query: Any,
    ) -> Any:
        """Return the operation that lists the collection; ``query`` has the types of the filters.

        Filters are passed to ``read`` as parameters of the same name, or of the name in
        ``columns``. ``query_since`` has the versions of newer filters.
        """

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

    def get(
        self, description: str, answer: Any = None, show: Show | None = None, **fields: Any
    ) -> Any:
        """Return the operation that shows one object, by default with the type of the list's rows.

        ``answer`` is another WSME type for the object, and ``show`` another function to show it.
        """

        def get(resource: Resource, request: RequestContext, uuid: str) -> Any:
            row = self.read_row(resource, request, uuid)
            if answer and not show:
                return request.serialize(answer, row, self.name)
            return (show or self.show_row)(request, row)

        get.__doc__ = description
        call, shown = f"GET {self.name}/{{uuid}}", answer or self.datatype
        return self.operation(call, "get_one", answer=shown, **fields)(get)

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
