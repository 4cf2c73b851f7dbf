# SPDX-License-Identifier: Apache-2.0
"""Sources of device sets: their names in the configuration, and the devices of their members."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from cyborg.agent.backends.backend import Backend
from cyborg.agent.backends.inventory import BackendRegistry
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Device, Health
from cyborg.core.inventory.device_set import Activation
from cyborg.core.inventory.report import BackendStatus
from cyborg.drivers.device_sets.driver import DeviceSetDriver


def check_members(sources: Sequence[DeviceSetDriver], backends: Collection[str]) -> None:
    """Raise Misconfigured unless the members of each source are among these backends.

    The backends of a fabric are members of no other source. Sources with a common backend have one
    group: a set of one keeps the sets of the other from being offered.
    """
    source_names = {source.backend for source in sources}
    for source in sources:
        for member in sorted(source.member_backends):
            if member in source_names or member not in backends:
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
            if shared and source.source.group != other.source.group:
                group = source.source.group
                expected = f"{group}, the group of" if group else "no group, as"
                expected += f" {source.backend}, which has the backend {shared[0]} too"
                raise other.misconfigured("group", other.source.group, expected)


class MemberDevices:
    """The devices of the backends that are members of sources. Thread-safe."""

    def __init__(self, registry: Callable[[], BackendRegistry]) -> None:
        """``registry`` returns the backends of the host."""
        self._registry = registry
        self._lock = threading.Lock()
        self._inputs: dict[str, dict[str, object]] = {}  # of sources at their last discovery

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
        """Rediscover each source whose members have changed since its last discovery.

        A source whose member has no result of a first discovery yet waits for it.
        """
        registry = self._registry()
        for source in [backend for backend in registry if backend.snapshot.members]:
            members = {name: _input(registry.get(name)) for name in source.snapshot.members}
            with self._lock:
                is_same = self._inputs.get(source.name) == members
                if not is_same and _WAITS not in members.values():
                    self._inputs[source.name] = members
                    source.rediscover()


# Input of a source from a backend that is doing its first discovery.
_WAITS = "discovering"


def _input(backend: Backend | None) -> object:
    """Return what a source gets from a backend: devices, the text of an error, or None."""
    if backend is None:
        return None
    snapshot = backend.snapshot
    if snapshot.has_discovered:
        return snapshot.devices
    is_waiting = snapshot.state.status is BackendStatus.DISCOVERING
    return _WAITS if is_waiting else f"error: {snapshot.state.error}"


def read_activations(backend: Backend) -> Mapping[str, Activation]:
    """Return whether the partitions of a backend are active, by the address of the deployable.

    Return nothing for a backend without partitions, nor for one whose fabric is known to fail: each
    request to it could take as long as its timeout.
    """
    driver = backend.driver
    # A fabric that fails makes its partitions unhealthy.
    fabric_fails = any(d.health is Health.UNHEALTHY for d in backend.snapshot.devices)
    if not isinstance(driver, DeviceSetDriver) or fabric_fails:
        return {}
    return driver.read_activations()
