# SPDX-License-Identifier: Apache-2.0
"""Plan of the changes that reconcile the records of a host with its report.

Both inventories are flattened: each device, deployable and handle is a record under a key, which
has the addresses of its parents. The plan is the difference of the two, except that a bound handle
and the records that contain it are drained and not removed.

A tombstone is the record of a removed device, for the case that it returns. A device is identified
by its host and address. When it returns, its uuid and the operator's status are restored. For its
deployables, the uuids and the operator's attributes are restored. Reported values are not stored,
as the host reports them again. Handles that were released without cleaning are cleaned after their
return, before they are allocated.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from cyborg.core.inventory.device import AttachHandle, Deployable, Device

_T = TypeVar("_T")


class DeviceKey(NamedTuple):
    """Key of a device: its address."""

    device: str


class DeployableKey(NamedTuple):
    """Key of a deployable: the address of its device, and its own."""

    device: str
    deployable: str


class HandleKey(NamedTuple):
    """Key of an attach handle: the addresses of its device and deployable, and its own."""

    device: str
    deployable: str
    handle: str

    @property
    def deployable_key(self) -> DeployableKey:
        """Return the key of its deployable."""
        return DeployableKey(self.device, self.deployable)


# The tuples differ in length, so keys of different kinds are never equal.
Key = DeviceKey | DeployableKey | HandleKey

# One object without its children.
Record = Device | Deployable | AttachHandle


@dataclass(frozen=True, slots=True)
class Stored:
    """A record of the database; a draining record is removed when it is released."""

    value: Record
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Add:
    """Add a new record."""

    key: Key
    value: Record


@dataclass(frozen=True, slots=True)
class Change:
    """Update a record that differs, or that was draining and is reported again."""

    key: Key
    value: Record


@dataclass(frozen=True, slots=True)
class Drain:
    """Mark a record as draining: it was removed from the host but is still bound."""

    key: Key


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a record that is neither reported nor bound."""

    key: Key


Step = Add | Change | Drain | Remove


def flatten(devices: Sequence[Device]) -> dict[Key, Record]:
    """Return all records of a report by key, parents before children."""
    flat: dict[Key, Record] = {}
    for device in devices:
        flat[DeviceKey(device.address)] = device.without_deployables()
        parents = {deployable.address: deployable.parent for deployable in device.deployables}
        depths = _depths(parents, parents.get)
        for deployable in sorted(device.deployables, key=lambda d: depths[d.address]):
            key = DeployableKey(device.address, deployable.address)
            flat[key] = deployable.without_handles()
            for handle in deployable.handles:
                flat[HandleKey(*key, handle.address)] = handle
    return flat


def plan(
    reported: Sequence[Device], stored: Mapping[Key, Stored], bound: Collection[HandleKey]
) -> tuple[Step, ...]:
    """Return the steps from the stored to the reported records; none if they are equal.

    ``bound`` has the keys of handles that have an owner. The steps are in a valid order: removals
    (children first), then additions (parents first). A record that is draining is not drained
    again. The run time is linear.
    """
    desired = flatten(reported)
    # The reported values take precedence: a deployable that moves has its new parent.
    records = {key: record.value for key, record in stored.items()} | desired
    pinned = _pinned(bound, records)
    # Removals first: an added deployable may have the unique name of a removed one.
    removals: list[Step] = []
    for key in _children_first([key for key in stored if key not in desired], records):
        if key not in pinned:
            removals.append(Remove(key))
        elif not stored[key].draining:
            removals.append(Drain(key))
    additions: list[Step] = []
    for key, value in desired.items():
        current = stored.get(key)
        if current is None:
            additions.append(Add(key, value))
        # A draining record that is reported again gets its values again, also without a change.
        elif current.draining or current.value != value:
            additions.append(Change(key, value))
    return (*removals, *additions)


def apply(stored: Mapping[Key, Stored], steps: Sequence[Step]) -> dict[Key, Stored]:
    """Return the stored records after the steps."""
    result = dict(stored)
    for step in steps:
        match step:
            case Add(key, value) | Change(key, value):
                result[key] = Stored(value)
            case Drain(key):
                result[key] = replace(result[key], draining=True)
            case Remove(key):
                del result[key]
    return result


def _pinned(bound: Collection[HandleKey], records: Mapping[Key, Record]) -> set[Key]:
    """Return the keys of bound handles and of all records that contain them."""
    # Ancestors of their deployables too: Placement cannot delete a provider with children.
    pinned: set[Key] = set()
    for key in bound:
        pinned |= {key, DeviceKey(key.device)}
        enclosing: DeployableKey | None = key.deployable_key
        while enclosing is not None and enclosing not in pinned:
            pinned.add(enclosing)
            enclosing = _enclosing(enclosing, records)
    return pinned


def _enclosing(key: DeployableKey, records: Mapping[Key, Record]) -> DeployableKey | None:
    """Return the key of the deployable that contains a deployable, or None."""
    record = records.get(key)
    if not isinstance(record, Deployable) or record.parent is None:
        return None
    return DeployableKey(key.device, record.parent)


def _children_first(keys: Sequence[Key], records: Mapping[Key, Record]) -> list[Key]:
    """Return the keys in the order of handles, deployables (inner first) and devices."""
    deployables = [key for key in keys if isinstance(key, DeployableKey)]
    depths = _depths(deployables, lambda key: _enclosing(key, records))
    deployables.sort(key=depths.__getitem__, reverse=True)
    handles = [key for key in keys if isinstance(key, HandleKey)]
    return [*handles, *deployables, *(key for key in keys if isinstance(key, DeviceKey))]


def _depths(nodes: Iterable[_T], parent: Callable[[_T], _T | None]) -> dict[_T, int]:
    """Return the depth of each node, 0 for a root; a cycle ends at its first node."""
    # Each node is visited once: a chain is walked up to a node of known depth and numbered on the
    # way back. To walk up from each node separately would be quadratic.
    depths: dict[_T, int] = {}
    for start in nodes:
        chain: dict[_T, None] = {}
        at: _T | None = start
        while at is not None and at not in depths and at not in chain:
            chain[at] = None
            at = parent(at)
        depth = -1 if at is None else depths.get(at, -1)
        for member in reversed(chain):
            depth += 1
            depths[member] = depth
    return depths


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

    The keys of ``devices`` and ``tombstones`` are device addresses.
    """

    devices: Mapping[str, Tombstone]
    deployables: Mapping[DeployableKey, DeployableTombstone]
    tombstones: Mapping[str, Tombstone]


def plan_restore(
    stored: Mapping[str, Tombstone],
    removed: Mapping[str, Tombstone],
    added: Collection[DeployableKey],
    present: Collection[str],
) -> RestorePlan:
    """Return the values to restore and the tombstones to keep, for one host.

    ``stored`` are the existing tombstones. ``removed`` are the tombstones that this report adds:
    one for each device that is removed or loses deployables, with the removed deployables.
    ``added`` are the new deployables, and ``present`` the addresses of the devices after the
    report. A deployable that moves to another device keeps its values.
    """
    tombstones = dict(stored)
    for device, tombstone in removed.items():
        deployables = dict(tombstone.deployables)
        if device in tombstones:
            deployables = {**tombstones[device].deployables, **deployables}
        tombstones[device] = replace(tombstone, deployables=deployables)
    # By address alone: a host has one deployable of an address, as the name of a provider is
    # unique.
    removed_from = {
        address: device
        for device, tombstone in removed.items()
        for address in tombstone.deployables
    }
    restored: dict[DeployableKey, DeployableTombstone] = {}
    for key in sorted(added):
        device, address = key
        # A deployable that this report removes is newer than one with a stored tombstone.
        source = removed_from.get(address, device)
        deployables = dict(tombstones[source].deployables) if source in tombstones else {}
        if address not in deployables:
            continue
        restored[key] = deployables.pop(address)
        tombstones[source] = replace(tombstones[source], deployables=deployables)
        # The device has an older tombstone of the same deployable: it must not be restored later.
        if source != device and device in tombstones:
            others = dict(tombstones[device].deployables)
            others.pop(address, None)
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
