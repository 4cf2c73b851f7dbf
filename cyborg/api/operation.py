# SPDX-License-Identifier: Apache-2.0
"""One operation of the API: a method of a resource that WSME describes and pecan calls.

The decorator says everything that the documentation and the checks need: who may, since which
version, which parameters, which body, which answer. The method itself gets checked values.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pecan
import webob
import wsme.api
from webob import exc
from wsme import types as wtypes

from cyborg.api import paging, types, versions
from cyborg.api.call import Call, Request
from cyborg.api.edge import JSON
from cyborg.core.errors import CyborgError, Invalid, NotFound, ServiceTokenRequired


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What an operation takes and gives; the types are WSME's.

    ``answer`` is None for an empty one. ``path`` and ``query`` are the parameters of the URL;
    ``later`` names those of the query that came with a version of their own, and ``paged`` adds
    those of pages, which the method gets as ``page``. ``service`` names what takes a service token.
    A body may be a list of exactly one with ``listed``, may be the one value of an object whose key
    is ``wrapped``, may have fields that nobody knows with ``lenient``, and may be left out with
    ``optional``. ``raises`` are the kinds of errors beside those of every operation.
    """

    rule: str
    answer: Any = None
    status: int = 200
    since: versions.Version = versions.MINIMUM
    path: Mapping[str, Any] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    later: Mapping[str, versions.Version] = field(default_factory=dict)
    paged: bool = False
    body: Any = None
    listed: bool = False
    wrapped: str | None = None
    lenient: bool = False
    optional: bool = False
    service: str | None = None
    raises: tuple[type[CyborgError], ...] = ()

    def describe(self, method: Callable[..., Any]) -> wsme.api.FunctionDefinition:
        """Return the operation as WSME describes a function."""
        told = wsme.api.FunctionDefinition(method)
        told.return_type, told.body_type, told.status_code = self.answer, self.body, self.status
        parameters = {**self.path, **self.query, **(paging.PARAMETERS if self.paged else {})}
        told.arguments = [
            wsme.api.FunctionArgument(name, datatype, name in self.path, None)
            for name, datatype in parameters.items()
        ]
        if self.body is not None:
            told.arguments.append(
                wsme.api.FunctionArgument("body", self.body, not self.optional, None)
            )
        told.resolve_types(wtypes.registry)
        return told


def operation(**terms: Any) -> Callable[[Callable[..., Any]], Any]:
    """Expose a method of a resource on the terms of an ``Operation``.

    It is called with the ``Call`` and, by name, the parameters (None for one that was not given),
    ``page`` and ``body``, and returns what is JSON.
    """
    its = Operation(**terms)

    def decorate(method: Callable[..., Any]) -> Any:
        @pecan.expose(content_type=JSON)
        @functools.wraps(method)
        def controller(self: Any, req: Request, resp: webob.Response, *pieces: str) -> Any:
            call = Call(req, resp)
            if call.version < its.since:
                raise NotFound(f"{req.path_info} is there from version {_text(its.since)} on")
            call.caller.require(its.rule)
            if its.service and not call.caller.is_service:
                raise ServiceTokenRequired(f"{its.service} requires a service token")
            values = _parameters(its, req, pieces, call.version, self.desk.conf.api.max_limit)
            if its.body is not None:
                values["body"] = _body(its, req)
            resp.status_int = its.status
            _fill(resp, method(self, call, **values))
            return resp

        # functools.wraps leaves the inner signature behind, which pecan would look at.
        del controller.__wrapped__
        pecan.util._cfg(controller)["argspec"] = pecan.util.getargspec(controller)
        controller._wsme_definition = its.describe(method)
        controller.operation = its
        return controller

    return decorate


def _parameters(
    its: Operation, req: Request, pieces: tuple[str, ...], version: versions.Version, most: int
) -> dict[str, Any]:
    values = {
        name: types.load(datatype, piece, name)
        for (name, datatype), piece in zip(its.path.items(), pieces, strict=True)
    }
    known = {
        name: datatype
        for name, datatype in its.query.items()
        if version >= its.later.get(name, versions.MINIMUM)
    }
    known |= paging.PARAMETERS if its.paged else {}
    given: dict[str, Any] = {}
    for name, text in req.GET.items():
        if name not in known:
            shown = name[: types.MAX_SHOWN]
            raise Invalid(
                f"{shown}: unknown parameter; known are {', '.join(sorted(known)) or 'none'}",
                field=shown,
            )
        if getattr(known[name], "many", False):
            given.setdefault(name, []).append(types.load(known[name], text, name))
        elif name in given:
            raise Invalid(f"{name}: given twice", field=name)
        else:
            given[name] = types.load(known[name], text, name)
    if its.paged:
        values["page"] = paging.Asked(given, most)
    return values | {name: given.get(name) for name in its.query}


def _body(its: Operation, req: Request) -> Any:
    if not req.body:
        if its.optional:
            return types.load(its.body, {}, "body")
        raise Invalid("body: missing, expected JSON", field="body")
    if req.content_type != JSON:
        raise exc.HTTPUnsupportedMediaType(f"Content-Type must be {JSON}")
    try:
        value = req.json
    except ValueError as bad:
        raise Invalid(f"body: not JSON: {bad}", field="body") from bad
    if its.listed and isinstance(value, list):
        if len(value) != 1:
            raise Invalid(f"body: a list of exactly one, not of {len(value)}", field="body")
        value = value[0]
    if its.wrapped and isinstance(value, dict) and set(value) == {its.wrapped}:
        value = value[its.wrapped]
    if its.lenient and isinstance(value, dict):
        known = {attribute.name for attribute in wtypes.list_attributes(its.body)}
        value = {name: item for name, item in value.items() if name in known}
    return types.load(its.body, value, "body")


def _fill(resp: webob.Response, result: Any) -> None:
    if result is None:
        resp.content_type = None
    else:
        resp.content_type = JSON
        resp.body = json.dumps(result).encode()


def _text(version: versions.Version) -> str:
    return f"{version[0]}.{version[1]}"
