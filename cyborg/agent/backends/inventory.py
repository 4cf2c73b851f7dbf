# SPDX-License-Identifier: Apache-2.0
"""The backends of this host, and the devices of all of them, merged into one inventory.

The backends may change while other threads read them.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

from cyborg.agent.backends.backend import MAX_ERROR, Backend, BackendSnapshot
from cyborg.core.drivers.registry import DriverEntry
from cyborg.core.hosts import NO_IDENTITY, Identity
from cyborg.core.inventory import report
from cyborg.core.inventory.device import FUNCTION_TYPES, Deployable, Device
from cyborg.core.inventory.device_set import SetMember
from cyborg.core.inventory.report import BackendState, BackendStatus


class BackendRegistry(Sequence[Backend]):
    """Ordered backends. Each change replaces the whole tuple, so an iteration is consistent.

    If two backends find the same device, the first one owns it. So the order must not depend on
    when a backend was added: the backends named in ``first`` come first, then all others by name,
    then the backends named in ``last``. ``first`` and ``last`` are ordered.
    """

    def __init__(self, first: Sequence[str] = (), last: Sequence[str] = ()) -> None:
        self._rank_of_others = len(first)
        last_ranks = {name: number for number, name in enumerate(last, len(first) + 1)}
        self._ranks = last_ranks | {name: number for number, name in enumerate(first)}
        self._lock = threading.Lock()
        self._current: tuple[Backend, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Backend: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Backend]: ...

    def __getitem__(self, index: int | slice) -> Backend | Sequence[Backend]:
        return self._current[index]

    def __len__(self) -> int:
        return len(self._current)

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._current)

    def get(self, name: str) -> Backend | None:
        """Return the backend of this name, or None."""
        return next((backend for backend in self if backend.name == name), None)

    def replace(self, backend: Backend) -> Backend | None:
        """Add a backend; return the backend of the same name that it replaces, or None."""
        with self._lock:
            old = self.get(backend.name)
            others = [other for other in self._current if other is not old]
            # A new tuple, so that a reader needs no lock and never sees half a change.
            self._current = tuple(sorted([*others, backend], key=self._rank))
        return old

    def remove(self, name: str) -> Backend | None:
        """Remove a backend and return it, or None if there is none."""
        with self._lock:
            old = self.get(name)
            self._current = tuple(other for other in self._current if other is not old)
        return old

    def _rank(self, backend: Backend) -> tuple[int, str]:
        return self._ranks.get(backend.name, self._rank_of_others), backend.name


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

    A member of device sets must never be offered alone. So a backend has no devices, and counts as
    discovering, before the first discovery of a source whose member it is; after that it has no
    device that the source has not grouped yet.
    """
    owners = _DeviceOwners()
    devices: list[Device] = []
    states: list[BackendState] = []
    for snapshot in snapshots:
        sources = [source for source in snapshots if snapshot.state.name in source.members]
        errors = [snapshot.state.error] if snapshot.state.error else []
        for device in snapshot.devices:
            if (owner := owners.claim(device, snapshot.state.name)) is not None:
                errors.append(f"{device.address} is ignored: backend {owner} already reports it")
            elif all(device.address in source.grouped.devices for source in sources):
                devices.append(_keep_grouped(device, sources))
        state = replace(snapshot.state, error="; ".join(errors)[:MAX_ERROR] or None)
        pending_sources = [s.state.name for s in sources if not s.has_discovered]
        if pending_sources and state.status is BackendStatus.READY:
            # The conductor keeps the devices of a backend that is not READY.
            names = ", ".join(pending_sources)
            reason = state.error or f"waits for the first discovery of {names}"
            state = replace(state, status=BackendStatus.DISCOVERING, error=reason[:MAX_ERROR])
        states.append(state)
    discovering = bool(states) and all(s.status is BackendStatus.DISCOVERING for s in states)
    # Without a digest no report is sent: an empty one would delete the devices of
    # the host after each restart of the agent.
    digest = None if discovering else report.digest(devices, states, identity, drivers)
    return Inventory(tuple(states), tuple(devices), digest, identity, drivers)


class _DeviceOwners:
    """The backends that own the devices found so far, their deployables and PCI functions."""

    def __init__(self) -> None:
        self._device_owners: dict[str, str] = {}  # backends by address
        self._part_owners: dict[str, str] = {}  # the same of deployables and PCI functions

    def claim(self, device: Device, backend: str) -> str | None:
        """Make a backend the owner of a device; return the other owner instead if it has one."""
        parts = _exclusive_addresses(device)
        if device.address in self._device_owners:
            return self._device_owners[device.address]
        # Two drivers may divide one card into different devices with the same PCI functions or
        # deployables.
        for part in parts:
            if part in self._part_owners:
                return self._part_owners[part]
        self._device_owners[device.address] = backend
        self._part_owners.update(dict.fromkeys(parts, backend))
        return None


def _keep_grouped(device: Device, sources: Sequence[BackendSnapshot]) -> Device:
    """Return a member device without the handles that a source of it has not grouped yet.

    A handle can be new, such as after a change of the layout: it would be offered alone.
    """
    # A source whose handles are None has grouped each handle of its devices.
    grouped = [s.grouped.handles for s in sources if s.grouped.handles is not None]
    if not grouped:
        return device

    def keep(deployable: Deployable) -> Deployable:
        kept = tuple(
            handle
            for handle in deployable.handles
            if all(
                SetMember(device.address, deployable.address, handle.address) in handles
                for handles in grouped
            )
        )
        return replace(deployable, handles=kept)

    return replace(device, deployables=tuple(map(keep, device.deployables)))


def _exclusive_addresses(device: Device) -> list[str]:
    """Return the addresses of the deployables and PCI functions of a device.

    Only one backend may report each of them, so that none is allocated twice.
    """
    return [
        *(deployable.address for deployable in device.deployables),
        *(
            handle.address
            for deployable in device.deployables
            for handle in deployable.handles
            if handle.type in FUNCTION_TYPES
        ),
    ]
