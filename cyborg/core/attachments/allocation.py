# SPDX-License-Identifier: Apache-2.0
"""Extend the allocation of an instance in Placement, and shrink it by exactly the same amounts.

A conductor may stop between the request to Placement and the record of its success. So the amounts
before the request are recorded first: a later conductor compares them with the present ones.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from cyborg.core.binding.profile import Group
from cyborg.core.binding.request_groups import RequestGroup
from cyborg.core.codec import Serializable
from cyborg.core.naming import OWNER_TRAIT

# Allocated amounts, by provider and resource class.
Amounts = Mapping[str, Mapping[str, int]]


# Amounts by provider and resource class together, 0 for others: a sum and a comparison of two
# allocations need no loop over the classes of each provider. ``+`` leaves out amounts of 0.
_Flat = Counter[tuple[str, str]]


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

    @property
    def was_requested(self) -> bool:
        """Return whether a request to Placement may have been sent for this change."""
        return bool(self.base)


MAX_CANDIDATES = 20


def candidate_query(groups: Sequence[Group], root: str) -> str:
    """Return the query of the allocation candidates of a profile below one compute node.

    The groups are named by their numbers, from 1 on: ``group_name``.
    """
    # Placement refuses several groups without a policy; here groups may share a provider.
    query = {"limit": str(MAX_CANDIDATES), "group_policy": "none"}
    for number, group in enumerate(groups):
        name = group_name(number)
        # Nova has providers of its own below the same compute node.
        required = group.required | {OWNER_TRAIT}
        request = RequestGroup(name, group.resources, required, group.forbidden)
        query[f"resources{name}"] = request.resources_value()
        query[f"required{name}"] = request.required_value()
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
    amounts = _Flat()
    for group, provider in zip(groups, providers, strict=True):
        amounts.update({(provider, name): units for name, units in group.resources.items()})
    return _nest(amounts)


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
    if not intent.was_requested or intent.shrinks:
        return False
    amounts, base = _flatten(allocated), _flatten(intent.base)
    # At least these amounts: Nova may have added resources of the same classes meanwhile.
    return all(amounts[key] >= base[key] + units for key, units in _flatten(intent.added).items())


def is_recreated(generation: int | None, intent: Intent) -> bool:
    """Return whether Nova has created the consumer again, without the attachment's amounts."""
    return intent.generation is not None and (generation or 0) < intent.generation


def has_amounts(allocated: Amounts, needed: Amounts) -> bool:
    """Return whether at least the needed amounts are allocated."""
    amounts = _flatten(allocated)
    return all(amounts[key] >= units for key, units in _flatten(needed).items())


def is_shrunk(allocated: Amounts, intent: Intent, floor: Amounts) -> bool:
    """Return whether a request to shrink the allocation took effect, or was not needed.

    Return False if no such request was sent. ``floor`` has the amounts that other ARQs need.
    """
    if not intent.was_requested or not intent.shrinks:
        return False
    amounts = _flatten(allocated)
    base = _flatten(intent.base)
    least = _flatten(floor)
    # At most these amounts: Nova may have removed more of them meanwhile.
    return all(
        amounts[key] <= max(least[key], base[key] - units)
        for key, units in _flatten(intent.added).items()
    )


def extend(allocated: Amounts, added: Amounts) -> dict[str, dict[str, int]]:
    """Return the allocation with the added amounts."""
    return _nest(_flatten(allocated) + _flatten(added))


def shrink(allocated: Amounts, added: Amounts, floor: Amounts) -> dict[str, dict[str, int]]:
    """Return the allocation without the added amounts; amounts of 0 are left out.

    No amount becomes less than in ``floor``, the amounts that other ARQs need.
    """
    amounts, least = _flatten(allocated), _flatten(floor)
    for key, units in _flatten(added).items():
        # Nova may have taken a part of the amount already: what it left is not raised to the floor.
        amounts[key] = min(amounts[key], max(least[key], amounts[key] - units))
    return _nest(+amounts)


def _flatten(amounts: Amounts) -> _Flat:
    return _Flat(
        {(p, name): units for p, names in amounts.items() for name, units in names.items()}
    )


def _nest(amounts: _Flat) -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for (provider, name), units in amounts.items():
        result.setdefault(provider, {})[name] = units
    return result
