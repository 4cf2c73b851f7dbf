# SPDX-License-Identifier: Apache-2.0
"""The request groups of a device context or device profile, for a query to Placement."""

from collections.abc import Iterable, Mapping
from typing import Any

from cyborg.core.binding.profile import Group, parse_groups
from cyborg.core.binding.request_groups import RequestGroup, build_parameters, make_request_groups
from cyborg.core.errors import Invalid
from cyborg.core.validation import parse_uuid


def to_request_groups(context: Any, port_uuid: str | None = None) -> tuple[RequestGroup, ...]:
    """Return the request groups of a device context or a device profile, in the order of groups.

    ``context`` is the object that the REST API shows; its field ``groups`` is used. Nova names the
    groups ``device_profile_<number>``, and for a profile of a Neutron port
    ``device_profile_<number><port uuid>``. Each group also requires OWNER_CYBORG, because only a
    provider of Cyborg can be bound. Raise Invalid with the field.
    """
    return make_request_groups(read_groups(context), parse_port(port_uuid))


def build_query(groups: Iterable[RequestGroup]) -> dict[str, str]:
    """Return the parameters of GET /allocation_candidates, at microversion 1.34 or later."""
    return build_parameters(groups)


def read_groups(context: Any) -> tuple[Group, ...]:
    """Return the groups of a device context or a device profile. Raise Invalid with the field."""
    if not isinstance(context, Mapping):
        raise Invalid(
            "context: expected a device context or device profile of the REST API, found "
            f"{type(context).__name__}",
            field="context",
        )
    return parse_groups(context.get("groups"))


def parse_port(port_uuid: Any) -> str:
    """Return the end of the names of the groups for a Neutron port; None stands for no port."""
    return "" if port_uuid is None else parse_uuid(port_uuid, "port_uuid")
