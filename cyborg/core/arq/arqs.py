# SPDX-License-Identifier: Apache-2.0
"""Accelerator requests (ARQs), and the parsing of the JSON patch that binds or unbinds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cyborg.core.errors import Invalid
from cyborg.core.validation import check_text, parse_uuid

MAX_ARQS = 1024  # in one PATCH or DELETE
_REQUIRED = ("hostname", "device_rp_uuid", "instance_uuid")
_ALLOWED = frozenset({*_REQUIRED, "project_id"})


@dataclass(frozen=True, slots=True)
class BindRequest:
    """Request to bind the ARQ ``request`` to a provider for an instance."""

    request: str
    hostname: str
    device_rp_uuid: str
    instance_uuid: str
    project_id: str | None = None


@dataclass(frozen=True, slots=True)
class UnbindRequest:
    """Request to unbind the ARQ ``request``."""

    request: str


def parse_patch(body: Any) -> tuple[BindRequest | UnbindRequest, ...]:
    """Parse the body of PATCH accelerator_requests: a map of ARQ uuid to JSON patch operations.

    Operations ``add`` are a bind and operations ``remove`` an unbind; one body has one kind only.
    Raise Invalid with the ARQ and the path.
    """
    if not isinstance(body, Mapping) or not body:
        raise Invalid("the body must be an object of {arq uuid: [operations]}", field="body")
    if len(body) > MAX_ARQS:
        raise Invalid(f"at most {MAX_ARQS} requests in one call", field="body")
    requests = tuple(_parse_operations(key, operations) for key, operations in body.items())
    if len({type(r) for r in requests}) > 1:
        raise Invalid("one call either binds or unbinds, not both", field="op")
    if len({r.request for r in requests}) != len(requests):
        raise Invalid("duplicate ARQ uuid in the body", field="body")
    instances = {r.instance_uuid for r in requests if isinstance(r, BindRequest)}
    if len(instances) > 1:
        raise Invalid("one call binds for one instance", field="/instance_uuid")
    return requests


def _parse_operations(key: Any, operations: Any) -> BindRequest | UnbindRequest:
    request = parse_uuid(key, "arq uuid")
    if not isinstance(operations, Sequence) or isinstance(operations, str | bytes):
        raise Invalid(f"{request}: expected a list of operations", field=request)
    verbs: set[str] = set()
    values: dict[str, Any] = {}
    for operation in operations:
        if not isinstance(operation, Mapping):
            raise Invalid(f"{request}: an operation must be an object", field=request)
        path = operation.get("path")
        name = path[1:] if isinstance(path, str) and path.startswith("/") else None
        if name not in _ALLOWED:
            allowed = ", ".join(f"/{n}" for n in (*_REQUIRED, "project_id"))
            raise Invalid(
                f"{request}: unknown path {str(path)[:60]!r}, expected one of {allowed}",
                field=str(path)[:60],
            )
        if name in values:
            raise Invalid(f"{request}: duplicate path /{name}", field=f"/{name}")
        verb = operation.get("op")
        if verb not in ("add", "remove"):
            raise Invalid(
                f"{request}: op {str(verb)[:60]!r} of /{name} is neither 'add' nor 'remove'",
                field="op",
            )
        verbs.add(verb)
        values[name] = operation.get("value")
    if len(verbs) != 1:
        raise Invalid(f"{request}: expected operations all 'add' or all 'remove'", field="op")
    if missing := [n for n in _REQUIRED if n not in values]:
        raise Invalid(f"{request}: /{missing[0]} is missing", field=f"/{missing[0]}")
    if verbs == {"remove"}:
        return UnbindRequest(request)
    return BindRequest(
        request,
        check_text("/hostname", values["hostname"], subject=f"{request}: /hostname"),
        parse_uuid(values["device_rp_uuid"], "/device_rp_uuid"),
        parse_uuid(values["instance_uuid"], "/instance_uuid"),
        None
        if "project_id" not in values
        else check_text("/project_id", values["project_id"], subject=f"{request}: /project_id"),
    )
