# SPDX-License-Identifier: Apache-2.0
"""Partitions of a fabric as device sets, and their activation for guests.

A partition is mapped to handles by the module ids of its GPUs only: Fabric Manager does not show
the PCI addresses of the GPUs of newer systems. The handles of each partition are stored, because a
restarted agent may have to deactivate a partition before its first discovery.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from cyborg.core.codec import Serializable
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.activations import PartitionUse
from cyborg.core.inventory.device_set import SetKind, SetMember
from cyborg.drivers.base import Memory, load_record
from cyborg.drivers.device_sets.fabric import Fabric, FabricState, Partition
from cyborg.drivers.device_sets.grouping import (
    Group,
    Unit,
    find_layout_obstacle,
    only_units,
    speed_facts,
    speed_traits,
)
from cyborg.drivers.gpu.fabric.mode import FUNCTIONS, WHOLE
from cyborg.drivers.gpu.fabric.partitions import find_foreign_obstacles, find_unused_obstacles
from cyborg.drivers.host_use import domains, processes
from cyborg.drivers.sysfs import PCI_DEVICES, Sysfs


@dataclass(frozen=True, slots=True)
class KnownMembers(Serializable):
    """The members of each partition in the order of its GPUs, by the id of the partition.

    They are those of the last discovery in which all GPUs of the partition had a handle.
    """

    members: Mapping[str, tuple[SetMember, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class PartitionTable:
    """The partitions of one source, and their activation.

    ``key`` is the key of the known members in ``memory``.
    """

    fabric: Fabric
    memory: Memory
    key: str

    def read(self) -> FabricState:
        """Return the state of the fabric.

        Raise DriverFailed for a fabric with a problem whose partitions were never known: without
        sets its GPUs would be offered alone.
        """
        state = self.fabric.read()
        if state.problem is not None and not state.partitions:
            raise DriverFailed(state.problem)
        return state

    def group(
        self,
        state: FabricState,
        units: Iterable[Unit],
        *,
        unused: Mapping[int, PartitionUse | None] = MappingProxyType({}),
    ) -> list[Group]:
        """Return a group for each partition whose GPUs all have a unit; store the table.

        ``unused`` has the active partitions that no request has and that cannot be deactivated now,
        by id. Raise DriverFailed if two GPUs have the same module id.
        """
        by_module: dict[int, Unit] = {}
        for address, unit in sorted(only_units(units).items()):
            if unit.module is None:
                continue
            if (other := by_module.setdefault(unit.module, unit)) is not unit:
                raise DriverFailed(
                    f"{other.device.address} and {address} have the module id {unit.module}: the "
                    "GPUs of a partition cannot be told apart; update the GPU driver of the host"
                )
        groups: list[Group] = []
        # A partition without a group now keeps its stored members: it may have to be deactivated.
        known_members = dict(self._load().members)
        # A set shows one reason: a fault of the fabric before the partition of another program.
        obstacles = {
            **find_unused_obstacles(state, unused),
            **find_foreign_obstacles(state),
            **state.obstacles,
        }
        for partition in sorted(state.partitions, key=lambda p: p.id):
            if all(module in by_module for module in partition.modules):
                gpus = tuple(by_module[module] for module in partition.modules)
                known_members[str(partition.id)] = tuple(gpu.member for gpu in gpus)
                needed = (
                    FUNCTIONS if _virtual_functions(known_members[str(partition.id)]) else WHOLE
                )
                # The mode first: nothing else helps before it is correct.
                obstacle = state.mode_obstacles.get(needed) or obstacles.get(partition.id)
                obstacle = obstacle or find_layout_obstacle(gpus, uses_links=True)
                groups.append(_group(partition, gpus, obstacle))
        self.memory.put(self.key, json.dumps(KnownMembers(known_members).to_dict()))
        return groups

    def activate(self, number: int) -> None:
        """Activate a partition with its members. Raise DriverFailed."""
        members = self._members(number)
        if not members:
            raise DriverFailed(
                f"partition {number} has no known members: rediscover the devices of the host"
            )
        self.fabric.activate(number, _virtual_functions(members))

    def deactivate(self, number: int, sysfs_root: Path, read_domains: domains.ReadDomains) -> None:
        """Deactivate a partition. Raise DriverFailed if a guest has one of its members.

        ``read_domains`` returns the functions that domains of libvirt have.
        """
        members = self._members(number)
        if not members:
            # Whether a guest has one of its GPUs cannot be checked: only one that is certainly
            # inactive needs no work.
            state = self.fabric.read()
            active = [partition.id for partition in state.partitions if partition.is_active]
            if state.problem is None and number not in active:
                return
            raise DriverFailed(
                f"partition {number} is not deactivated: {state.problem or 'its GPUs are unknown'}"
            )
        users = find_guests(sysfs_root, read_domains, [member.handle for member in members])
        if users:
            address, reason = min(users.items())
            raise DriverFailed(
                f"partition {number} is not deactivated, a guest may have {address}: {reason}; "
                "stop the guest first"
            )
        self.fabric.deactivate(number)

    def _members(self, number: int) -> tuple[SetMember, ...]:
        return self._load().members.get(str(number), ())

    def _load(self) -> KnownMembers:
        return load_record(KnownMembers, self.memory.get(self.key)) or KnownMembers()


def _virtual_functions(members: Sequence[SetMember]) -> tuple[str, ...]:
    """Return the handles of members that are virtual functions; nothing for whole GPUs."""
    # The handle of a whole function has the address of its device.
    if all(member.handle == member.device for member in members):
        return ()
    return tuple(member.handle for member in members)


def _group(partition: Partition, units: tuple[Unit, ...], obstacle: str | None) -> Group:
    """Return the group of a partition; attributes that are unknown are left out."""
    facts = {
        "partition": str(partition.id),
        "modules": ",".join(map(str, partition.modules)),
        "nvlinks": str(partition.links or ""),
        "max_nvlinks": str(partition.max_links or ""),
        **speed_facts(partition.line_rate_mbps),
    }
    return Group(
        str(partition.id),
        SetKind.FABRIC,
        units,
        obstacle,
        attributes={key: value for key, value in facts.items() if value},
        traits=speed_traits(partition.line_rate_mbps),
    )


def find_guests(
    sysfs_root: Path, read_domains: domains.ReadDomains, addresses: Iterable[str]
) -> dict[str, str]:
    """Return the functions that a guest may have now: a reason by address.

    A guest has a function if a domain of libvirt has it without an accelerator request, or if a
    process has its VFIO node open (``vfio_device_devnode`` of ``drivers/vfio/device_cdev.c`` of
    Linux names the node of a device, ``vfio_devnode`` of ``group.c`` that of an IOMMU group).
    """
    sysfs = Sysfs(sysfs_root)
    functions = [f for address in addresses if (f := sysfs.pci_function(address)) is not None]
    guests = domains.find_used(sysfs_root, partial(read_domains, fresh=True), functions)
    facts = processes.read(sysfs_root)
    for function in functions:
        folder = PCI_DEVICES / function.address
        names = [f"devices/{name}" for name in sysfs.list_names(folder / "vfio-dev")]
        names += [function.iommu_group] if function.iommu_group is not None else []
        reasons = [
            f"the process {program} has {node} open"
            for node in (f"/dev/vfio/{name}" for name in names)
            for program in facts.programs.get(node, ())
        ]
        # Where the processes could not be read, any of them may have the function.
        reasons += [facts.error] if facts.error is not None else []
        if reasons:
            guests.setdefault(function.address, reasons[0])
    return guests
