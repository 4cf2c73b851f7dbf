# SPDX-License-Identifier: Apache-2.0
"""Between rows of the database, ``core.provider_tree`` and the bodies that Placement speaks."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from cyborg.clients.placement import Known
from cyborg.core import life, provider_tree
from cyborg.core.provider_tree import Inventory, Part, Provider

_FIELDS = tuple(field.name for field in dataclasses.fields(Inventory))


def wanted(root_uuid: str, rows: Iterable[Mapping[Any, Any]]) -> dict[str, Provider]:
    """Render rows of ``deployables.desired`` below a compute node's provider, by uuid."""
    return provider_tree.wanted(root_uuid, [_part(row) for row in rows])


def actual(
    known: Known, inventories: Mapping[str, Mapping[str, Any]], traits: frozenset[str]
) -> Provider:
    """Return what Placement says of a provider as a value that can be compared."""
    return Provider(
        uuid=known.uuid,
        name=known.name,
        parent_uuid=known.parent_uuid,
        inventories={
            name: Inventory(**{field: body[field] for field in _FIELDS})
            for name, body in inventories.items()
        },
        traits=traits,
    )


def body(inventories: Mapping[str, Inventory]) -> dict[str, dict[str, Any]]:
    """Return inventories as Placement's API takes them."""
    return {name: dataclasses.asdict(inventory) for name, inventory in inventories.items()}


def closed(row: Mapping[Any, Any]) -> bool:
    """Tell whether nothing more of a part may be sold, for whatever reason."""
    return not standing(row).open


def standing(row: Mapping[Any, Any]) -> life.Standing:
    """Return the state of a row of ``deployables.desired``."""
    return life.decide(
        life.Facts(
            status=row["device_status"],
            health=row["health"],
            setup_required=row["setup_required"],
            reboot_required=row["reboot_required"],
            withdrawn=row["withdrawn"],
            programming=row["programming"],
            draining=row["draining"],
            host_down=row["host_down"],
        )
    )


def _part(row: Mapping[Any, Any]) -> Part:
    return Part(
        uuid=row["uuid"],
        name=row["name"],
        resource_class=row["resource_class"],
        traits=frozenset(row["traits"]),
        total=row["total"],
        closed=closed(row),
        stuck=row["stuck"],
        parent_uuid=row["parent"],
    )
