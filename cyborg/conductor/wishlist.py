# SPDX-License-Identifier: Apache-2.0
"""Reading which requests a call names, and what it wants of each.

By the same rules as the REST body: what the edge let through, or another version of it, is checked
again here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cyborg.core.errors import Invalid, NotFound
from cyborg.core.request import MAX_REQUESTS, Bind, parse_patch, parse_uuid


def read_binds(wishes: Sequence[Mapping[str, Any]]) -> tuple[Bind, ...]:
    """Read the wishes of a bind, all for one instance. Raises Invalid, naming the field."""
    body: dict[str, Any] = {}
    for wish in _list(wishes):
        request = _request_of(wish)
        if request in body:
            raise Invalid("a request stands twice in the call", field="request")
        body[request] = [
            {"op": "add", "path": f"/{key}", "value": value}
            for key, value in wish.items()
            if key != "request" and value is not None
        ]
    binds = tuple(wish for wish in parse_patch(body) if isinstance(wish, Bind))
    if len({bind.hostname for bind in binds}) > 1:
        raise Invalid("an instance is on one host: one call binds on one", field="/hostname")
    return binds


def read_unbinds(wishes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the uuids of the requests to unbind. Raises Invalid."""
    return read_uuids([_request_of(wish) for wish in _list(wishes)])


def read_uuids(values: Sequence[Any]) -> tuple[str, ...]:
    """Return uuids in their canonical form, each once. Raises Invalid."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise Invalid("no request is named", field="arqs")
    if len(values) > MAX_REQUESTS:
        raise Invalid(f"at most {MAX_REQUESTS} requests in one call", field="arqs")
    return tuple(dict.fromkeys(parse_uuid(value, "arq uuid") for value in values))


def unknown(uuids: Sequence[str]) -> NotFound:
    """Return the error that names requests which do not exist, or not for this caller."""
    return NotFound(f"no accelerator request {', '.join(uuids)}", unknown=list(uuids))


def _list(wishes: Any) -> Sequence[Any]:
    if not isinstance(wishes, Sequence) or isinstance(wishes, str | bytes):
        raise Invalid("wishes must be a list", field="wishes")
    return wishes


def _request_of(wish: Any) -> str:
    if not isinstance(wish, Mapping):
        raise Invalid("a wish must be an object", field="wishes")
    return parse_uuid(wish.get("request"), "request")
