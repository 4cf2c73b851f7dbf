# SPDX-License-Identifier: Apache-2.0
"""An accelerator request (ARQ), and the reading of the JSON patch that binds or unbinds it."""

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cyborg.core.errors import Invalid
from cyborg.core.states import RequestState

_UUID = re.compile(r"[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
MAX_REQUESTS = 1024  # in one PATCH or DELETE
_REQUIRED = ("hostname", "device_rp_uuid", "instance_uuid")
_KNOWN = frozenset({*_REQUIRED, "project_id"})


@dataclass(frozen=True, slots=True)
class Request:
    """One accelerator for one instance, with the copy of the profile group it was made from.

    ``attach_handle_*`` are those of the handle it owns: type ``""``, info ``{}`` and uuid None
    while it owns none.
    """

    uuid: str
    state: RequestState
    device_profile_name: str
    device_profile_group_id: int
    resource_class: str
    group: Mapping[str, str]
    project_id: str | None = None
    hostname: str | None = None
    device_rp_uuid: str | None = None
    instance_uuid: str | None = None
    attach_handle_type: str = ""
    attach_handle_uuid: str | None = None
    attach_handle_info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bind:
    """The wish to bind one request: to this provider, for this instance."""

    request: str
    hostname: str
    device_rp_uuid: str
    instance_uuid: str
    project_id: str | None = None


@dataclass(frozen=True, slots=True)
class Unbind:
    """The wish to take one request's handle back."""

    request: str


def parse_uuid(value: Any, field_name: str) -> str:
    """Return the canonical form of a uuid. Raises Invalid, naming the field."""
    try:
        # uuid.UUID alone takes signs, underscores and the digits of any script.
        if not isinstance(value, str) or not _UUID.fullmatch(value):
            raise ValueError
        return str(uuid.UUID(value))
    except ValueError:
        raise Invalid(
            f"{field_name}: {str(value)[:60]!r} is not a uuid", field=field_name
        ) from None


def parse_patch(body: Any) -> tuple[Bind | Unbind, ...]:
    """Read the body of PATCH accelerator_requests: a map of request uuid to JSON patch operations.

    All of ``add`` is a bind, all of ``remove`` an unbind, and one body does not mix the two. Raises
    Invalid, naming the request and the path.
    """
    if not isinstance(body, Mapping) or not body:
        raise Invalid("the body must be an object of {arq uuid: [operations]}", field="body")
    if len(body) > MAX_REQUESTS:
        raise Invalid(f"at most {MAX_REQUESTS} requests in one call", field="body")
    wishes = tuple(_wish(key, operations) for key, operations in body.items())
    if len({type(w) for w in wishes}) > 1:
        raise Invalid("one call either binds or unbinds, not both", field="op")
    if len({w.request for w in wishes}) != len(wishes):
        raise Invalid("a request stands twice in the body", field="body")
    instances = {w.instance_uuid for w in wishes if isinstance(w, Bind)}
    if len(instances) > 1:
        raise Invalid("one call binds for one instance", field="/instance_uuid")
    return wishes


def _wish(key: Any, operations: Any) -> Bind | Unbind:
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
        if name not in _KNOWN:
            known = ", ".join(f"/{n}" for n in (*_REQUIRED, "project_id"))
            raise Invalid(
                f"{request}: path {str(path)[:60]!r} is none of {known}", field=str(path)[:60]
            )
        if name in values:
            raise Invalid(f"{request}: path /{name} stands twice", field=f"/{name}")
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
        return Unbind(request)
    return Bind(
        request,
        _text(values["hostname"], request, "/hostname"),
        parse_uuid(values["device_rp_uuid"], "/device_rp_uuid"),
        parse_uuid(values["instance_uuid"], "/instance_uuid"),
        _text(values["project_id"], request, "/project_id") if "project_id" in values else None,
    )


def _text(value: Any, request: str, where: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= 255 or not value.isprintable():
        raise Invalid(
            f"{request}: {where} must be a string of 1 to 255 printable characters", field=where
        )
    return value
