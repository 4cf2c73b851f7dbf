# SPDX-License-Identifier: Apache-2.0
"""Rows of providers: their order by host, and conversion to bodies of Placement's API."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, TypeVar

from cyborg.clients.placement import ProviderSummary
from cyborg.core import placement
from cyborg.core.inventory import device_state
from cyborg.core.placement import DeployableState, Inventory, Provider
from cyborg.db.deployables.write import DesiredProviderRow
from cyborg.db.providers.write import LeasedProviderRow, VerifiedProviderRow

_FIELDS = tuple(field.name for field in dataclasses.fields(Inventory))


def desired_providers(root_uuid: str, rows: Iterable[DesiredProviderRow]) -> dict[str, Provider]:
    """Return the providers of ``deployables.write.desired_state`` below a compute node, by uuid."""
    return placement.build_providers(root_uuid, [_to_deployable(row) for row in rows])


def actual_provider(
    summary: ProviderSummary, inventories: Mapping[str, Mapping[str, Any]], traits: frozenset[str]
) -> Provider:
    """Convert a provider as Placement returns it to a value that can be compared."""
    return Provider(
        uuid=summary.uuid,
        name=summary.name,
        parent_uuid=summary.parent_uuid,
        inventories={
            name: Inventory(**{field: body[field] for field in _FIELDS})
            for name, body in inventories.items()
        },
        traits=traits,
    )


def inventories_body(inventories: Mapping[str, Inventory]) -> dict[str, dict[str, Any]]:
    """Convert inventories to the body of Placement's API."""
    return {name: dataclasses.asdict(inventory) for name, inventory in inventories.items()}


def is_cordoned(row: DesiredProviderRow) -> bool:
    """Return whether new allocations of a deployable must be prevented, for any reason."""
    return not device_status(row).schedulable


def device_status(row: DesiredProviderRow) -> device_state.DeviceStatus:
    """Evaluate the device status of a row of ``deployables.write.desired_state``."""
    return device_state.evaluate_row(row)


def _to_deployable(row: DesiredProviderRow) -> DeployableState:
    return DeployableState(
        uuid=row["uuid"],
        name=row["name"],
        resource_class=row["resource_class"],
        traits=frozenset(row["traits"]),
        total=row["total"],
        cordoned=is_cordoned(row),
        uncleanable=row["stuck"],
        parent_uuid=row["parent"],
    )


ProviderRow = TypeVar("ProviderRow", LeasedProviderRow, VerifiedProviderRow)


def group_by_host(rows: Iterable[ProviderRow]) -> list[tuple[str, list[ProviderRow]]]:
    """Return the hosts, sorted, each with its rows."""
    by_host = itemgetter("host")
    ordered = sorted(rows, key=by_host)
    return [(host, list(group)) for host, group in itertools.groupby(ordered, by_host)]
