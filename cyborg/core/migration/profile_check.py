# SPDX-License-Identifier: Apache-2.0
"""Device profiles that ask for traits or resource classes that no device has."""

from collections.abc import Collection, Iterable

from cyborg.core import naming
from cyborg.core.binding.profile import Group
from cyborg.core.inventory.reference_names import UNPUBLISHED, describe_remedy


def find_unserved_names(
    groups: Iterable[Group],
    offered: Collection[str],
    reported: Collection[str],
    release: int | None,
) -> dict[str, str]:
    """Return the names in the groups of a profile that no device has, with what to do.

    ``reported`` are the traits and resource classes of the devices. ``offered`` are those of
    imported devices, which agents have not reported yet: of these, the names of OpenStack Cyborg
    stay with ``release`` only.
    """
    found: dict[str, str] = {}
    for group in groups:
        for name in sorted({*group.resources, *group.required} - {naming.OWNER_TRAIT}):
            remedy = describe_remedy(name)
            stays = remedy is None or (release is not None and name not in UNPUBLISHED)
            if name not in reported and not (name in offered and stays):
                found[name] = remedy or "compare with 'cyborg deployable-list --long'"
    return found
