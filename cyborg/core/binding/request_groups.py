# SPDX-License-Identifier: Apache-2.0
"""Request groups of Placement: those of a device context or of a device profile.

Nova names the groups of a flavor's profile ``device_profile_<number>``, and those of the profile of
a Neutron port ``device_profile_<number><port uuid>``. The name follows the names of the parameters
in a query, and identifies the group in the mappings of an allocation candidate.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cyborg.core import naming
from cyborg.core.binding.profile import Group
from cyborg.core.errors import Invalid
from cyborg.core.text import describe
from cyborg.core.validation import parse_uuid


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """A granular request group: all its resources come from one provider with these traits.

    ``name`` is the suffix of the group in the query, and its key in the mappings of the answer.
    """

    name: str
    resources: Mapping[str, int]
    required: frozenset[str]
    forbidden: frozenset[str]

    def resources_value(self) -> str:
        """Return the value of the parameter ``resources`` of the group."""
        return ",".join(f"{name}:{units}" for name, units in sorted(self.resources.items()))

    def required_value(self) -> str:
        """Return the value of the parameter ``required``; a forbidden trait begins with "!"."""
        return ",".join([*sorted(self.required), *(f"!{name}" for name in sorted(self.forbidden))])


def make_group_name(number: int, port_uuid: str = "") -> str:
    """Return the name of a request group."""
    return f"device_profile_{number}{port_uuid}"


def make_request_groups(groups: Sequence[Group], port_uuid: str = "") -> tuple[RequestGroup, ...]:
    """Return the request group of each group, with OWNER_CYBORG among the required traits.

    Raise Invalid with the field if a group forbids this trait.
    """
    return tuple(_make_group(number, group, port_uuid) for number, group in enumerate(groups))


def build_parameters(groups: Iterable[RequestGroup]) -> dict[str, str]:
    """Return the parameters of GET /allocation_candidates, at microversion 1.34 or later.

    Version 1.33 introduced names as suffixes, and 1.34 the mappings of a candidate.
    """
    parameters: dict[str, str] = {}
    names = []
    for group in groups:
        names.append(group.name)
        parameters[f"resources{group.name}"] = group.resources_value()
        parameters[f"required{group.name}"] = group.required_value()
    if len(names) > 1:
        # Placement refuses several groups without a policy. Two groups may get the same device.
        parameters["group_policy"] = "none"
    return parameters


def parse_mappings(
    groups: Sequence[str], mappings: Any, known: Collection[str] | None = None
) -> dict[str, str]:
    """Return the provider of each request group, by the name of the group.

    ``mappings`` has a list of one uuid by the name of each group, as Placement answers; the number
    of a group may stand for its name. With ``known``, another provider is refused. Raise Invalid
    with the field.
    """
    if not isinstance(mappings, Mapping):
        raise Invalid(
            "mappings: expected an object of {request group: [provider uuid]}", field="mappings"
        )
    group_of_key = {key: name for number, name in enumerate(groups) for key in (name, str(number))}
    if foreign := [key for key in mappings if key not in group_of_key]:
        raise Invalid(
            f"mappings: the context has no request group {describe(foreign[0])}, expected "
            f"{groups[0]} to {groups[-1]}",
            field="mappings",
        )
    by_group: dict[str, str] = {}
    for key, uuids in mappings.items():
        field = f"mappings['{key}']"
        group = group_of_key[key]
        if group in by_group:
            raise Invalid(f"{field}: duplicate mapping of {group}", field=field)
        by_group[group] = _parse_provider(field, uuids, known)
    if missing := [group for group in groups if group not in by_group]:
        field = f"mappings['{missing[0]}']"
        raise Invalid(f"{field} is missing: the context has this request group", field=field)
    return by_group


def _parse_provider(field: str, uuids: Any, known: Collection[str] | None) -> str:
    if not isinstance(uuids, Sequence) or isinstance(uuids, str | bytes) or len(uuids) != 1:
        raise Invalid(
            f"{field}: expected a list of one provider uuid, as a request group has one provider",
            field=field,
        )
    provider = parse_uuid(uuids[0], field)
    if known is not None and provider not in known:
        raise Invalid(f"{field}: provider {provider} is no device of the host", field=field)
    return provider


def _make_group(number: int, group: Group, port_uuid: str) -> RequestGroup:
    """Return the request group of a group of a profile or context. Raise Invalid."""
    # Only a provider of Cyborg can be bound. Besides, Placement refuses an empty list of traits.
    if naming.OWNER_TRAIT in group.forbidden:
        field = f"groups[{number}]['trait:{naming.OWNER_TRAIT}']"
        raise Invalid(
            f"{field}: cannot be forbidden, every provider of Cyborg has this trait", field=field
        )
    return RequestGroup(
        make_group_name(number, port_uuid),
        dict(group.resources),
        group.required | {naming.OWNER_TRAIT},
        group.forbidden,
    )
