# SPDX-License-Identifier: Apache-2.0
"""Parsing of device profiles: names and groups.

A group is a flat object of strings with these keys:

* ``resources:<CLASS>``: how many units, 1 to ``MAX_UNITS``;
* ``trait:<TRAIT>``: ``required`` or ``forbidden``;
* ``accel:<key>``: free text for the driver, such as ``accel:bitstream_id``.

An amount of zero and a group without resources are rejected when the profile is created: later Nova
would fail, with a KeyError or with NoValidHost.

The key ``accel:attach_target`` of a device profile: who uses the device.

============  ====================================================================================
value         meaning
============  ====================================================================================
``instance``  a device of the flavor, the default: any handle fits
``port``      a Neutron port: Nova reads ``physical_network`` in the handle's info, and fails with
              a KeyError while it builds the server if there is none
``host``      a program of the host: the device is attached to its host, no server can have it
============  ====================================================================================

A bind refuses other values. Before version 2.5 of the API, the value of each ``accel:`` key is free
text, so an older profile can have such a value.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from cyborg.core import naming
from cyborg.core.errors import Conflict, Invalid
from cyborg.core.text import abbreviate
from cyborg.core.validation import check_text, parse_uuid

MAX_UNITS = 256
MAX_GROUPS = 32
MAX_KEYS = 64
MAX_SLOTS = 1024  # ARQs of one profile: the limit of ARQs in one PATCH
MAX_VALUE = 255
MAX_COPIES = 1048576  # characters of the group copies of all its ARQs

_NAME = re.compile(r"^[a-zA-Z0-9\-_]+$")
_KEY = re.compile(r"^[A-Za-z0-9_.:\-]{1,128}$")
# Few digits: Python refuses to convert a text of thousands of them.
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
    if (total := sum(units.number for units in _units(groups))) > MAX_SLOTS:
        raise Invalid(
            f"{field_name} request {total} accelerators in all, at most {MAX_SLOTS} are allowed",
            field=field_name,
        )
    copied_characters = sum(
        units.number * len(str(groups[units.group].to_dict())) for units in _units(groups)
    )
    if copied_characters > MAX_COPIES:
        raise Invalid(
            f"{field_name} are too large: each of the {total} ARQs stores a copy of its group, "
            f"{copied_characters} characters in all, and at most {MAX_COPIES} are allowed",
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
        _check(plain not in keys, where, "duplicate key (spaces around it are ignored)")
        keys.add(plain)
        kind, _, name = plain.partition(":")
        shown = repr(name[:140])
        if kind == "resources":
            is_class = naming.is_resource_class(name)
            _check(is_class, where, f"{shown} is neither a standard resource class nor CUSTOM_*")
            resources[name] = _amount(raw, where)
        elif kind == "trait":
            is_requirement = raw in ("required", "forbidden")
            text = f"{abbreviate(raw, 40)!r} is neither 'required' nor 'forbidden'"
            _check(is_requirement, where, text)
            text = f"{shown} is neither a trait of os-traits nor CUSTOM_*"
            _check(naming.is_trait(name), where, text)
            traits[raw].add(name)
        elif kind == "accel":
            text = f"the key after accel: must match {_KEY.pattern}"
            _check(_KEY.fullmatch(name) is not None, where, text)
            accel[name] = _text(raw, where)
        else:
            _check(False, where, "the key must start with resources:, trait: or accel:")
    if not resources:
        raise Invalid(f"{field_name} has no key resources:<CLASS>", field=field_name)
    if both := traits["required"] & traits["forbidden"]:
        raise Invalid(f"{field_name} requires and forbids {sorted(both)[0]}", field=field_name)
    return Group(resources, frozenset(traits["required"]), frozenset(traits["forbidden"]), accel)


def expand_slots(groups: Sequence[Group]) -> tuple[Slot, ...]:
    """Return one slot for each resource unit of each group, in group order.

    Each FPGA of a group that requires CUSTOM_FPGA_XILINX has two slots.
    """
    # ``_units`` counts both: the management function and the user function are attached to the
    # instance (contract of POST accelerator_requests).
    return tuple(
        Slot(units.group, units.resource_class, groups[units.group])
        for units in _units(groups)
        for _ in range(units.number)
    )


def count_units(group: Group) -> int:
    """Return the number of ARQs of a group."""
    return sum(units.number for units in _units([group]))


class _Units(NamedTuple):
    """The number of ARQs for a resource class of a group."""

    group: int
    resource_class: str
    number: int


def _units(groups: Sequence[Group]) -> Iterator[_Units]:
    for group_id, group in enumerate(groups):
        for resource_class, units in group.resources.items():
            twice = resource_class == "FPGA" and "CUSTOM_FPGA_XILINX" in group.required
            yield _Units(group_id, resource_class, units * (2 if twice else 1))


def _check(valid: bool, where: str, problem: str) -> None:
    """Raise Invalid, with the key, unless it and its value are valid."""
    if not valid:
        raise Invalid(f"{where}: {problem}", field=where)


def _amount(raw: Any, where: str) -> int:
    text = raw.strip() if isinstance(raw, str) else ""
    if isinstance(raw, int) and not isinstance(raw, bool):
        text = abbreviate(raw)
    is_amount = _AMOUNT.fullmatch(text) is not None and 1 <= int(text) <= MAX_UNITS
    problem = f"{abbreviate(raw, 40)!r} is not an amount: expected an integer of 1 to {MAX_UNITS}"
    _check(is_amount, where, problem)
    return int(text)


def _text(raw: Any, where: str) -> str:
    is_scalar = isinstance(raw, str | int | float) and not isinstance(raw, bool)
    _check(is_scalar, where, "the value must be a string")
    # Python refuses to convert an integer of thousands of digits to text.
    is_short = not isinstance(raw, int) or abs(raw) < 10**MAX_VALUE
    _check(is_short, where, f"the number has more than {MAX_VALUE} digits")
    return check_text(where, str(raw), MAX_VALUE)


HIDDEN_PREFIX = "ctx-"
ATTACHMENT_PREFIX = "acc-"  # of the hidden profile of an attachment of one accelerator


def hidden_profile_name(context: str) -> str:
    """Return the name of the hidden device profile of a context."""
    return f"{HIDDEN_PREFIX}{context}"


def is_hidden_profile_name(name: str) -> bool:
    """Return whether only the hidden profile of a context or attachment may have this name."""
    prefix = name[: len(HIDDEN_PREFIX)]
    if prefix.lower() not in (HIDDEN_PREFIX, ATTACHMENT_PREFIX):
        return False
    try:
        parse_uuid(name.removeprefix(prefix), "name")
    except Invalid:
        return False
    return True


def describe_profile(name: str) -> str:
    """Return the object that a user knows: a device profile, or the context of a hidden one."""
    if not is_hidden_profile_name(name):
        return f"device profile {name}"
    context = name.removeprefix(HIDDEN_PREFIX)
    return "the accelerator" if context == name else f"device context {context}"


KEY = "attach_target"


class AttachTarget(StrEnum):
    """Values of ``accel:attach_target``."""

    INSTANCE = "instance"
    PORT = "port"
    HOST = "host"


# Keys that the info of a handle must have.
REQUIRED_INFO: Mapping[AttachTarget, tuple[str, ...]] = {
    AttachTarget.INSTANCE: (),
    AttachTarget.PORT: ("physical_network",),
    AttachTarget.HOST: (),
}

_EXPECTED = " or ".join(AttachTarget)
_ACCEL_KEY = f"accel:{KEY}"


def check_targets(groups: Iterable[Group]) -> None:
    """Raise Invalid if a group of a new profile has an unknown target."""
    for number, group in enumerate(groups):
        if group.accel.get(KEY, AttachTarget.INSTANCE) not in list(AttachTarget):
            where = f"groups[{number}]['accel:{KEY}']"
            raise Invalid(
                f"{where}: unknown value {group.accel[KEY]!r:.60}, expected {_EXPECTED}",
                field=where,
            )


def find_target(group: Group, profile: str) -> AttachTarget:
    """Return the target of a group of a profile. Raise Conflict if it is unknown."""
    value = group.accel.get(KEY, AttachTarget.INSTANCE)
    try:
        return AttachTarget(value)
    except ValueError:
        raise Conflict(
            f"accel:{KEY} of device profile {profile}: unknown value {value!r:.60}, expected "
            f"{_EXPECTED}; create another profile for the flavor or port",
            device_profile=profile,
        ) from None


def is_for_host(group: Mapping[str, str]) -> bool:
    """Return whether the device of an ARQ is for its host; ``group`` is the group of the ARQ."""
    return group.get(_ACCEL_KEY) == AttachTarget.HOST


def check_user(targets: Iterable[AttachTarget], profile: str, *, for_host: bool) -> None:
    """Raise Conflict unless devices with these targets can be attached to a host, or to a server.

    ``profile`` is the name of their device profile.
    """
    wrong = sorted(target for target in targets if (target is AttachTarget.HOST) != for_host)
    if not wrong:
        return
    if for_host:
        text = (
            f"is for a server: only devices of a profile or context with {_ACCEL_KEY}=host can be "
            "attached to a host"
        )
    else:
        text = (
            f"is for the host itself, because its {_ACCEL_KEY} is host: attach it with "
            "cyborg attach-host, or use another profile for the server"
        )
    raise Conflict(f"device profile {profile} {text}", device_profile=profile)


def explain_missing_info(
    target: AttachTarget, info: Mapping[str, str], device: str, requester: str
) -> str | None:
    """Return why a handle of a device does not fit a target; None if it fits.

    ``requester`` is the object with the target: see ``describe_profile``.
    """
    missing = [key for key in REQUIRED_INFO[target] if not info.get(key)]
    if not missing:
        return None
    return (
        f"handles of device {device} have no {', '.join(missing)}, which accel:{KEY}={target} of "
        f"{requester} needs: set physical_networks in the section of its driver nic, "
        "or require the trait CUSTOM_PHYSNET_<NETWORK> in the profile"
    )
