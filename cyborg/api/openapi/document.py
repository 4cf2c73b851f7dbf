# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document of this API, generated from the routes and their operations.

It describes the newest microversion. Operations, parameters and fields that were added after the
first microversion have ``x-openstack``, an object with the version ``min-ver``.
"""

import functools
import http
import inspect
from collections.abc import Mapping
from typing import Any

from cyborg.api import controller, faults, types, versions
from cyborg.api.middleware import JSON
from cyborg.api.openapi.schemas import Schema, Schemas, describe_parameter, since
from cyborg.api.operation import Operation
from cyborg.api.routes import DOCUMENT, RouteTable

DOCUMENT_PATHS = (DOCUMENT, "/openapi.json")
OPENAPI = "3.1.0"
_DESCRIPTION = (
    "The header OpenStack-API-Version selects a microversion; the default is 2.0. Every path is "
    "also served without the prefix /v2."
)
_STATUSES: Mapping[int, str] = {
    400: "The request is malformed; the message names the field.",
    401: "The token is missing or not valid.",
    403: "The policy does not allow the operation, or a service token is missing.",
    404: "The object does not exist or is not visible to the caller, or the path does not exist in "
    "this microversion.",
    406: "The microversion does not exist, or the client does not accept JSON.",
    408: "The body did not arrive in time.",
    409: "The name is in use, or the state of an object does not allow the operation.",
    411: "The server does not accept a chunked body: Content-Length is required.",
    413: "The body is too large.",
    415: "The Content-Type of the body is not JSON.",
    423: "The result is not available yet: retry later.",
    429: "Too many requests of this kind at the same time: retry after the seconds of Retry-After.",
    500: "Internal error; the message has the request id.",
    503: "A component of the service is unavailable.",
    504: "A component of the service did not respond in time; the request may have taken effect.",
}
# Each operation has parameters or headers that can be wrong.
_COMMON_STATUSES = {400, 401, 403, 406, 500, 503}
_BODY_STATUSES = {408, 411, 413, 415}
_WRITE_STATUSES = {504}


class Fault(types.JsonObject):
    """An error; ``error_message`` is a JSON text with faultcode, faultstring and debuginfo."""

    error_message = types.required(str)


class OpenApiDocument:
    """The OpenAPI document, generated at the first request for it."""

    def __init__(self, routes: RouteTable) -> None:
        self._routes = routes

    def document(self, root: str) -> Mapping[str, Any]:
        """Return the document with ``root`` as the root URL of the API."""
        # The rest is made once; the root depends on the host that a client asks.
        return {**self._document, "servers": [{"url": f"{root}/v2"}]}

    @functools.cached_property
    def _document(self) -> Mapping[str, Any]:
        schemas = Schemas()
        paths: dict[str, Schema] = {}
        for methods in self._routes.values():
            for method in methods.values():
                spec: Operation = method.operation
                path = paths.setdefault(f"/{spec.template}", {})
                path[spec.method.lower()] = _operation(schemas, method, spec)
        fault = {"content": {JSON: {"schema": schemas.schema_for(Fault)}}}
        return {
            "openapi": OPENAPI,
            "info": {
                "title": "OpenStack Accelerator API",
                "version": versions.LATEST,
                "description": _DESCRIPTION,
            },
            "servers": [],  # those of the request, see ``document``
            "security": [{"token": []}],
            "paths": paths,
            "components": {
                "schemas": dict(sorted(schemas.named.items())),
                "parameters": {"version": _version()},
                "responses": {
                    str(status): {"description": description, **fault}
                    for status, description in _STATUSES.items()
                },
                "securitySchemes": {
                    "token": _token("X-Auth-Token", "A keystone token."),
                    "service_token": _token("X-Service-Token", "The token of a service."),
                },
            },
        }


def statuses(spec: Operation) -> set[int]:
    """Return every error status that an operation can return."""
    result = _COMMON_STATUSES | {faults.STATUSES[kind] for kind in spec.raises}
    # In an older version the operation does not exist.
    if spec.since > versions.MINIMUM:
        result |= {404}
    if spec.body is not None:
        result |= _BODY_STATUSES
    if spec.takes_turns:
        result |= {429}
    if spec.method != "GET":
        result |= _WRITE_STATUSES
    return result


def _operation(schemas: Schemas, method: Any, spec: Operation) -> Schema:
    """Return the operation object: texts, parameters, responses and the body."""
    noun = spec.template.split("/", maxsplit=1)[0]
    operation_id = f"{noun}.{method.__name__}"
    description = inspect.getdoc(method) or ""
    if spec.since > versions.MINIMUM:
        description += f"\n\nFrom version {'.'.join(map(str, spec.since))} on."
    operation: Schema = {
        "operationId": operation_id,
        "tags": [noun],
        "summary": description.split("\n", maxsplit=1)[0],
        "description": f"{description}\n\nPolicy: {spec.rule}.",
        **since(spec.since),
        "parameters": [
            *_parameters(schemas, spec, operation_id),
            {"$ref": "#/components/parameters/version"},
        ],
        "responses": {
            str(spec.status): _response(schemas, spec),
            **{
                str(status): {"$ref": f"#/components/responses/{status}"}
                for status in sorted(statuses(spec))
            },
        },
    }
    if spec.body is not None:
        operation["requestBody"] = {
            "required": not spec.optional,
            "content": {JSON: {"schema": _body(schemas, spec)}},
        }
    if spec.service:
        operation["security"] = [{"token": [], "service_token": []}]
    return operation


def _parameters(schemas: Schemas, spec: Operation, operation_id: str) -> list[Schema]:
    """Return the parameter objects of the path and the query, with those of pages."""
    queries = {**spec.query, **(controller.PARAMETERS if spec.paged else {})}
    locations = (("path", spec.path), ("query", queries))
    return [
        {
            "name": name,
            "in": location,
            "required": location == "path",
            "description": describe_parameter(operation_id, name),
            **since(spec.query_since.get(name, versions.MINIMUM)),
            "schema": schemas.schema_for(datatype),
        }
        for location, parameters in locations
        for name, datatype in parameters.items()
    ]


def _body(schemas: Schemas, spec: Operation) -> Schema:
    schema = schemas.body_schema(spec.body, ignore_unknown=spec.ignore_unknown)
    # Both forms of a body that the operation accepts.
    if spec.single_item_list:
        single = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
        return {"anyOf": [schema, single]}
    if spec.envelope:
        wrapper = {
            "type": "object",
            "properties": {spec.envelope: schema},
            "required": [spec.envelope],
            "additionalProperties": False,
        }
        return {"anyOf": [schema, wrapper]}
    return schema


def _response(schemas: Schemas, spec: Operation) -> Schema:
    response: Schema = {"description": http.HTTPStatus(spec.status).phrase}
    if spec.answer is not None:
        response["content"] = {JSON: {"schema": schemas.schema_for(spec.answer)}}
    return response


def _version() -> Schema:
    return {
        "name": "OpenStack-API-Version",
        "in": "header",
        "required": False,
        "description": "The microversion, as in the example, or latest.",
        "schema": {"type": "string"},
        "example": f"{versions.SERVICE_TYPE} {versions.LATEST}",
    }


def _token(header: str, description: str) -> Schema:
    return {"type": "apiKey", "in": "header", "name": header, "description": description}
