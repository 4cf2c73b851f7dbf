# SPDX-License-Identifier: Apache-2.0
"""Tombstones: records of removed devices, for the case that they return.

A device is identified by its host and address. When it returns, its uuid and the operator's status
are restored. For its deployables, the uuids and the operator's attributes are restored. Reported
values are not stored, as the host reports them again. Handles that were released without cleaning
are cleaned after their return, before they are allocated.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Attribute:
    """An operator's attribute of a deployable."""

    uuid: str
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class DeployableTombstone:
    """Values of a deployable to restore; ``dirty_handles`` are addresses of uncleaned handles."""

    uuid: str
    attributes: tuple[Attribute, ...] = ()
    dirty_handles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Values to restore if a device returns; ``deployables`` has removed deployables by address.

    A device that is still present has a tombstone, too, if some of its deployables were removed.
    """

    uuid: str
    status: str
    deployables: Mapping[str, DeployableTombstone] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Values to restore now, and the tombstones that remain.

    The keys of ``devices`` and ``tombstones`` are device addresses. The keys of ``deployables`` are
    the addresses of device and deployable.
    """

    devices: Mapping[str, Tombstone]
    deployables: Mapping[tuple[str, str], DeployableTombstone]
    tombstones: Mapping[str, Tombstone]


def plan_restore(
    stored: Mapping[str, Tombstone],
    removed: Mapping[str, Tombstone],
    added: Collection[tuple[str, str]],
    present: Collection[str],
) -> RestorePlan:
    """Return the values to restore and the tombstones to keep, for one host.

    ``stored`` are the existing tombstones. ``removed`` are the tombstones that this report adds:
    one for each device that is removed or loses deployables, with the removed deployables.
    ``added`` are the new deployables, by the addresses of device and deployable, and ``present``
    the devices after the report. A deployable that moves to another device keeps its values.
    """
    tombstones = dict(stored)
    for device, tombstone in removed.items():
        deployables = dict(tombstone.deployables)
        if device in tombstones:
            deployables = {**tombstones[device].deployables, **deployables}
        tombstones[device] = replace(tombstone, deployables=deployables)
    moved = {a: device for device, tombstone in removed.items() for a in tombstone.deployables}
    restored: dict[tuple[str, str], DeployableTombstone] = {}
    for device, address in sorted(added):
        # A deployable removed in this report is newer than one with a stored tombstone.
        source = moved.get(address, device)
        deployables = dict(tombstones[source].deployables) if source in tombstones else {}
        if address not in deployables:
            continue
        restored[device, address] = deployables.pop(address)
        tombstones[source] = replace(tombstones[source], deployables=deployables)
        if source != device and device in tombstones:
            others = {a: d for a, d in tombstones[device].deployables.items() if a != address}
            tombstones[device] = replace(tombstones[device], deployables=others)
    return RestorePlan(
        devices={address: stored[address] for address in present if address in stored},
        deployables=restored,
        tombstones={
            address: tombstone
            for address, tombstone in tombstones.items()
            if tombstone.deployables or address not in present
        },
    )
