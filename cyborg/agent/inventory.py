# SPDX-License-Identifier: Apache-2.0
"""What all backends of a host have together, as one report."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cyborg.agent.backend import MAX_ERROR, View
from cyborg.core import wire
from cyborg.core.catalogue import Entry
from cyborg.core.device import Device, HandleType
from cyborg.core.identity import Identity
from cyborg.core.report import BackendState, BackendStatus


@dataclass(frozen=True, slots=True)
class Inventory:
    """The host's backends and devices, by which names it is known, which drivers are installed.

    ``digest`` is None while no backend has anything to say.
    """

    states: tuple[BackendState, ...]
    devices: tuple[Device, ...]
    digest: str | None
    identity: Identity
    drivers: Sequence[Entry] | None = None


def collect(
    views: Sequence[View],
    identity: Identity = wire.NOBODY,
    drivers: Sequence[Entry] | None = None,
) -> Inventory:
    """Put the views together, in the order in which the backends are configured.

    Of two that see the same device, parts of the same address, or offer the same PCI function, the
    first has it; the other's state says so.
    """
    owners: dict[str, str] = {}
    parts: dict[str, str] = {}
    devices: list[Device] = []
    states: list[BackendState] = []
    for view in views:
        name = view.state.name
        lost: list[str] = []
        for device in view.devices:
            claimed = _claimed(device)
            held = next((parts[one] for one in claimed if one in parts), None)
            first = owners.get(device.address, held)
            if first is not None:
                lost.append(f"{device.address} is left out: backend {first} has it already")
                continue
            owners[device.address] = name
            parts.update(dict.fromkeys(claimed, name))
            devices.append(device)
        error = "; ".join([*([view.state.error] if view.state.error else []), *lost])
        states.append(replace(view.state, error=error[:MAX_ERROR] or None))
    silent = bool(states) and all(s.status is BackendStatus.DISCOVERING for s in states)
    digest = None if silent else wire.digest(devices, states, identity, drivers)
    return Inventory(tuple(states), tuple(devices), digest, identity, drivers)


def _claimed(device: Device) -> list[str]:
    """Return what no other backend can have, too: a function given away twice would be two's."""
    return [
        *(part.address for part in device.deployables),
        *(
            handle.address
            for part in device.deployables
            for handle in part.handles
            if handle.type is HandleType.PCI
        ),
    ]
