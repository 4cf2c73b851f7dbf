# SPDX-License-Identifier: Apache-2.0
"""The devices of all backends of a host, merged into one inventory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cyborg.agent.backends.backend import MAX_ERROR, BackendSnapshot
from cyborg.core.drivers.registry import DriverEntry
from cyborg.core.hosts.identity import NO_IDENTITY, Identity
from cyborg.core.inventory import report
from cyborg.core.inventory.device import Device, HandleType
from cyborg.core.inventory.report import BackendState, BackendStatus


@dataclass(frozen=True, slots=True)
class Inventory:
    """Backends, devices, identity and installed drivers of a host.

    ``digest`` is None until the first backend has finished a discovery.
    """

    states: tuple[BackendState, ...]
    devices: tuple[Device, ...]
    digest: str | None
    identity: Identity
    drivers: Sequence[DriverEntry] | None = None


def collect(
    snapshots: Sequence[BackendSnapshot],
    identity: Identity = NO_IDENTITY,
    drivers: Sequence[DriverEntry] | None = None,
) -> Inventory:
    """Merge the snapshots, in the order of the backends.

    If two backends find the same device, deployable address or PCI function,
    the first backend gets the device and the state of the other has an error.
    """
    owners: dict[str, str] = {}
    address_owners: dict[str, str] = {}
    devices: list[Device] = []
    states: list[BackendState] = []
    for snapshot in snapshots:
        name = snapshot.state.name
        ignored: list[str] = []
        for device in snapshot.devices:
            addresses = _exclusive_addresses(device)
            conflict = next((address_owners[a] for a in addresses if a in address_owners), None)
            first = owners.get(device.address, conflict)
            if first is not None:
                ignored.append(f"{device.address} is ignored: backend {first} already reports it")
                continue
            owners[device.address] = name
            address_owners.update(dict.fromkeys(addresses, name))
            devices.append(device)
        error = "; ".join([*([snapshot.state.error] if snapshot.state.error else []), *ignored])
        states.append(replace(snapshot.state, error=error[:MAX_ERROR] or None))
    discovering = bool(states) and all(s.status is BackendStatus.DISCOVERING for s in states)
    digest = None if discovering else report.digest(devices, states, identity, drivers)
    return Inventory(tuple(states), tuple(devices), digest, identity, drivers)


def _exclusive_addresses(device: Device) -> list[str]:
    """Return the addresses of the deployables and PCI handles of a device.

    Only one backend may report each of them, so that none is allocated twice.
    """
    return [
        *(deployable.address for deployable in device.deployables),
        *(
            handle.address
            for deployable in device.deployables
            for handle in deployable.handles
            if handle.type is HandleType.PCI
        ),
    ]
