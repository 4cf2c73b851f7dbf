# SPDX-License-Identifier: Apache-2.0
"""Extend the allocation of an instance in Placement, and shrink it by exactly the same amounts.

A conductor may stop between the request to Placement and the record of its success. So the amounts
before the request are recorded first: a later conductor compares them with the present ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from cyborg.core.binding.profile import Group
from cyborg.core.codec import Serializable
from cyborg.core.naming import OWNER_TRAIT

Amounts = Mapping[str, Mapping[str, int]]
"""Allocated amounts, by provider and resource class."""


@dataclass(frozen=True, slots=True)
class Intent(Serializable):
    """Intended change of an allocation.

    ``providers`` has the provider of each group of the profile, ``added`` the amounts of the
    attachment, ``base`` the allocated amounts of the same providers and classes before the change;
    it is empty while no request was sent. With ``shrinks`` the change removes the amounts.
    ``generation`` is a generation that the consumer has reached. A consumer with a lower generation
    is a new one, which Nova has created with the same uuid, for example at an unshelve.
    ``released`` has the uuids of the handles that the attachment has released. The amounts are
    removed when these handles are clean.
    """

    providers: Sequence[str]
    added: Amounts
    base: Amounts = field(default_factory=dict)
    shrinks: bool = False
    generation: int | None = None
    released: Sequence[str] = ()


MAX_CANDIDATES = 20


def candidate_query(groups: Sequence[Group], root: str) -> str:
    """Return the query of the allocation candidates of a profile below one compute node.

    The groups are named by their numbers, from 1 on: ``group_name``.
    """
    query = {"limit": str(MAX_CANDIDATES), "group_policy": "none"}
    for number, group in enumerate(groups):
        name = group_name(number)
        # Nova has providers of its own below the same compute node.
        traits = sorted({*group.required, OWNER_TRAIT})
        traits += [f"!{trait}" for trait in sorted(group.forbidden)]
        resources = [f"{name_}:{units}" for name_, units in sorted(group.resources.items())]
        query[f"resources{name}"] = ",".join(resources)
        query[f"required{name}"] = ",".join(traits)
        query[f"in_tree{name}"] = root
    return urlencode(query)


def group_name(number: int) -> str:
    """Return the name of a group of a profile in a query of candidates; ``number`` is from 0."""
    return str(number + 1)


def required_amounts(
    groups: Sequence[Group], providers: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Return the amounts of a profile, by provider and resource class.

    ``providers`` has the provider of each group.
    """
    amounts: dict[str, dict[str, int]] = {}
    for group, provider in zip(groups, providers, strict=True):
        for name, units in group.resources.items():
            of_provider = amounts.setdefault(provider, {})
            of_provider[name] = of_provider.get(name, 0) + units
    return amounts


def count_units(amounts: Amounts) -> int:
    """Return the sum of all amounts: the number of accelerator requests that need them."""
    return sum(units for names in amounts.values() for units in names.values())


def select_amounts(allocated: Amounts, like: Amounts) -> dict[str, dict[str, int]]:
    """Return the allocated amounts of the providers and classes of ``like``, also if they are 0."""
    return {
        provider: {name: allocated.get(provider, {}).get(name, 0) for name in names}
        for provider, names in like.items()
    }


def is_extended(allocated: Amounts, intent: Intent) -> bool:
    """Return whether a request to extend the allocation took effect."""
    return (
        bool(intent.base)
        and not intent.shrinks
        and all(
            allocated.get(provider, {}).get(name, 0) >= intent.base[provider][name] + units
            for provider, names in intent.added.items()
            for name, units in names.items()
        )
    )


def is_recreated(generation: int | None, intent: Intent) -> bool:
    """Return whether Nova has created the consumer again, without the attachment's amounts."""
    return intent.generation is not None and (generation or 0) < intent.generation


def has_amounts(allocated: Amounts, needed: Amounts) -> bool:
    """Return whether at least the needed amounts are allocated."""
    return all(
        allocated.get(provider, {}).get(name, 0) >= units
        for provider, names in needed.items()
        for name, units in names.items()
    )


def is_shrunk(allocated: Amounts, intent: Intent, floor: Amounts) -> bool:
    """Return whether a request to shrink the allocation took effect, or was not needed.

    ``floor`` has the amounts that other ARQs need.
    """
    return (
        bool(intent.base)
        and intent.shrinks
        and all(
            allocated.get(provider, {}).get(name, 0)
            <= max(floor.get(provider, {}).get(name, 0), intent.base[provider][name] - units)
            for provider, names in intent.added.items()
            for name, units in names.items()
        )
    )


def extend(allocated: Amounts, added: Amounts) -> dict[str, dict[str, int]]:
    """Return the allocation with the added amounts."""
    return _change(allocated, added, lambda _, __, present, units: present + units)


def shrink(allocated: Amounts, added: Amounts, floor: Amounts) -> dict[str, dict[str, int]]:
    """Return the allocation without the added amounts; amounts of 0 are left out.

    No amount becomes less than in ``floor``, the amounts that other ARQs need.
    """

    def subtract(provider: str, name: str, present: int, units: int) -> int:
        least = floor.get(provider, {}).get(name, 0)
        return min(present, max(least, present - units))

    return _change(allocated, added, subtract)


def _change(
    allocated: Amounts, added: Amounts, change: Callable[[str, str, int, int], int]
) -> dict[str, dict[str, int]]:
    result = {provider: dict(names) for provider, names in allocated.items()}
    for provider, names in added.items():
        of_provider = result.setdefault(provider, {})
        for name, units in names.items():
            of_provider[name] = change(provider, name, of_provider.get(name, 0), units)
    positive = {
        provider: {name: units for name, units in names.items() if units}
        for provider, names in result.items()
    }
    return {provider: names for provider, names in positive.items() if names}
