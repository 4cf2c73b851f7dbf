# SPDX-License-Identifier: Apache-2.0
"""Limits of a project: how many units of each resource class its ARQs may have.

Each ARQ is one unit of its resource class. There are two counts of the units of a project:

* **used** counts its ARQs in every state. It is compared with the limit when ARQs are created.
* **bound** counts its ARQs that own an attach handle. It is compared with the limit when ARQs are
  bound, because a bind can move an ARQ to another project, and the limit may be lower than at the
  creation of the ARQ.

An ARQ without a project has no limit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cyborg.core import naming
from cyborg.core.errors import Misconfigured, OverLimit

UNLIMITED = -1
MAX_UNITS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one project by resource class; a class without an entry has no limit."""

    project: str
    units: Mapping[str, int] = field(default_factory=dict)

    def limit(self, resource_class: str) -> int:
        """Return the limit of a resource class, UNLIMITED if there is none."""
        return max(self.units.get(resource_class, UNLIMITED), UNLIMITED)

    def limited(self, resource_classes: Iterable[str]) -> list[str]:
        """Return those of the resource classes that have a limit, sorted."""
        return sorted(name for name in set(resource_classes) if self.limit(name) != UNLIMITED)


def check_created(limits: Limits, used: Mapping[str, int], requested: Mapping[str, int]) -> None:
    """Raise OverLimit if the used and the requested units together exceed a limit."""
    remedy = "delete unused accelerator requests"
    _check(limits, used, requested, verb="uses", action="create", remedy=remedy)


def check_bound(limits: Limits, bound: Mapping[str, int], requested: Mapping[str, int]) -> None:
    """Raise OverLimit if the bound and the requested units together exceed a limit."""
    remedy = "delete servers with accelerators"
    _check(limits, bound, requested, verb="has bound", action="bind", remedy=remedy)


def _check(
    limits: Limits,
    used: Mapping[str, int],
    requested: Mapping[str, int],
    *,
    verb: str,
    action: str,
    remedy: str,
) -> None:
    """Raise OverLimit, with what to do, for the first class over its limit.

    ``verb``, ``action`` and ``remedy`` are parts of the text.
    """
    for name in limits.limited(requested):
        limit = limits.limit(name)
        if used.get(name, 0) + requested[name] > limit:
            raise OverLimit(
                f"project {limits.project} {verb} {used.get(name, 0)} units of {name} and the "
                f"limit is {limit}, cannot {action} {requested[name]} more; {remedy} or ask for a "
                "higher limit",
                project_id=limits.project,
                resource_class=name,
                limit=limit,
                used=used.get(name, 0),
                requested=requested[name],
            )


def parse_default_limits(values: Mapping[str, str], option: str) -> dict[str, int]:
    """Return the limit of each resource class of an option. Raise Misconfigured."""
    return {
        _resource_class(name, f"{name}:{units}", option): _units(units, f"{name}:{units}", option)
        for name, units in values.items()
    }


def parse_project_limits(values: Iterable[str], option: str) -> dict[str, dict[str, int]]:
    """Return limits by project and resource class of an option. Raise Misconfigured.

    Each value has the form ``PROJECT:RESOURCE_CLASS:UNITS``.
    """
    limits: dict[str, dict[str, int]] = {}
    for value in values:
        parts = [part.strip() for part in value.split(":")]
        if len(parts) != 3 or not parts[0]:
            raise _misconfigured(option, value, "expected PROJECT:RESOURCE_CLASS:UNITS")
        project, name, units = parts
        by_class = limits.setdefault(project, {})
        name = _resource_class(name, value, option)
        if name in by_class:
            raise _misconfigured(option, value, f"a second limit of {name} for this project")
        by_class[name] = _units(units, value, option)
    return limits


def _resource_class(name: str, value: str, option: str) -> str:
    if not naming.is_resource_class(name):
        raise _misconfigured(
            option, value, f"{name!r} is neither a standard resource class nor CUSTOM_*"
        )
    return name


def _units(text: str, value: str, option: str) -> int:
    try:
        units = int(text)
    except ValueError:
        # Out of the range: a text that is no number gets the same error.
        units = UNLIMITED - 1
    if not UNLIMITED <= units <= MAX_UNITS:
        raise _misconfigured(
            option, value, f"{text!r} is no limit, expected -1 (unlimited) to {MAX_UNITS}"
        )
    return units


def _misconfigured(option: str, value: str, reason: str) -> Misconfigured:
    return Misconfigured(f"{option}: {value!r}: {reason}", option=option)
