# SPDX-License-Identifier: Apache-2.0
"""How drivers of PCI functions read and change their host, besides sysfs.

Each change of this host is a privileged function with the same parameters; see
``cyborg.drivers.privileged``.
"""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyborg.core.errors import DriverFailed
from cyborg.drivers.kernel import mdev, vgpu
from cyborg.drivers.kernel.nvme import Method, read_methods
from cyborg.drivers.kernel.nvml import NvmlLibrary, ReadFacts, ReadMigMode
from cyborg.drivers.pci.classes import Lookup, Names, udev_names
from cyborg.drivers.sysfs import LOCAL_ROOT, Sysfs


def _privileged(module: str, name: str) -> Callable[..., Any]:
    """Return a call of a privileged function."""

    def call(*arguments: object) -> Any:
        # Imported at the call: without host work, the agent does not need oslo.privsep.
        from cyborg.drivers import privileged

        function = getattr(importlib.import_module(f"{privileged.__name__}.{module}"), name)
        privileged.call_in_process_as_root()
        return function(*arguments)

    return call


def _refuse(verb: str) -> Callable[..., Any]:
    """Return a call that raises DriverFailed, for devices that are not those of this host."""

    def call(name: str, *_: object) -> Any:
        raise DriverFailed(f"{name} cannot be {verb}: it is not a device of this host")

    return call


@dataclass(frozen=True, slots=True)
class HostAccess:
    """Access to a host.

    ``lookup`` returns the names of a PCI function, ``nvml`` the facts about an NVIDIA GPU,
    ``mig_mode`` only its MIG mode, ``has_nvml`` whether the binding for both is installed, and
    ``read_methods`` the methods that can erase an NVMe controller, by its device node and the
    number of the node. ``kernel_log`` is None if there is
    none to read. ``clock`` is monotonic, in seconds. ``reset`` returns the reset methods of a PCI
    function; None if it has disappeared.
    """

    lookup: Lookup
    kernel_log: Path | None
    nvml: ReadFacts
    mig_mode: ReadMigMode
    has_nvml: Callable[[], bool]
    read_methods: Callable[[Path, str | None], Sequence[Method] | None]
    clock: Callable[[], float]
    reset: Callable[[str], str | None]
    set_count: Callable[[str, int, bool, bool], None]
    set_services: Callable[[str, str], None]
    create_mdev: Callable[[str, str, str], None]
    remove_mdev: Callable[[str, str, str], None]
    create_vgpu: Callable[[str, str, str], None]
    remove_vgpu: Callable[[str], None]
    set_sriov: Callable[[str, bool, str], None]
    set_heterogeneous: Callable[[str, bool], None]
    set_mig_mode: Callable[[str, bool, str], None]
    set_scheduling: Callable[[str, Mapping[str, str]], None]
    set_vram: Callable[[str, int], None]
    set_partition_mode: Callable[[str, str], None]
    set_instances: Callable[[str, Mapping[str, int]], None]
    load_firmware: Callable[[str, str, str, int], None]
    reconfigure: Callable[[str, int, str, int, int], None]
    run_tool: Callable[[str, str, str, int, float], None]
    erase: Callable[[str, float, Sequence[str]], Mapping[str, Any]]

    @classmethod
    def of(cls, sysfs_root: Path) -> "HostAccess":
        """Return the access to the host with this root of sysfs.

        If it is not /sys, the addresses are not those of this host: nothing but sysfs is read, and
        each change raises DriverFailed.
        """
        local = sysfs_root == LOCAL_ROOT
        library = NvmlLibrary()

        def work(module: str, name: str, participle: str) -> Callable[..., Any]:
            """Return a privileged function; for another tree one that refuses its work."""
            return _privileged(module, name) if local else _refuse(participle)

        def remove_absent(parent: str, type_: str, device: str) -> None:
            # A removal of what does not exist succeeds, as on this host.
            if mdev.is_present(sysfs_root, device):
                _refuse("changed")(parent)

        def remove_absent_vgpu(address: str) -> None:
            if vgpu.read(Sysfs(sysfs_root), address) is not None:
                _refuse("changed")(address)

        return cls(
            lookup=udev_names if local else lambda address: Names(),
            # Documentation/ABI/testing/dev-kmsg of Linux.
            kernel_log=Path("/dev/kmsg") if local else None,
            nvml=library.read if local else lambda address: None,
            mig_mode=library.read_mig_mode if local else lambda address: None,
            # What replaces ``nvml`` and ``mig_mode`` for another tree needs no binding.
            has_nvml=library.is_installed if local else lambda: True,
            read_methods=read_methods if local else lambda node, number: None,
            clock=time.monotonic,
            reset=work("pci", "reset", "reset"),
            set_count=work("pci", "set_count", "changed"),
            set_services=work("qat", "set_services", "changed"),
            create_mdev=work("gpu", "create", "changed"),
            remove_mdev=_privileged("gpu", "remove") if local else remove_absent,
            create_vgpu=work("vgpu", "create", "changed"),
            remove_vgpu=_privileged("vgpu", "remove") if local else remove_absent_vgpu,
            set_sriov=work("vgpu", "set_sriov", "changed"),
            set_heterogeneous=work("vgpu", "set_heterogeneous", "changed"),
            set_mig_mode=work("mig", "set_mode", "changed"),
            set_scheduling=work("xe", "set_scheduling", "changed"),
            set_vram=work("xe", "set_vram", "changed"),
            set_partition_mode=work("amdgpu", "set_mode", "changed"),
            set_instances=work("gpu", "set_instances", "partitioned"),
            load_firmware=work("fpga", "load_firmware", "programmed"),
            reconfigure=work("fpga", "reconfigure", "programmed"),
            run_tool=work("fpga", "run_tool", "programmed"),
            erase=work("nvme", "erase", "erased"),
        )
