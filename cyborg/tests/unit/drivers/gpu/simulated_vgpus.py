# SPDX-License-Identifier: Apache-2.0
"""The gpu driver on the simulated host with vGPUs of ``cyborg.testing.vgpu_host``."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.inventory.device import Device
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Memory, VolatileMemory
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.privileged import gpu, mig, vgpu
from cyborg.testing.vgpu_host import SimulatedVgpuHost, VgpuType

CARD = "0000:41:00.0"
SMALL, LARGE = VgpuType(1414, "NVIDIA H200X-35C", 35), VgpuType(1420, "NVIDIA H200X-70C", 70)
WHOLE = VgpuType(1428, "NVIDIA H200X-141C", 141)
TYPES = (SMALL, LARGE, WHOLE)


def make_host(folder: Path) -> SimulatedVgpuHost:
    """Return a host with one card, whose SR-IOV is enabled."""
    host = SimulatedVgpuHost(folder)
    host.add_card(CARD, TYPES, framebuffer=141, numvfs=8)
    host.manage_sriov(CARD, enable=True)
    return host


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedVgpuHost:
    """Return a host with one card without SR-IOV, on which the privileged functions run."""
    found = make_host(tmp_path)
    found.redirect(monkeypatch.setattr)
    found.manage_sriov(CARD, enable=False)
    return found


def make_access(host: SimulatedVgpuHost, *, nvml: bool = True) -> HostAccess:
    """Return the access to a host by the privileged functions in this process."""
    access = replace(
        HostAccess.of(host.root),
        create_vgpu=vgpu.create,
        remove_vgpu=vgpu.remove,
        set_sriov=vgpu.set_sriov,
        set_heterogeneous=vgpu.set_heterogeneous,
        set_mig_mode=mig.set_mode,
        set_instances=gpu.set_instances,
    )
    if not nvml:
        return access
    return replace(access, nvml=host.read_facts, mig_mode=host.read_mig_mode)


def make_driver(
    host: SimulatedVgpuHost,
    *rules: str,
    nvml: bool = True,
    memory: Memory | None = None,
    **options: Any,
) -> GpuDriver:
    """Return a driver with rules of ``vgpu_types``."""
    values: Mapping[str, Any] = {"vgpu_types": rules, **options}
    driver = GpuDriver("gpus", values, host.root, make_access(host, nvml=nvml))
    driver.host = "compute-1"
    if memory is not None:
        driver.memory = memory
    return driver


class AgentEnds(BaseException):
    """The agent is killed."""


class Life:
    """An agent that is killed after a number of effects; then nothing has an effect."""

    def __init__(self, effects: int) -> None:
        self.left = effects

    def limit(self, effect: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that has the effect while the agent runs."""

        def run(*arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise AgentEnds
            return effect(*arguments)

        return run


CHANGES = (
    "set_mig_mode",
    "set_sriov",
    "set_heterogeneous",
    "set_instances",
    "create_vgpu",
    "remove_vgpu",
)


def make_killed_driver(
    host: SimulatedVgpuHost, life: Life, memory: Memory, **options: Any
) -> GpuDriver:
    """Return a driver whose changes of the host and of its memory are those of a life."""
    access = make_access(host)
    limited: dict[str, Any] = {name: life.limit(getattr(access, name)) for name in CHANGES}
    driver = GpuDriver("gpus", options, host.root, replace(access, **limited))
    put = life.limit(memory.put)

    class LimitedMemory(VolatileMemory):
        def get(self, key: str) -> str | None:
            return memory.get(key)

        def put(self, key: str, text: str | None) -> bool:
            return bool(put(key, text))

    driver.memory = LimitedMemory()
    return driver


def discover(driver: GpuDriver, address: str = CARD) -> Device:
    """Return the device of a card."""
    return next(device for device in driver.discover() if device.address == address)


def offered(driver: GpuDriver) -> dict[str, list[str]]:
    """Return the addresses of the handles of a card by deployable."""
    return {d.address: [h.address for h in d.handles] for d in discover(driver).deployables}


def item(handle: str, type_: str = "H200X-70C") -> WorkItem:
    """Return the work item of a virtual function."""
    return WorkItem("gpus", CARD, f"{CARD}-{type_}", handle)


class SimulatedVgpuDriver(GpuDriver):
    """The gpu driver with the privileged functions and NVML of the simulated host ``kernel``."""

    kernel: SimulatedVgpuHost

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        """Create the driver."""
        super().__init__(backend, options, sysfs_root, make_access(self.kernel))
