# SPDX-License-Identifier: Apache-2.0
"""Requests to bind and unbind ARQs: their form on the bus, and the parsing of the JSON patch.

The rules are those of the REST body. The conductor applies them again, because an API service of
another version may have sent the call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cyborg.core.codec import Serializable, wire
from cyborg.core.errors import Invalid, NotFound
from cyborg.core.validation import check_optional_text, check_text, find_duplicate, parse_uuid

MAX_ARQS = 1024  # in one PATCH or DELETE
_REQUIRED = ("hostname", "device_rp_uuid", "instance_uuid")
_ALLOWED = frozenset({*_REQUIRED, "project_id"})


def parse_uuids(values: Sequence[Any]) -> tuple[str, ...]:
    """Return the uuids in canonical form without duplicates. Raise Invalid."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise Invalid("expected a list of at least one ARQ uuid", field="arqs")
    if len(values) > MAX_ARQS:
        raise Invalid(f"a call can have at most {MAX_ARQS} ARQs", field="arqs")
    return tuple(dict.fromkeys(parse_uuid(value, "arq uuid") for value in values))


def arqs_not_found(uuids: Sequence[str]) -> NotFound:
    """Return NotFound for ARQs that do not exist or belong to a project outside the scope."""
    return NotFound(
        f"no accelerator request {', '.join(uuids)}; GET /v2/accelerator_requests lists the known "
        "ones",
        unknown=list(uuids),
    )


def describe_user(instance: str | None) -> str:
    """Return who uses an ARQ that owns a handle: its instance, a lease or the host."""
    return "under a lease, or for its host" if instance is None else f"instance {instance}"


def _uuid_metadata(name: str) -> Mapping[str, Any]:
    return wire(load=lambda value: parse_uuid(value, name))


@dataclass(frozen=True, slots=True)
class BindRequest(Serializable):
    """Request to bind the ARQ ``request`` to a provider for an instance.

    Only an attachment to a host, which makes the request itself, has no instance.
    """

    request: str = field(metadata=_uuid_metadata("request"))
    hostname: str = field(metadata=wire(load=lambda value: check_text("/hostname", value)))
    device_rp_uuid: str = field(metadata=_uuid_metadata("/device_rp_uuid"))
    instance_uuid: str | None = field(metadata=_uuid_metadata("/instance_uuid"))
    project_id: str | None = field(
        default=None,
        metadata=wire(
            load=partial(check_optional_text, "/project_id"),
            omit=lambda value: value is None,
        ),
    )


@dataclass(frozen=True, slots=True)
class UnbindRequest(Serializable):
    """Request to unbind the ARQ ``request``."""

    request: str = field(metadata=_uuid_metadata("request"))


def check_requests(requests: Sequence[BindRequest | UnbindRequest]) -> None:
    """Check the requests of one call together. Raise Invalid with the field."""
    if not requests:
        raise Invalid("expected at least one ARQ to bind or unbind", field="body")
    if len(requests) > MAX_ARQS:
        raise _too_many_requests()
    if len({type(item) for item in requests}) > 1:
        raise Invalid("one call either binds or unbinds, not both", field="op")
    if find_duplicate(item.request for item in requests) is not None:
        raise Invalid("duplicate ARQ uuid in one call", field="body")
    binds = [item for item in requests if isinstance(item, BindRequest)]
    if len({item.instance_uuid for item in binds}) > 1:
        raise Invalid("all ARQs of one call must have the same instance", field="/instance_uuid")
    # The host work of a bind is one job of one agent.
    if len({item.hostname for item in binds}) > 1:
        raise Invalid("all ARQs of one call must be bound on the same host", field="/hostname")


def _too_many_requests() -> Invalid:
    return Invalid(f"a call can have at most {MAX_ARQS} requests", field="body")


def parse_patch(body: Any) -> tuple[BindRequest | UnbindRequest, ...]:
    """Parse the body of PATCH accelerator_requests: a map of ARQ uuid to JSON patch operations.

    ``add`` operations bind and ``remove`` operations unbind; a body must not have both. Raise
    Invalid with the ARQ and the path.
    """
    if not isinstance(body, Mapping) or not body:
        raise Invalid("the body must be an object of {arq uuid: [operations]}", field="body")
    if len(body) > MAX_ARQS:
        raise _too_many_requests()
    requests = tuple(_parse_operations(key, operations) for key, operations in body.items())
    check_requests(requests)
    return requests


def _parse_operations(key: Any, operations: Any) -> BindRequest | UnbindRequest:
    """Parse the operations of one ARQ: all bind it, or all unbind it."""
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
    # Clients of v2 send all paths to unbind, too; the values are not used then.
    if missing := [n for n in _REQUIRED if n not in values]:
        raise Invalid(f"{request}: /{missing[0]} is missing", field=f"/{missing[0]}")
    if verbs == {"remove"}:
        return UnbindRequest(request)
    return BindRequest(
        request=request,
        hostname=check_text("/hostname", values["hostname"], subject=f"{request}: /hostname"),
        device_rp_uuid=parse_uuid(values["device_rp_uuid"], "/device_rp_uuid"),
        instance_uuid=parse_uuid(values["instance_uuid"], "/instance_uuid"),
        project_id=(
            check_text("/project_id", values["project_id"], subject=f"{request}: /project_id")
            if "project_id" in values
            else None
        ),
    )
