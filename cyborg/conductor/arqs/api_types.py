# SPDX-License-Identifier: Apache-2.0
"""Parse the ARQs and bind requests of an RPC call.

The rules are those of the REST body. The conductor applies them again, because an API service of
another version may have sent the call.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cyborg.core.arq.arqs import MAX_ARQS, BindRequest, parse_patch
from cyborg.core.errors import Invalid, NotFound
from cyborg.core.validation import parse_uuid


def parse_bind_requests(items: Sequence[Mapping[str, Any]]) -> tuple[BindRequest, ...]:
    """Parse the bind requests of a call, all for one instance. Raise Invalid with the field."""
    body: dict[str, Any] = {}
    for item in _check_list(items):
        arq = _arq_uuid(item)
        if arq in body:
            raise Invalid(f"duplicate ARQ {arq} in the call", field="request")
        body[arq] = [
            {"op": "add", "path": f"/{key}", "value": value}
            for key, value in item.items()
            if key != "request" and value is not None
        ]
    binds = tuple(parsed for parsed in parse_patch(body) if isinstance(parsed, BindRequest))
    if len({bind.hostname for bind in binds}) > 1:
        raise Invalid("all ARQs of one call must be bound on the same host", field="/hostname")
    return binds


def parse_unbind_requests(items: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the uuids of the ARQs to unbind. Raise Invalid."""
    return parse_uuids([_arq_uuid(item) for item in _check_list(items)])


def parse_uuids(values: Sequence[Any]) -> tuple[str, ...]:
    """Return the uuids in canonical form without duplicates. Raise Invalid."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise Invalid("expected a list of at least one ARQ uuid", field="arqs")
    if len(values) > MAX_ARQS:
        raise Invalid(f"at most {MAX_ARQS} ARQs in one call", field="arqs")
    return tuple(dict.fromkeys(parse_uuid(value, "arq uuid") for value in values))


def arqs_not_found(uuids: Sequence[str]) -> NotFound:
    """Return NotFound for ARQs that do not exist or belong to a project outside the scope."""
    return NotFound(f"no accelerator request {', '.join(uuids)}", unknown=list(uuids))


def _check_list(items: Any) -> Sequence[Any]:
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise Invalid("expected a list of ARQs to bind or unbind", field="requests")
    return items


def _arq_uuid(item: Any) -> str:
    if not isinstance(item, Mapping):
        raise Invalid("expected an object for each ARQ to bind or unbind", field="requests")
    return parse_uuid(item.get("request"), "request")
