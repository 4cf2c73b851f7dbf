# SPDX-License-Identifier: Apache-2.0
"""Sources of device sets: their names in the configuration, and the devices of their members."""

import threading
from collections.abc import Callable, Collection, Sequence

from cyborg.agent.backends.inventory import BackendRegistry
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Device
from cyborg.drivers.device_sets.driver import DeviceSetDriver


def check_members(sources: Sequence[DeviceSetDriver], backends: Collection[str]) -> None:
    """Raise Misconfigured unless the members of each source are among these backends.

    The backends of a fabric are members of no other source.
    """
    names = {source.backend for source in sources}
    for source in sources:
        for member in sorted(source.member_backends):
            if member in names or member not in backends:
                expected = "backends that the section [agent] enables and that are no device sets"
                raise source.misconfigured("members", member, expected)
        for other in sources:
            shared = sorted(source.member_backends & other.member_backends)
            if source.is_fabric and shared and other is not source:
                expected = (
                    f"backends of no other source than the fabric {source.backend}: its GPUs have "
                    "NVLink only as members of a partition"
                )
                raise other.misconfigured("members", shared[0], expected)


class MemberDevices:
    """The devices of the backends that are members of sources. Thread-safe."""

    def __init__(self, registry: Callable[[], BackendRegistry]) -> None:
        """``registry`` returns the backends of the host."""
        self._registry = registry
        self._lock = threading.Lock()
        self._devices: dict[str, tuple[Device, ...] | None] = {}  # at the last refresh

    def read(self, name: str) -> Sequence[Device]:
        """Return the devices of a backend after its last discovery.

        Raise DriverFailed, with the reason, before its first discovery and without the backend.
        """
        backend = self._registry().get(name)
        if backend is None:
            raise DriverFailed(
                f"this host has no backend {name}, whose devices are members: add it again, or "
                "change the option members"
            )
        snapshot = backend.snapshot
        if not snapshot.has_discovered:
            error = f": {snapshot.state.error}" if snapshot.state.error else ""
            raise DriverFailed(f"waits for the first discovery of backend {name}{error}")
        return snapshot.devices

    def refresh(self) -> None:
        """Rediscover each source whose members have other devices than at the last refresh."""
        registry = self._registry()
        devices = {
            backend.name: backend.snapshot.devices if backend.snapshot.has_discovered else None
            for backend in registry
        }
        with self._lock:
            previous, self._devices = self._devices, devices
        changed = {
            name
            for name in previous.keys() | devices.keys()
            if previous.get(name) != devices.get(name)
        }
        for backend in registry:
            if changed & backend.snapshot.members:
                backend.rediscover()
