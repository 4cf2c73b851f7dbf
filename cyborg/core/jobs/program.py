# SPDX-License-Identifier: Apache-2.0
"""Parsing of requests to program an image into a deployable."""

from collections.abc import Mapping
from typing import Any

from cyborg.core.errors import Invalid
from cyborg.core.validation import parse_uuid

PATH = "/program"
VERB = "replace"


def parse_program(body: Any) -> str:
    """Return the uuid of the image that a body of PATCH deployables/{uuid}/program names.

    The body is a JSON patch of one operation: ``[{"path": "/program", "op": "replace", "value":
    [{"image_uuid": uuid}]}]``. Raise Invalid with the name of the field.
    """
    operation = _only(body, "body", ("path", "op", "value"))
    for field, expected in (("path", PATH), ("op", VERB)):
        if operation[field] != expected:
            raise Invalid(
                f"{field}: {str(operation[field])[:60]!r} is not {expected!r}", field=field
            )
    image = _only(operation["value"], "value", ("image_uuid",))
    return parse_uuid(image["image_uuid"], "image_uuid")


def _only(value: Any, name: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the single object of a list. Raise Invalid unless it has exactly these keys."""
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], Mapping):
        raise Invalid(f"{name}: expected a list of one object", field=name)
    found = value[0]
    if missing := [key for key in keys if key not in found]:
        raise Invalid(f"{missing[0]}: missing in {name}", field=missing[0])
    if unknown := sorted(str(key) for key in found if key not in keys):
        shown = unknown[0][:60]
        raise Invalid(f"{shown}: unknown field of {name}, expected {', '.join(keys)}", field=shown)
    return dict(found)
