# SPDX-License-Identifier: Apache-2.0
"""Why a GPU that is not in use cannot be given to a server as a whole.

libvirt binds a function with ``managed='yes'``, as Nova 34 sets it for each accelerator
(``_guest_add_accel_pci_devices`` of ``nova/virt/libvirt/driver.py``), to vfio-pci
(``virPCIDeviceBindToStub`` of ``src/util/virpci.c``).
"""

from collections.abc import Iterable, Mapping

from cyborg.drivers.host_use import processes
from cyborg.drivers.pci import classes as pci_classes
from cyborg.drivers.sysfs import PciFunction, Sysfs

_DRIVER = "nvidia"
_VENDOR_VFIO = (
    "it has vGPUs without mediated devices (nvidia/current_vgpu_type), which Nova cannot attach: "
    "libvirt would bind it to vfio-pci, and its vGPU would be lost; offer the card as a whole, or "
    "use a release of the vGPU driver with mediated devices"
)
_FOR_VGPUS = (
    "it is a virtual function for vGPUs (driver nvidia), which is no device for a guest: select it "
    "by mdev_types"
)


def find_managers(sysfs: Sysfs, functions: Iterable[PciFunction]) -> Mapping[str, str]:
    """Return the managers that have the node of a GPU open: their names by address."""
    if not any(function.kernel_driver == _DRIVER for function in functions):
        return {}
    reader = processes.ProcessReader(sysfs, processes.read(sysfs.root))
    return {address: ", ".join(names) for address, names in reader.managers_by_function().items()}


def find_obstacle(sysfs: Sysfs, function: PciFunction, managers: Mapping[str, str]) -> str | None:
    """Return why libvirt cannot give a GPU to a server, with a remedy; None if it can.

    ``managers`` is the result of ``find_managers``. NVIDIA documents the attribute
    ``nvidia/current_vgpu_type`` in the "Virtual GPU Software User Guide", for hypervisors with a
    vendor-specific VFIO framework. Its kernel driver does not let go of a GPU whose node a process
    has open (``nv_pci_remove_helper`` in ``nv-pci.c`` of NVIDIA's open kernel modules waits for
    it), as ``nvidia-persistenced`` has with persistence mode.
    """
    if not pci_classes.is_gpu(function):
        return None
    if "current_vgpu_type" in sysfs.list_names(f"bus/pci/devices/{function.address}/nvidia"):
        return _VENDOR_VFIO
    if function.kernel_driver != _DRIVER:
        return None
    if function.physfn is not None:
        return _FOR_VGPUS
    if (names := managers.get(function.address)) is None:
        return None
    return (
        f"{names} has its device node open, so libvirt would wait for ever: stop the program "
        "(nvidia-smi --persistence-mode=0 may be enough), or bind the GPU to a VFIO driver at boot"
    )
