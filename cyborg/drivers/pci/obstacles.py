# SPDX-License-Identifier: Apache-2.0
"""Why a PCI function that is not in use cannot be attached to a server: IOMMU, VFIO, GPU drivers.

Sources: ``iommu_group`` of a PCI function and ``/sys/kernel/iommu_groups``
(``Documentation/ABI/testing/sysfs-kernel-iommu_groups``), ``/sys/bus/pci/drivers``
(``Documentation/ABI/testing/sysfs-bus-pci``), ``/sys/module``
(``Documentation/ABI/testing/sysfs-module``), and in ``/lib/modules`` the indices ``modules.dep``
(modules.dep(5) of kmod) and ``modules.builtin`` (``Documentation/kbuild/kbuild.rst``).

libvirt binds a function with ``managed='yes'``, as Nova 34 sets it for each accelerator
(``_guest_add_accel_pci_devices`` of ``nova/virt/libvirt/driver.py``), to vfio-pci
(``virPCIDeviceBindToStub`` of ``src/util/virpci.c``).
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from cyborg.core.address import is_pci_address
from cyborg.core.inventory import delivery
from cyborg.core.inventory.delivery import FunctionFacts, GroupMember
from cyborg.drivers.host_use import processes
from cyborg.drivers.pci import classes
from cyborg.drivers.sysfs import PciFunction, Sysfs

# Vendor and product ids that vfio-pci refuses: ``vfio_pci_dev_in_denylist`` of the kernel's
# ``drivers/vfio/pci/vfio_pci.c``, whose parameter ``disable_denylist`` switches the list off.
DENYLIST = frozenset(
    (
        *(("8086", product) for product in ("19e2", "19e3")),  # QAT C3xxx and its VFs
        *(("8086", product) for product in ("37c8", "37c9")),  # QAT C62x
        *(("8086", product) for product in ("0435", "0443")),  # QAT DH895xCC
        *(("8086", product) for product in ("0b25", "0cfe")),  # DSA and IAA, since Linux 6.9.1
    )
)

MAX_INDEX_BYTES = 16 * 1024 * 1024  # of modules.dep; that of a distribution has less than one MiB
_DIRECT = "direct"  # a region that must be mapped 1:1, unlike one that is direct-relaxable


class IommuFacts:
    """IOMMU groups of the PCI functions of a host, and whether it has a VFIO driver."""

    def __init__(
        self,
        sysfs: Sysfs,
        functions: Iterable[PciFunction],
        host_root: Path | None = None,
        guests: Collection[str] = (),
    ) -> None:
        """Read the facts of a host; ``functions`` are all its PCI functions.

        ``host_root`` is the root directory of the host, by default the parent directory of sysfs.
        ``guests`` are the addresses of the functions that domains of libvirt have.
        """
        self._sysfs = sysfs
        self._guests = guests
        # By group, for groups that were asked for.
        self._direct_mapped: dict[str, bool] = {}
        self._others: dict[str, tuple[GroupMember, ...]] = {}  # devices that are not PCI functions
        self._groups: dict[str, list[PciFunction]] = {}
        # Without an IOMMU, VFIO makes groups of PCI functions that no hypervisor can use. It gives
        # the same name to groups of mediated devices (vfio_noiommu_group_alloc of
        # drivers/vfio/group.c), which have no PCI function.
        self._made_up = {
            name
            for name in sysfs.list_names("kernel/iommu_groups")
            if sysfs.read_text(f"kernel/iommu_groups/{name}/name") == "vfio-noiommu"
        }
        for function in functions:
            if (group := self._group_of(function)) is not None:
                self._groups.setdefault(group, []).append(function)
        # A group may have no PCI function.
        groups = {*self._groups, *sysfs.list_names("kernel/iommu_groups")}
        self._has_iommu = bool(groups - self._made_up)
        modules = sysfs.list_names("module")
        self._has_vfio = (
            "vfio_pci" in modules
            or any(map(delivery.is_vfio, sysfs.list_names("bus/pci/drivers")))
            or _is_installed(host_root or sysfs.root.parent)
        )
        # A loaded driver without the parameter is older than the list (Linux 5.9).
        parameter = sysfs.read_text("module/vfio_pci/parameters/disable_denylist")
        self._has_denylist = parameter == "N" or (parameter is None and "vfio_pci" not in modules)

    def _group_of(self, function: PciFunction) -> str | None:
        return None if function.iommu_group in self._made_up else function.iommu_group

    def find_obstacle(
        self,
        function: PciFunction,
        host_use: str | None,
        offered: Collection[str],
        used: Collection[str] = (),
    ) -> str | None:
        """Return why a PCI function cannot be attached to an instance; None if it can.

        ``host_use`` describes how the host uses the PCI function, or is None. ``offered`` are the
        addresses of all PCI functions that the backend offers, ``used`` those that the host uses.
        """
        number = self._group_of(function)
        group = self._groups.get(number or "", ())  # its PCI functions; none without a group
        return delivery.find_obstacle(
            FunctionFacts(
                iommu_group=number,
                host_has_iommu=self._has_iommu,
                host_has_vfio=self._has_vfio,
                kernel_driver=function.kernel_driver,
                others=self._other_devices(number)
                + tuple(
                    GroupMember(
                        other.address,
                        other.class_code,
                        other.kernel_driver,
                        same_card=_slot(other.address) == _slot(function.address),
                        offered=other.address in offered,
                        used=other.address in used,
                        guest=other.address in self._guests,
                    )
                    for other in group
                    if other.address != function.address
                ),
                host_use=host_use,
                denied=self._has_denylist and (function.vendor, function.product) in DENYLIST,
                direct_mapped=self._is_direct_mapped(number),
            )
        )

    def _other_devices(self, group: str | None) -> tuple[GroupMember, ...]:
        """Return the devices of an IOMMU group that are not on the PCI bus; read them once."""
        if group is None:
            return ()
        if group not in self._others:
            folder = Path("kernel/iommu_groups") / group / "devices"
            names = [name for name in self._sysfs.list_names(folder) if not is_pci_address(name)]
            self._others[group] = tuple(
                GroupMember(name, "", self._sysfs.read_link(folder / name / "driver"))
                for name in names
            )
        return self._others[group]

    def _is_direct_mapped(self, group: str | None) -> bool:
        """Return whether an IOMMU group has an address range that must be mapped 1:1; read it once.

        Each line of ``reserved_regions`` has a first address, a last address and a type.
        """
        # The kernel does not give a group with such a range to VFIO: ``__iommu_device_set_domain``
        # of ``drivers/iommu/iommu.c``, before Linux 6.6 ``intel_iommu_attach_device`` of
        # ``drivers/iommu/intel/iommu.c``.
        if group is None:
            return False
        if group not in self._direct_mapped:
            text = self._sysfs.read_text(f"kernel/iommu_groups/{group}/reserved_regions") or ""
            self._direct_mapped[group] = any(
                line.split()[2:] == [_DIRECT] for line in text.splitlines()
            )
        return self._direct_mapped[group]


def _slot(address: str) -> str:
    return address.rpartition(".")[0]


def _is_installed(root: Path) -> bool:
    """Return whether the running kernel has vfio-pci built in or as a module; True if unknown."""
    # libvirt loads the module when it attaches the first device: it need not be loaded now.
    release = Sysfs(root).read_text("proc/sys/kernel/osrelease")
    modules = Sysfs(root / "lib/modules" / (release or ""))
    names = ("modules.dep", "modules.builtin") if release else ()
    indices = [modules.read_bytes(name, MAX_INDEX_BYTES) for name in names]
    found = [index for index in indices if index is not None]
    # In a container without /lib/modules nothing is found. A wrong False would make all devices of
    # a working host unavailable.
    return not found or any(b"/vfio-pci.ko" in index for index in found)


_DRIVER = "nvidia"
_VENDOR_VFIO = (
    "it has vGPUs without mediated devices (nvidia/current_vgpu_type), which Nova cannot attach: "
    "libvirt would bind it to vfio-pci, and its vGPU would be lost; select its card by vgpu_types, "
    "with which the agent attaches it"
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
    vendor-specific VFIO framework.
    """
    if not classes.is_gpu(function):
        return None
    if "current_vgpu_type" in sysfs.list_names(f"bus/pci/devices/{function.address}/nvidia"):
        return _VENDOR_VFIO
    if function.kernel_driver != _DRIVER:
        return None
    if function.physfn is not None:
        return _FOR_VGPUS
    # The kernel driver waits with an unbind until no process has the node of the GPU open
    # (``nv_pci_remove_helper`` in ``nv-pci.c`` of NVIDIA's open kernel modules), as
    # ``nvidia-persistenced`` has with persistence mode.
    if (names := managers.get(function.address)) is None:
        return None
    return (
        f"{names} has its device node open, so libvirt would wait for ever: stop the program "
        "(nvidia-smi --persistence-mode=0 may be enough), or bind the GPU to a VFIO driver at boot"
    )
