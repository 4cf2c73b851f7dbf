# SPDX-License-Identifier: Apache-2.0
"""Parsing of device profiles: names and groups.

A group is a flat object of strings with these keys:

* ``resources:<CLASS>``: how many units, 1 to ``MAX_UNITS``;
* ``trait:<TRAIT>``: ``required`` or ``forbidden``;
* ``accel:<key>``: free text for the driver, such as ``accel:bitstream_id``.

An amount of zero and a group without resources are rejected when the profile is created: later Nova
would fail, with a KeyError or with NoValidHost.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cyborg.core import naming
from cyborg.core.errors import Invalid
from cyborg.core.text import abbreviate
from cyborg.core.validation import check_text

MAX_UNITS = 256
MAX_GROUPS = 32
MAX_KEYS = 64
MAX_SLOTS = 1024  # ARQs of one profile: the limit of ARQs in one PATCH
MAX_VALUE = 255
MAX_COPIES = 1048576  # characters of the group copies of all its ARQs

_NAME = re.compile(r"^[a-zA-Z0-9\-_]+$")
_KEY = re.compile(r"^[A-Za-z0-9_.:\-]{1,128}$")
_AMOUNT = re.compile(r"^[0-9]{1,10}$")


@dataclass(frozen=True, slots=True)
class Group:
    """One request group: resources and traits of one resource provider."""

    resources: Mapping[str, int]
    required: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()
    accel: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, str]:
        """Return the group as a flat object of strings, as ``parse_group`` reads it."""
        body = {f"resources:{name}": str(units) for name, units in self.resources.items()}
        body |= {f"trait:{name}": "required" for name in sorted(self.required)}
        body |= {f"trait:{name}": "forbidden" for name in sorted(self.forbidden)}
        body |= {f"accel:{key}": value for key, value in self.accel.items()}
        return body


@dataclass(frozen=True, slots=True)
class Slot:
    """Template of one ARQ: one unit of one resource class of one group."""

    group_id: int
    resource_class: str
    group: Group


def parse_name(value: Any, field_name: str = "name") -> str:
    """Return the name of a device profile. Raise Invalid if it is not valid."""
    if not isinstance(value, str) or not value:
        raise Invalid(f"{field_name} must be a non-empty string", field=field_name)
    if len(value) > naming.MAX_NAME:
        raise Invalid(
            f"{field_name} has {len(value)} characters, at most {naming.MAX_NAME} are allowed",
            field=field_name,
        )
    if not _NAME.fullmatch(value):
        raise Invalid(
            f"{field_name} {value!r} must have only letters, digits, '-' and '_'", field=field_name
        )
    return value


def parse_groups(value: Any, field_name: str = "groups") -> tuple[Group, ...]:
    """Parse the groups of a device profile. Raise Invalid with the name of the invalid key."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise Invalid(f"{field_name} must be a list of objects", field=field_name)
    if not 1 <= len(value) <= MAX_GROUPS:
        raise Invalid(
            f"{field_name} has {len(value)} groups, 1 to {MAX_GROUPS} are allowed", field=field_name
        )
    groups = tuple(parse_group(group, f"{field_name}[{i}]") for i, group in enumerate(value))
    if (total := sum(units for *_, units in _units(groups))) > MAX_SLOTS:
        raise Invalid(
            f"{field_name} request {total} accelerators in all, at most {MAX_SLOTS} are allowed",
            field=field_name,
        )
    copies = sum(units * len(str(groups[number].to_dict())) for number, _, units in _units(groups))
    if copies > MAX_COPIES:
        raise Invalid(
            f"{field_name} are too large: each of the {total} ARQs stores a copy of its group, "
            f"{copies} characters in all, and at most {MAX_COPIES} are allowed",
            field=field_name,
        )
    return groups


def parse_group(value: Any, field_name: str) -> Group:
    """Parse one group. Raise Invalid with the name of the invalid key."""
    if not isinstance(value, Mapping):
        raise Invalid(f"{field_name} must be an object of strings", field=field_name)
    if len(value) > MAX_KEYS:
        raise Invalid(
            f"{field_name} has {len(value)} keys, at most {MAX_KEYS} are allowed", field=field_name
        )
    resources: dict[str, int] = {}
    traits: dict[str, set[str]] = {"required": set(), "forbidden": set()}
    accel: dict[str, str] = {}
    keys: set[str] = set()
    for key, raw in value.items():
        where = f"{field_name}[{abbreviate(key, 140)!r}]"
        plain = key.strip() if isinstance(key, str) else ""
        if plain in keys:
            raise Invalid(f"{where}: duplicate key (spaces around it are ignored)", field=where)
        keys.add(plain)
        kind, _, name = plain.partition(":")
        if kind == "resources":
            resources[_resource_class(name, where)] = _amount(raw, where)
        elif kind == "trait":
            traits[_requirement(raw, where)].add(_trait(name, where))
        elif kind == "accel":
            accel[_accel_key(name, where)] = _text(raw, where)
        else:
            raise Invalid(
                f"{where}: the key must start with resources:, trait: or accel:", field=where
            )
    if not resources:
        raise Invalid(f"{field_name} has no key resources:<CLASS>", field=field_name)
    if both := traits["required"] & traits["forbidden"]:
        raise Invalid(f"{field_name} requires and forbids {sorted(both)[0]}", field=field_name)
    return Group(resources, frozenset(traits["required"]), frozenset(traits["forbidden"]), accel)


def expand_slots(groups: Sequence[Group]) -> tuple[Slot, ...]:
    """Return one slot for each resource unit of each group, in group order.

    Each FPGA of a group that requires CUSTOM_FPGA_XILINX has two slots.
    """
    # The management function and the user function are both attached to the instance (contract of
    # POST accelerator_requests).
    return tuple(
        Slot(group_id, resource_class, groups[group_id])
        for group_id, resource_class, units in _units(groups)
        for _ in range(units)
    )


def count_units(group: Group) -> int:
    """Return the number of ARQs of a group."""
    return sum(units for *_, units in _units([group]))


def _units(groups: Sequence[Group]) -> Iterator[tuple[int, str, int]]:
    """Yield (group number, resource class, number of ARQs)."""
    for group_id, group in enumerate(groups):
        for resource_class, units in group.resources.items():
            twice = resource_class == "FPGA" and "CUSTOM_FPGA_XILINX" in group.required
            yield group_id, resource_class, units * (2 if twice else 1)


def _resource_class(name: str, where: str) -> str:
    if not naming.is_resource_class(name):
        raise Invalid(
            f"{where}: {name[:140]!r} is neither a standard resource class nor CUSTOM_*",
            field=where,
        )
    return name


def _trait(name: str, where: str) -> str:
    if not naming.is_trait(name):
        raise Invalid(
            f"{where}: {name[:140]!r} is neither a trait of os-traits nor CUSTOM_*", field=where
        )
    return name


def _amount(raw: Any, where: str) -> int:
    text = raw.strip() if isinstance(raw, str) else ""
    if isinstance(raw, int) and not isinstance(raw, bool):
        text = abbreviate(raw)
    if not _AMOUNT.fullmatch(text) or not 1 <= int(text) <= MAX_UNITS:
        raise Invalid(
            f"{where}: {abbreviate(raw, 40)!r} is not an amount: expected an integer of 1 to "
            f"{MAX_UNITS}",
            field=where,
        )
    return int(text)


def _requirement(raw: Any, where: str) -> str:
    if raw not in ("required", "forbidden"):
        raise Invalid(
            f"{where}: {abbreviate(raw, 40)!r} is neither 'required' nor 'forbidden'", field=where
        )
    return str(raw)


def _accel_key(name: str, where: str) -> str:
    if not _KEY.fullmatch(name):
        raise Invalid(f"{where}: the key after accel: must match {_KEY.pattern}", field=where)
    return name


def _text(raw: Any, where: str) -> str:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise Invalid(f"{where}: the value must be a string", field=where)
    if isinstance(raw, int) and abs(raw) >= 10**MAX_VALUE:
        raise Invalid(f"{where}: the number has more than {MAX_VALUE} digits", field=where)
    return check_text(where, str(raw), MAX_VALUE)
