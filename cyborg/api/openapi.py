# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document of this API, made from its table of routes and their operations.

It shows the newest microversion; what is younger than the first says so.
"""

import functools
import http
import inspect
from collections.abc import Mapping
from typing import Any

from wsme import types as wtypes

from cyborg.api import faults, paging, versions
from cyborg.api.edge import JSON
from cyborg.api.openapi_types import Schema, Schemas
from cyborg.api.operation import Operation
from cyborg.api.routes import Table

PATHS = ("/v2/openapi.json", "/openapi.json")
OPENAPI = "3.1.0"
_TOLD = (
    "Requests choose a microversion by the header OpenStack-API-Version; without it 2.0 answers. "
    "Every path is served without /v2 before it, too."
)
_STATUSES: Mapping[int, str] = {
    400: "The request is malformed; the message names the field.",
    401: "There is no token, or it is not valid.",
    403: "The policy does not allow it, or a service token is missing.",
    404: "There is no such object, or not for this caller; or the microversion lacks the path.",
    406: "The microversion does not exist, or no JSON is wanted.",
    409: "A name is taken, or the state of the objects is against it.",
    413: "The body is too large.",
    415: "The body is said to be no JSON.",
    423: "Not decided yet: the same question later gets an answer.",
    500: "A fault of the service; the message has the id of the request.",
    503: "A part of the service does not answer.",
    504: "A part of the service did not answer in time; what came of the request is not known.",
}
_OF_ALL = {400, 401, 403, 406, 500, 503}
_OF_BODIES = {413, 415}
_OF_CHANGES = {504}


class Fault(wtypes.Base):  # type: ignore[misc]
    """An error; the string is JSON itself, an object of faultcode, faultstring and debuginfo."""

    error_message = wtypes.wsattr(str, mandatory=True)


class Description:
    """The document, made when somebody asks for it first."""

    def __init__(self, routes: Table) -> None:
        self._routes = routes

    def document(self, root: str) -> Mapping[str, Any]:
        """Return the document for an API whose links start with this URL."""
        return {**self._document, "servers": [{"url": f"{root}/v2"}]}

    @functools.cached_property
    def _document(self) -> Mapping[str, Any]:
        schemas = Schemas()
        paths: dict[str, Schema] = {}
        for route, methods in self._routes.items():
            for method, controller in methods.items():
                path, operation = _operation(schemas, route, method, controller)
                paths.setdefault(path, {})[method.lower()] = operation
        fault = {"content": {JSON: {"schema": schemas.of(Fault)}}}
        return {
            "openapi": OPENAPI,
            "info": {
                "title": "OpenStack Accelerator API",
                "version": versions.LATEST,
                "description": _TOLD,
            },
            "servers": [],
            "security": [{"token": []}],
            "paths": paths,
            "components": {
                "schemas": dict(sorted(schemas.named.items())),
                "parameters": {"version": _version()},
                "responses": {
                    str(status): {"description": told, **fault}
                    for status, told in _STATUSES.items()
                },
                "securitySchemes": {
                    "token": _token("X-Auth-Token", "A token of keystone."),
                    "service_token": _token("X-Service-Token", "The token of a service."),
                },
            },
        }


def statuses(its: Operation, method: str) -> set[int]:
    """Return every status of an error that an operation can give."""
    found = _OF_ALL | {faults.STATUSES[kind] for kind in its.raises}
    if its.since > versions.MINIMUM:
        found |= {404}
    if its.body is not None:
        found |= _OF_BODIES
    if method != "GET":
        found |= _OF_CHANGES
    return found


def _operation(schemas: Schemas, route: str, method: str, controller: Any) -> tuple[str, Schema]:
    its: Operation = controller.operation
    path = "/" + route.replace("*", "{}").format(*(f"{{{name}}}" for name in its.path))
    noun = route.split("/", maxsplit=1)[0]
    told = inspect.getdoc(controller) or ""
    if its.since > versions.MINIMUM:
        told += f"\n\nFrom version {'.'.join(map(str, its.since))} on."
    operation: Schema = {
        "operationId": f"{noun}.{controller.__name__}",
        "tags": [noun],
        "summary": told.split("\n", maxsplit=1)[0],
        "description": f"{told}\n\nPolicy: {its.rule}.",
        "parameters": [*_parameters(schemas, its), {"$ref": "#/components/parameters/version"}],
        "responses": {
            str(its.status): _answer(schemas, its),
            **{
                str(status): {"$ref": f"#/components/responses/{status}"}
                for status in sorted(statuses(its, method))
            },
        },
    }
    if its.body is not None:
        operation["requestBody"] = {
            "required": not its.optional,
            "content": {JSON: {"schema": _body(schemas, its)}},
        }
    if its.service:
        operation["security"] = [{"token": [], "service_token": []}]
    return path, operation


def _parameters(schemas: Schemas, its: Operation) -> list[Schema]:
    queries = {**its.query, **(paging.PARAMETERS if its.paged else {})}
    places = (("path", its.path), ("query", queries))
    return [
        {
            "name": name,
            "in": place,
            "required": place == "path",
            "schema": schemas.of(datatype),
            **_since(its.later.get(name)),
        }
        for place, parameters in places
        for name, datatype in parameters.items()
    ]


def _since(version: versions.Version | None) -> Schema:
    if version is None:
        return {}
    return {"description": f"From version {'.'.join(map(str, version))} on."}


def _body(schemas: Schemas, its: Operation) -> Schema:
    bare = schemas.body(its.body, lenient=its.lenient)
    if its.listed:
        return {"anyOf": [bare, {"type": "array", "items": bare, "minItems": 1, "maxItems": 1}]}
    if its.wrapped:
        only = {"type": "object", "properties": {its.wrapped: bare}, "required": [its.wrapped]}
        return {"anyOf": [bare, {**only, "additionalProperties": False}]}
    return bare


def _answer(schemas: Schemas, its: Operation) -> Schema:
    answer: Schema = {"description": http.HTTPStatus(its.status).phrase}
    if its.answer is not None:
        answer["content"] = {JSON: {"schema": schemas.of(its.answer)}}
    return answer


def _version() -> Schema:
    return {
        "name": "OpenStack-API-Version",
        "in": "header",
        "required": False,
        "description": "The microversion, as in the example; latest is one, too.",
        "schema": {"type": "string"},
        "example": f"{versions.SERVICE_TYPE} {versions.LATEST}",
    }


def _token(header: str, told: str) -> Schema:
    return {"type": "apiKey", "in": "header", "name": header, "description": told}
