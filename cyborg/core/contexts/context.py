# SPDX-License-Identifier: Apache-2.0
"""Device contexts: the bodies that create and change one, its hidden profile and its queries.

A context is made from exactly one of ``resources`` (with ``requires`` and ``forbids``), ``groups``
and ``device_profile``. A name that is not a standard resource class or trait gets the prefix
``CUSTOM_``. Each group requires the trait OWNER_CYBORG, so that Placement offers no provider of
another service.

``config_data`` is for the driver. Each ARQ of the context gets it as ``accel:`` keys in the copy of
its group, so that jobs, restores after a reboot and custody records need no second source.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from cyborg.core import naming
from cyborg.core.binding import request_groups
from cyborg.core.binding.profile import (
    MAX_KEYS,
    MAX_UNITS,
    MAX_VALUE,
    Group,
    check_targets,
    is_hidden_profile_name,
    parse_groups,
    parse_name,
)
from cyborg.core.errors import Invalid, Unavailable
from cyborg.core.text import abbreviate
from cyborg.core.validation import check_text, parse_future_time, parse_uuid

MAX_CONFIG_KEYS = 64
MAX_CONFIG_CHARACTERS = 16 * 1024  # of all keys and values
MAX_DESCRIPTION = 4096
MAX_CANDIDATES = 100
MAX_LIST = 64 * 1024  # characters of a list of names with commas

REQUEST_FIELDS = frozenset(
    {
        *("name", "description", "resources", "requires", "forbids", "groups"),
        *("device_profile", "config_data"),
    }
)
CHANGE_FIELDS = frozenset({"name", "description", "config_data", "expires_at"})

_WORD = re.compile(r"^[A-Z0-9_]{1,200}$")
# Few digits: Python refuses to convert a text of thousands of them.
_AMOUNT = re.compile(r"^[0-9]{1,10}$")
_CONFIG_KEY = re.compile(r"^[A-Za-z0-9_.\-]{1,64}$")


@dataclass(frozen=True, slots=True)
class ContextRequest:
    """A device context to create; ``groups`` is None if ``device_profile`` has them."""

    name: str | None = None
    description: str | None = None
    groups: tuple[Group, ...] | None = None
    device_profile: str | None = None
    config_data: Mapping[str, str] = field(default_factory=dict)


def parse_request(body: Any) -> ContextRequest:
    """Parse the body that creates a context. Raise Invalid with the name of the invalid field."""
    values = _check_fields(body, REQUEST_FIELDS)
    kinds = [name for name in ("resources", "groups", "device_profile") if name in values]
    if len(kinds) != 1:
        raise Invalid(
            "give exactly one of resources, groups and device_profile, found "
            f"{' and '.join(kinds) or 'none'}",
            field=kinds[1] if kinds else "resources",
        )
    # Groups and profiles have traits of their own.
    for name in ("requires", "forbids"):
        if name in values and kinds != ["resources"]:
            raise Invalid(f"{name}: only allowed with resources, not with {kinds[0]}", field=name)
    config = parse_config_data(values.get("config_data", {}))
    groups: tuple[Group, ...] | None = None
    if kinds == ["resources"]:
        groups = _parse_resources(values)
    elif kinds == ["groups"]:
        groups = require_owner(parse_groups(_complete_names(values["groups"])), "groups")
        check_targets(groups)
    if groups is not None:
        # Only a check: the context keeps its config data apart, because they can be changed.
        merge_config(groups, config)
    return ContextRequest(
        name=_parse_optional_name(values.get("name")),
        description=_parse_description(values.get("description")),
        groups=groups,
        device_profile=_parse_profile(values["device_profile"]) if groups is None else None,
        config_data=config,
    )


def parse_changes(body: Any, now: datetime) -> dict[str, Any]:
    """Parse the body that changes a context; return the new values of the given fields.

    ``expires_at`` is naive UTC, or None if the context does not expire. Raise Invalid.
    """
    values = _check_fields(body, CHANGE_FIELDS, keep_null=True)
    parsers: Mapping[str, Callable[[Any], Any]] = {
        "name": _parse_optional_name,
        "description": _parse_description,
        "config_data": lambda value: parse_config_data({} if value is None else value),
        "expires_at": lambda value: _parse_expiry(value, now),
    }
    changes = {name: parsers[name](value) for name, value in values.items()}
    if not changes:
        raise Invalid(
            f"nothing to change: expected at least one of {', '.join(sorted(CHANGE_FIELDS))}",
            field="body",
        )
    return changes


def require_owner(groups: Sequence[Group], field_name: str) -> tuple[Group, ...]:
    """Return the groups, each with the required trait OWNER_CYBORG. Raise Invalid."""
    for number, group in enumerate(groups):
        if naming.OWNER_TRAIT in group.forbidden:
            raise Invalid(
                f"{field_name}[{number}] forbids {naming.OWNER_TRAIT}, which each group of a "
                "device context requires",
                field=field_name,
            )
    owned = [replace(group, required=group.required | {naming.OWNER_TRAIT}) for group in groups]
    # With the trait, a group may have too many keys.
    return parse_groups([group.to_dict() for group in owned], field_name)


def merge_config(groups: Sequence[Group], config: Mapping[str, str]) -> tuple[Group, ...]:
    """Return the groups with ``config`` added as ``accel:`` keys.

    Raise Invalid if a group has one of the keys, or is too large with them.
    """
    for number, group in enumerate(groups):
        if conflict := sorted(set(config) & set(group.accel)):
            raise Invalid(
                f"config_data: key {conflict[0]!r} is also accel:{conflict[0]} of group {number}",
                field="config_data",
            )
    merged = tuple(replace(group, accel={**group.accel, **config}) for group in groups)
    if config:
        try:
            parse_groups([group.to_dict() for group in merged], "groups with config_data")
            check_targets(merged)
        except Invalid as exc:
            raise Invalid(f"config_data: {exc.message}", field="config_data") from exc
    return merged


def parse_config_data(value: Any) -> dict[str, str]:
    """Return the config data of a context. Raise Invalid."""
    if not isinstance(value, Mapping):
        raise Invalid("config_data must be an object of strings", field="config_data")
    if len(value) > MAX_CONFIG_KEYS:
        raise Invalid(
            f"config_data has {len(value)} keys, at most {MAX_CONFIG_KEYS} are allowed",
            field="config_data",
        )
    # Values of other types are refused below.
    texts = [text for pair in value.items() for text in pair if isinstance(text, str)]
    if sum(map(len, texts)) > MAX_CONFIG_CHARACTERS:
        raise Invalid(
            f"config_data is too large: keys and values may have {MAX_CONFIG_CHARACTERS} "
            "characters in all",
            field="config_data",
        )
    for key, item in value.items():
        if not isinstance(key, str) or not _CONFIG_KEY.fullmatch(key):
            raise Invalid(
                f"config_data: key {abbreviate(key)!r} must match {_CONFIG_KEY.pattern}",
                field="config_data",
            )
        check_text("config_data", item, MAX_VALUE, subject=f"config_data[{key!r}]")
    return dict(value)


def build_request_groups(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the request group of each group, as the query of Placement spells it.

    ``suffix`` follows the names of the parameters, and identifies the group in the mappings of an
    allocation candidate. A forbidden trait begins with "!".
    """
    return [
        {
            "suffix": group.name,
            "resources": group.resources_value(),
            "required": group.required_value(),
        }
        for group in request_groups.make_request_groups(groups)
    ]


def build_query(groups: Sequence[Group]) -> str:
    """Return the query of GET /allocation_candidates of Placement for the groups."""
    return urlencode(
        request_groups.build_parameters(request_groups.make_request_groups(groups)), safe=":,!"
    )


def parse_candidates(answer: Any, num_groups: int) -> list[dict[str, list[str]]]:
    """Return the mappings of each allocation candidate in an answer of Placement.

    A mapping has the uuids of providers by the number of the group. Raise Unavailable if the answer
    has another form.
    """
    suffixes = {request_groups.make_group_name(number): str(number) for number in range(num_groups)}
    try:
        return [
            {
                suffixes[suffix]: [parse_uuid(provider, "provider") for provider in providers]
                for suffix, providers in request["mappings"].items()
            }
            for request in answer["allocation_requests"]
        ]
    except (AttributeError, KeyError, TypeError, Invalid) as exc:
        raise Unavailable(f"unexpected allocation candidates of Placement: {exc!r}") from exc


def _check_fields(body: Any, allowed: frozenset[str], *, keep_null: bool = False) -> dict[str, Any]:
    if not isinstance(body, Mapping):
        raise Invalid("a device context must be an object", field="body")
    if unknown := sorted(abbreviate(name) for name in body if name not in allowed):
        raise Invalid(
            f"{unknown[0]}: unknown field, supported: {', '.join(sorted(allowed))}",
            field=unknown[0],
        )
    return {name: value for name, value in body.items() if keep_null or value is not None}


def _parse_resources(values: Mapping[str, Any]) -> tuple[Group, ...]:
    """Return the only group of a request that gives resources and traits."""
    resources: dict[str, int] = {}
    for name, amount in _resource_items(values["resources"]):
        resource_class = _class_name(name, "resources")
        if resource_class in resources:
            raise Invalid(f"resources: duplicate class {resource_class}", field="resources")
        resources[resource_class] = _parse_amount(amount, resource_class)
    required = _parse_traits(values.get("requires", ()), "requires")
    forbidden = _parse_traits(values.get("forbids", ()), "forbids")
    if both := sorted(required & forbidden):
        raise Invalid(f"forbids: {both[0]} is also in requires", field="forbids")
    if naming.OWNER_TRAIT in forbidden:
        raise Invalid(
            f"forbids: each device context requires {naming.OWNER_TRAIT}", field="forbids"
        )
    group = Group(resources, required | {naming.OWNER_TRAIT}, forbidden)
    # Parsed as a group for its limits, such as the number of ARQs.
    return parse_groups([group.to_dict()], "resources")


def _resource_items(value: Any) -> list[tuple[str, Any]]:
    """Return the classes with their amounts, which are not checked yet."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, str):
        for item in _split(value, "resources"):
            name, colon, amount = item.partition(":")
            if not colon:
                raise Invalid(
                    f"resources: {item[:60]!r} is not of the form CLASS:AMOUNT, such as FPGA:1",
                    field="resources",
                )
            items.append((name.strip(), amount))
    else:
        raise Invalid(
            "resources must be an object {class: amount} or a string CLASS:AMOUNT,...",
            field="resources",
        )
    if not 1 <= len(items) <= MAX_KEYS:
        raise Invalid(
            f"resources has {len(items)} classes, 1 to {MAX_KEYS} are allowed", field="resources"
        )
    return items


def _split(value: str, field_name: str) -> list[str]:
    """Return the parts of a list with commas; empty parts are left out."""
    if len(value) > MAX_LIST:
        raise Invalid(
            f"{field_name} has {len(value)} characters, at most {MAX_LIST} are allowed",
            field=field_name,
        )
    return [stripped for part in value.split(",") if (stripped := part.strip())]


def _parse_amount(value: Any, resource_class: str) -> int:
    text = value.strip() if isinstance(value, str) else ""
    if isinstance(value, int):
        text = abbreviate(value)
    if isinstance(value, bool) or not _AMOUNT.fullmatch(text) or not 1 <= int(text) <= MAX_UNITS:
        raise Invalid(
            f"resources: {abbreviate(value, 40)!r} of {resource_class} is not an amount: expected "
            f"an integer of 1 to {MAX_UNITS}",
            field="resources",
        )
    return int(text)


def _parse_traits(value: Any, field_name: str) -> frozenset[str]:
    """Return the full names of the traits in a list, or in a text with commas. Raise Invalid."""
    if isinstance(value, str):
        value = _split(value, field_name)
    if not isinstance(value, Sequence):
        raise Invalid(
            f"{field_name} must be a list of traits or a string TRAIT,...", field=field_name
        )
    if len(value) > MAX_KEYS:
        raise Invalid(
            f"{field_name} has {len(value)} traits, at most {MAX_KEYS} are allowed",
            field=field_name,
        )
    return frozenset(_trait_name(name, field_name) for name in value)


def _class_name(name: Any, field_name: str) -> str:
    """Return a resource class of an accelerator, with CUSTOM_ if it is no standard class."""
    word = _check_word(name, field_name, "resource class")
    full = word if naming.is_resource_class(word) else f"CUSTOM_{word}"
    if not naming.is_accelerator_class(full):
        raise Invalid(
            f"{field_name}: {word} is not a resource class of accelerators: expected "
            f"{', '.join(sorted(naming.ACCELERATOR_CLASSES))} or a custom class",
            field=field_name,
        )
    return full


def _trait_name(name: Any, field_name: str) -> str:
    word = _check_word(name, field_name, "trait")
    return word if naming.is_trait(word) else f"CUSTOM_{word}"


def _check_word(name: Any, field_name: str, noun: str) -> str:
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise Invalid(
            f"{field_name}: {abbreviate(name)!r} is not the name of a {noun}: expected letters "
            "A-Z, digits and '_'",
            field=field_name,
        )
    return name


def _complete_names(groups: Any) -> Any:
    """Return the groups with CUSTOM_ added to the names of their keys where it is missing."""
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        return groups
    return [
        _complete_keys(group, f"groups[{number}]") if isinstance(group, Mapping) else group
        for number, group in enumerate(groups)
    ]


def _complete_keys(group: Mapping[Any, Any], field_name: str) -> dict[str, Any]:
    """Return a group with the full names of its classes and traits."""
    complete: dict[str, Any] = {}
    for raw, value in group.items():
        if not isinstance(raw, str):
            raise Invalid(f"{field_name}: key {abbreviate(raw)!r} is no string", field=field_name)
        kind, _, name = raw.strip().partition(":")
        key = raw  # other keys are checked as they are by ``parse_groups``
        if kind == "resources":
            key = f"resources:{_class_name(name, field_name)}"
        elif kind == "trait":
            key = f"trait:{_trait_name(name, field_name)}"
        if key in complete:
            raise Invalid(f"{field_name}: duplicate key {key[:140]}", field=field_name)
        complete[key] = value
    return complete


def _parse_profile(value: Any) -> str:
    name = parse_name(value, "device_profile")
    if is_hidden_profile_name(name):
        raise Invalid(
            f"device_profile: {name} is a hidden profile, of a device context or an attachment; "
            "use the profile or the resources that it was made from",
            field="device_profile",
        )
    return name


def _parse_optional_name(value: Any) -> str | None:
    return None if value is None else check_text("name", value)


def _parse_description(value: Any) -> str | None:
    if value is None or value == "":
        return None
    return check_text("description", value, MAX_DESCRIPTION, allowed="\n\r\t")


def _parse_expiry(value: Any, now: datetime) -> datetime | None:
    if value is None:
        return None
    return parse_future_time(value, "expires_at", now, "a later time or null")
