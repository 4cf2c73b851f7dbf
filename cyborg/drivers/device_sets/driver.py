# SPDX-License-Identifier: Apache-2.0
"""Source of device sets: it discovers which handles of other backends are allocated together.

A source is one device, and each set is one of its deployables. The members stay devices of their
own backends, which prepare and clean them. Only a fabric needs work of the source: it activates the
partition of a set before a guest starts, and deactivates it after the guest has ended.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, Self

from cyborg.core.drivers.registry import Support
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.activations import PartitionUse
from cyborg.core.inventory.device import Ability, Deployable, Device, Health
from cyborg.core.inventory.device_set import Activation, DeviceSet, SetKind, SetMember
from cyborg.core.inventory.device_state import Measurement
from cyborg.core.jobs.job import WorkItem
from cyborg.core.log import get_logger
from cyborg.core.naming import make_custom_name
from cyborg.drivers.base import Driver
from cyborg.drivers.device_sets import grouping
from cyborg.drivers.device_sets.fabric import Fabric, FabricState
from cyborg.drivers.device_sets.grouping import Group, Unit
from cyborg.drivers.device_sets.models import ModelTable
from cyborg.drivers.device_sets.options import OPTIONS, parse
from cyborg.drivers.device_sets.partitions import PartitionTable
from cyborg.drivers.gpu.fabric.options import OPTIONS as FABRIC_OPTIONS
from cyborg.drivers.gpu.fabric.options import open_fabric
from cyborg.drivers.gpu.mig import is_shown_enabled
from cyborg.drivers.pci.topology import MODULE_ID

LOG = get_logger(__name__)

# Sets of one source.
MAX_SETS = 64

# Return the devices of a backend of this host. Raise DriverFailed, with the reason, before its
# first discovery and without the backend.
ReadDevices = Callable[[str], Sequence[Device]]


def read_nothing_yet(backend: str) -> Sequence[Device]:
    """Raise DriverFailed, as before the first discovery of any backend."""
    raise DriverFailed(f"waits for the first discovery of backend {backend}")


@dataclass(frozen=True, slots=True)
class Grouped:
    """Devices that a source has read, by address, and their handles; None: any handle."""

    devices: frozenset[str] = frozenset()
    handles: frozenset[SetMember] | None = None

    @classmethod
    def of(cls, devices: Iterable[Device]) -> Self:
        """Return these devices with their handles."""
        found = list(devices)
        return cls(
            frozenset(device.address for device in found),
            frozenset(
                SetMember(device.address, deployable.address, handle.address)
                for device in found
                for deployable in device.deployables
                for handle in deployable.handles
            ),
        )


NOTHING_GROUPED = Grouped()


class DeviceSetDriver(Driver):
    """Driver of the sections that ``[agent] device_sets`` names; it is no entry point."""

    name = "device_sets"
    version = "1.0"
    SUPPORT_LEVEL = Support.SUPPORTED
    OPTIONS = (*OPTIONS, *FABRIC_OPTIONS)

    # Devices of other backends; the agent sets this attribute.
    read_devices: ReadDevices = staticmethod(read_nothing_yet)
    # Request a discovery; the backend sets this attribute.
    rediscover: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        super().__init__(backend, options, sysfs_root)
        self.source = parse(self)
        # Of the kind fabric only; the agent removes it where the host is replayed.
        self.fabric: Fabric | None = open_fabric(self) if self.is_fabric else None
        self._unused: dict[str, PartitionUse | None] = {}
        self._remarks: tuple[str, ...] = ()
        # Devices of the members at the last successful discovery, by address.
        self.grouped = NOTHING_GROUPED

    @property
    def member_backends(self) -> frozenset[str]:
        """Return the backends whose devices are the members."""
        return frozenset(self.source.counts)

    @property
    def is_fabric(self) -> bool:
        """Return whether the sets are partitions of a fabric."""
        return self.source.kind is SetKind.FABRIC

    @property
    def abilities(self) -> frozenset[Ability]:
        """Return PREPARES and MEASURES for a fabric, else nothing."""
        return frozenset({Ability.PREPARES, Ability.MEASURES}) if self.is_fabric else frozenset()

    @property
    def remarks(self) -> Sequence[str]:
        """Return a warning if the last discovery found no set."""
        return self._remarks

    def discover(self) -> Sequence[Device]:
        """Return the device of the source with a deployable for each set.

        A device that is in no set of the configured sizes is a set of its own, with an obstacle.
        Return nothing if no backend has a device that can be a member.
        """
        devices = {name: self._read_members(name) for name in self.source.counts}
        units = {name: self._list_units(name, found) for name, found in devices.items()}
        state = self._partitions.read() if self.is_fabric else FabricState()
        groups = self._group(units, state)
        if len(groups) > MAX_SETS:
            raise DriverFailed(
                f"found {len(groups)} sets, at most {MAX_SETS} are allowed; choose fewer sizes or "
                f"backends in [{self.backend}]"
            )
        self.grouped = Grouped.of(device for found in devices.values() for device in found)
        kind = self.source.kind
        self._remarks = () if groups else (f"no device can be a member of a set of kind {kind}",)
        if self._uses_links and (gpus := _list_gpus_in_mig_mode(devices.values(), groups)):
            self._remarks += (f"{gpus}: in MIG mode, in which no set of kind {kind} has a GPU",)
        return [self._device(groups)] if groups else []

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        """Return that the source is unhealthy while its fabric cannot activate partitions."""
        problem = self._client.read().problem
        health = Health.OK if problem is None else Health.UNHEALTHY
        return {device.address: Measurement(health, problem) for device in devices}

    def answer_fabric(self) -> None:
        """Send the last known active partitions to a Fabric Manager that waits for them.

        Do nothing for a fabric that does not wait, and without a fabric.
        """
        if self.fabric is not None:
            self.fabric.read()

    def prepare(self, item: WorkItem, instance: str | None) -> None:
        """Activate the partition of a set. Raise DriverFailed."""
        number = self._partition_of(item)
        if number is None:
            raise DriverFailed(f"{item.deployable} is no partition of a fabric")
        try:
            self._partitions.activate(number)
        except DriverFailed:
            # The reason may close more sets, such as the mode of the fabric: without a discovery
            # now, each boot would fail until the next one.
            self.rediscover()
            raise
        LOG.info(
            "Partition %d is active for instance %s",
            number,
            instance,
            backend=self.backend,
            device=item.deployable,
        )

    def release(self, item: WorkItem) -> None:
        """Deactivate the partition of a set. Raise DriverFailed while a guest has a member."""
        number = self._partition_of(item) if self.is_fabric else None
        if number is not None:
            self._partitions.deactivate(number, self.sysfs_root, self.read_domains)

    def set_unused(self, uses: Mapping[str, PartitionUse | None]) -> bool:
        """Replace the active partitions that no request has and that cannot be deactivated now.

        The next discovery withholds the sets that overlap them. ``uses`` has the use by the address
        of the deployable, None for an unknown one. Return whether this is a change.
        """
        previous, self._unused = self._unused, dict(uses)
        return self._unused != previous

    def read_activations(self) -> dict[str, Activation]:
        """Return whether each partition is active now, by the address of its deployable.

        Return nothing for sets that are no partitions, and if Fabric Manager does not answer.
        """
        state = FabricState() if self.fabric is None else self.fabric.read()
        if state.problem is not None:
            return {}
        return {f"{self.backend}:{p.id}": state.activation(p) for p in state.partitions}

    @property
    def _client(self) -> Fabric:
        if self.fabric is None:
            raise DriverFailed(
                f"[{self.backend}] kind: this replayed host has no Fabric Manager: its capture was "
                "made without --fabric"
            )
        return self.fabric

    @property
    def _partitions(self) -> PartitionTable:
        return PartitionTable(self._client, self.memory, f"partitions {self.backend}")

    @property
    def _uses_links(self) -> bool:
        return self.source.kind in (SetKind.FABRIC, SetKind.NVLINK) and not self.source.is_mixed

    def _list_units(self, backend: str, devices: Sequence[Device]) -> list[Unit]:
        """Return the units of the devices of a backend; store their models."""
        units = grouping.list_units(devices)
        models = ModelTable(self.memory, f"model {self.backend} {backend}")
        models.store(units)
        hidden = grouping.list_hidden(devices, units, models.make_unit, uses_links=self._uses_links)
        # Of a GPU that is divided, the unit as a whole replaces the units that it has now.
        addresses = {unit.device.address for unit in hidden}
        return [unit for unit in units if unit.device.address not in addresses] + hidden

    def _read_members(self, backend: str) -> list[Device]:
        """Return the devices of a backend, with the configured module ids."""
        modules = self.source.modules
        return [
            replace(d, topology={**d.topology, MODULE_ID: modules[d.address]})
            if d.address in modules
            else d
            for d in self.read_devices(backend)
        ]

    def _partition_of(self, item: WorkItem) -> int | None:
        """Return the partition of a set; None if its deployable is no partition."""
        name = item.deployable.removeprefix(f"{self.backend}:")
        return int(name) if name != item.deployable and name.isdecimal() else None

    def _group(self, units: Mapping[str, Sequence[Unit]], state: FabricState) -> list[Group]:
        """Return the groups of the units, and one with an obstacle for each unit without a group.

        The latter are only units of the first backend if the members are mixed: a server may use a
        network function alone.
        """
        source = self.source
        if source.is_mixed:
            parts = [
                grouping.Part(units[backend], count)
                for backend, count in source.counts.items()
                if count is not None  # none of them is, if the members are mixed
            ]
            groups, ungrouped = grouping.group_mixed(source.kind, parts)
            reason = "no set has it: too few devices of the other backends are near it"
            return _withhold_unread(groups) + grouping.withhold(source.kind, ungrouped, reason)
        candidates = [unit for units_ in units.values() for unit in units_]
        if source.kind is SetKind.FABRIC:
            names = {a.removeprefix(f"{self.backend}:"): use for a, use in self._unused.items()}
            unused = {int(name): use for name, use in names.items() if name.isdecimal()}
            groups = self._partitions.group(state, candidates, unused=unused)
            groups = [group for group in groups if len(group.units) in source.sizes]
            # A GPU with several handles is in no set of a fabric or of links, so it gets no
            # obstacle: its handles stay offered alone.
            candidates = list(grouping.only_units(candidates).values())
        elif source.kind is SetKind.NVLINK:
            # The groups may be very many: with one more than the maximum, ``discover`` fails.
            groups = list(islice(grouping.group_by_links(candidates, source.sizes), MAX_SETS + 1))
            candidates = list(grouping.only_units(candidates).values())
        else:
            groups = grouping.group_by_place(source.kind, candidates, source.sizes)
        return _withhold_unread(groups) + [
            group
            for unit in grouping.without(candidates, groups)
            for group in grouping.withhold(source.kind, [unit], self._explain_no_set(unit))
        ]

    def _explain_no_set(self, unit: Unit) -> str:
        """Return why a unit is in no set."""
        if (unread := grouping.find_unread_obstacle([unit])) is not None:
            return unread
        if self._uses_links and (layout := grouping.find_layout_obstacle([unit], uses_links=True)):
            return layout
        if self.is_fabric and unit.module is None:
            return (
                "its module id is unknown: install the extra nvml and bind the GPU to the kernel "
                "driver nvidia once, or set the option modules"
            )
        sizes = ", ".join(map(str, sorted(self.source.sizes)))
        return f"no set of kind {self.source.kind} and size {sizes} has it"

    def _device(self, groups: Sequence[Group]) -> Device:
        """Return the device of the source, which has a deployable for each group."""
        members = [unit.device for group in groups for unit in group.units]
        vendors, nodes = {d.vendor for d in members}, {d.numa_node for d in members}
        return Device(
            address=self.backend,
            type=members[0].type,
            vendor=vendors.pop() if len(vendors) == 1 else "various",
            model=f"device sets ({self.source.kind})",
            backend=self.backend,
            numa_node=nodes.pop() if len(nodes) == 1 else None,
            deployables=tuple(self._deployable(group) for group in groups),
        )

    def _deployable(self, group: Group) -> Deployable:
        """Return the deployable of a set, with the traits that all its members have."""
        source, size = self.source, len(group.units)
        common = reduce(frozenset.intersection, (u.deployable.traits for u in group.units))
        names = ", ".join(unit.handle.address for unit in group.units)
        return Deployable(
            address=f"{self.backend}:{group.name}",
            resource_class=source.resource_class or group.units[0].deployable.resource_class,
            traits=common
            | group.traits
            | source.traits
            | {make_custom_name(f"SET_{group.kind}"), make_custom_name(f"SET_SIZE_{size}")},
            attributes={"members": names, **group.attributes},
            device_set=DeviceSet(
                kind=group.kind,
                members=tuple(unit.member for unit in group.units),
                mode=source.mode,
                group=source.group,
                wanted=source.wanted,
                obstacle=group.obstacle,
            ),
        )


def _withhold_unread(groups: Iterable[Group]) -> list[Group]:
    """Return groups; one with a GPU that was not read yet has this as its obstacle."""
    return [
        replace(group, obstacle=group.obstacle or grouping.find_unread_obstacle(group.units))
        for group in groups
    ]


def _list_gpus_in_mig_mode(members: Iterable[Sequence[Device]], groups: Iterable[Group]) -> str:
    """Return the addresses of the devices in MIG mode that are in none of the groups, as text."""
    grouped = {unit.device.address for group in groups for unit in group.units}
    addresses = {d.address for devices in members for d in devices if is_shown_enabled(d)}
    return ", ".join(sorted(addresses - grouped))
