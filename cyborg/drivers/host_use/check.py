# SPDX-License-Identifier: Apache-2.0
"""Detection of PCI functions that the host uses: disks, NICs, displays, open nodes, processors.

This protects the host against rules that select too much.
"""

import contextlib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import Invalid
from cyborg.core.inventory.delivery import is_vfio
from cyborg.drivers.host_use import networks, processes
from cyborg.drivers.host_use.disks import DiskReader
from cyborg.drivers.host_use.domains import ReadDomains, read_nothing
from cyborg.drivers.host_use.domains import find_used as find_used_by_domains
from cyborg.drivers.kernel.nvml import NVIDIA
from cyborg.drivers.kernel.vgpu import attributes_folder
from cyborg.drivers.sysfs import PCI_DEVICES, PciFunction, Sysfs

_CARD, _CONNECTOR = re.compile(r"card[0-9]+"), re.compile(r"card[0-9]+-.+")
_FRAMEBUFFER = re.compile(r"fb[0-9]+")


def display_functions(sysfs: Sysfs) -> dict[str, str]:
    """Return the PCI functions that are displays of the host: a reason by address.

    A PCI function is a display of the host if it has a framebuffer or an enabled connector, or
    if it is the VGA device of the boot and has a display device of a kernel driver. A compute
    GPU without a screen counts as unused, although its kernel driver creates a DRM device.
    """
    # A PCI function that is bound to VFIO counts as unused: ``vfio_pci_vga_init`` of
    # ``drivers/vfio/pci/vfio_pci_core.c`` removes the framebuffer of the firmware.
    # Sources: ``Documentation/gpu/vgaarbiter.rst`` (the default VGA device),
    # ``drivers/pci/pci-sysfs.c`` (``boot_vga``), ``Documentation/fb/framebuffer.rst``,
    # ``Documentation/admin-guide/sysfs-rules.rst`` (a class device is below its device),
    # ``drivers/gpu/drm/drm_sysfs.c`` (names of cards, ``enabled`` of a connector) and
    # ``drivers/video/fbdev/core/fbsysfs.c`` (names of framebuffers) of the Linux kernel.
    cards = _displays_of(sysfs, "drm", _CARD)
    framebuffers = _displays_of(sysfs, "graphics", _FRAMEBUFFER)
    reasons: dict[str, str] = {}
    for address in cards | framebuffers:
        folder = PCI_DEVICES / address
        driver = sysfs.read_link(folder / "driver")
        if driver is not None and sysfs.read_text(folder / "boot_vga") == "1":
            reasons[address] = f"it is the VGA device of the boot, bound to {driver}"
    for address, name in framebuffers.items():
        reasons.setdefault(address, f"it has the framebuffer {name}")
    for address, connector in _displays_of(sysfs, "drm", _CONNECTOR, enabled=True).items():
        reasons.setdefault(address, f"its display output {connector} is enabled")
    return reasons


def _displays_of(
    sysfs: Sysfs, class_: str, pattern: re.Pattern[str], *, enabled: bool = False
) -> dict[str, str]:
    """Return the PCI functions with a device of a class: the first device name by address.

    With ``enabled`` only enabled devices count. PCI functions that are bound to VFIO are
    omitted.
    """
    first_names: dict[str, str] = {}
    for name in sysfs.list_names(f"class/{class_}"):
        path = f"class/{class_}/{name}"
        if not pattern.fullmatch(name):
            continue
        if enabled and sysfs.read_text(f"{path}/enabled") != "enabled":
            continue
        # The first is the device itself; those above it are bridges.
        for address in sysfs.functions_of(path)[:1]:
            if not is_vfio(sysfs.read_link(f"bus/pci/devices/{address}/driver")):
                first_names.setdefault(address, name)
    return first_names


_ENCRYPTION, _DISPLAY = "1080", "03"  # class of "other encryption controllers"; displays
_AMD = frozenset({"1022", "1d94"})  # and Hygon, whose processors have AMD's functions
# Product ids of engines alone: those without psp_vdata in the table of
# ``drivers/crypto/ccp/sp-pci.c`` of Linux, and that of ``drivers/dma/amd/ptdma/ptdma-pci.c``, which
# only copies memory (PTDMA). A function that is not in that table may be of a newer processor, all
# of which have the security processor.
_ENGINES = frozenset({"1537", "1468", "1498"})
# Displays of management controllers: the tables of ``ast/ast_drv.c`` (ids in ``ast_drv.h``),
# ``mgag200/mgag200_drv.c`` (without the cards of 1998) and ``hisilicon/hibmc/hibmc_drm_drv.c`` in
# ``drivers/gpu/drm`` of Linux.
_MANAGEMENT = frozenset(
    {
        *(("1a03", product) for product in ("2000", "2010")),
        *(("102b", product) for product in ("0522", "0524", "0530", "0532", "0533", "0534")),
        *(("102b", product) for product in ("0536", "0538")),
        ("19e5", "1711"),
    }
)


# Management endpoints of the PCIe switches of Broadcom, and other functions of these switches, by
# the names of the PCI id database (pci.ids). Their bridges have the class of bridges.
_SWITCHES = frozenset(("1000", product) for product in ("00b2", "c010", "c012", "c030", "c034"))
# Maker and class of the management endpoints of the switches of Microchip
# (``drivers/pci/switch/switchtec.c`` of Linux).
_SWITCHTEC = ("11f8", "0580")


def platform_functions(functions: Mapping[str, PciFunction]) -> dict[str, str]:
    """Return the PCI functions that belong to the machine: a reason by address."""
    reasons = {address: _find_reason(function) for address, function in functions.items()}
    return {address: reason for address, reason in reasons.items() if reason is not None}


def _find_reason(function: PciFunction) -> str | None:
    """Return why a PCI function belongs to the machine, None if it does not."""
    is_encryption = function.class_code.startswith(_ENCRYPTION)
    if is_encryption and function.vendor in _AMD and function.product not in _ENGINES:
        return (
            "it contains the security processor (PSP) of the host, which firmware, SEV and TPM "
            "depend on"
        )
    is_display = function.class_code.startswith(_DISPLAY)
    if is_display and (function.vendor, function.product) in _MANAGEMENT:
        return "it is the display of the management controller (BMC) of the host"
    is_switch = (function.vendor, function.product) in _SWITCHES
    if is_switch or (function.vendor, function.class_code[:4]) == _SWITCHTEC:
        return "it manages a PCIe switch of the host"
    return None


_STORAGE = "01"  # class of controllers of storage
_ENDED = "; this ended, but the interface is still up: set it down to free it"


def used_functions(
    sysfs_root: Path,
    known: dict[str, networks.NetworkUse] | None = None,
    functions: Mapping[str, PciFunction] | None = None,
    *,
    interfaces: bool = True,
    shared: Collection[str] = (),
    checked_ports: Collection[str] = (),
    is_accepted: networks.IsAccepted = lambda address, reason: False,
    domains: ReadDomains = read_nothing,
) -> dict[str, str]:
    """Return a dict from the address of each PCI function that the host uses to the reason.

    ``/proc`` is the directory next to ``sysfs_root``. ``known`` has the uses of network interfaces
    that earlier calls found, and is updated: such a use lasts until the interface is down, because
    a network manager may have removed its addresses until the link is back, and a routing daemon
    that starts again, or whose neighbor does, has no routes. ``functions`` are those of the bus, by
    address; they are read if it is None. If ``interfaces`` is False, network interfaces do not
    count as a use. For the addresses ``shared``, vGPUs, mediated devices and open device nodes do
    not count: servers and the host use these functions at the same time. A domain that has such a
    function does not count while its kernel driver is not that of VFIO.
    For the addresses ``checked_ports``, a network port that is up with a link counts. A use that
    ``is_accepted`` for an address does not count; it is asked about each use, except those of
    disks, of controllers of storage, and of domains, which are never accepted.
    ``domains`` returns the functions that domains of libvirt have on this host; by default none.
    """
    sysfs = Sysfs(sysfs_root)
    if functions is None:
        functions = {function.address: function for function in sysfs.pci_functions()}
    storage = {a for a, function in functions.items() if function.class_code.startswith(_STORAGE)}

    def accepts(address: str, reason: str) -> bool:
        return address not in storage and is_accepted(address, reason.removesuffix(_ENDED))

    facts = networks.read_network_facts(sysfs_root) if interfaces else networks.NetworkFacts()
    network_reader = networks.NetworkReader(sysfs, facts)
    reader = processes.ProcessReader(sysfs, processes.read(sysfs_root), functions.values())
    open_now = reader.used_functions(
        interfaces=interfaces,
        is_accepted=lambda address, reason: address in shared or accepts(address, reason),
    )
    mediated = mediated_parents(sysfs_root)
    domain_uses = find_used_by_domains(sysfs_root, domains, functions.values())
    # The uses of these two sources are never accepted. Of those below, the first one that is not
    # accepted is the reason of a function.
    found = {
        address: reason
        for address, reason in domain_uses.items()
        # Without VFIO the domain does not run, and servers may have the mediated devices.
        if address not in shared or is_vfio(functions[address].kernel_driver)
    } | DiskReader(sysfs).used_functions()
    known = {} if known is None else known
    for reasons in (
        _network_functions(network_reader, known, checked_ports, accepts) if interfaces else {},
        network_reader.unread_functions(),
        network_reader.functions_without_interface(functions) if interfaces else {},
        platform_functions(functions),
        _user_space_functions(functions),
        _queue_functions(sysfs),
        display_functions(sysfs),
        open_now,
        {address: reason for address, reason in mediated.items() if address not in shared},
        {a: reason for a, reason in vgpu_functions(sysfs, functions).items() if a not in shared},
    ):
        for address, reason in reasons.items():
            if address not in found and not accepts(address, reason):
                found[address] = reason
    return found


def _network_functions(
    network_reader: networks.NetworkReader,
    earlier_uses: dict[str, networks.NetworkUse],
    checked_ports: Collection[str],
    accepts: networks.IsAccepted,
) -> dict[str, str]:
    """Return the PCI functions whose network interfaces the host uses: a reason each.

    ``earlier_uses`` has the uses that earlier calls found, by address; update it.
    """
    # An interface that has lost its use, and is still up, may get it again in a moment. A server
    # that has the function takes the interface away, which ends the earlier use.
    uses = network_reader.uses(accepts)
    active_ports = network_reader.active_ports(checked_ports, accepts)
    reasons = {address: str(use) for address, use in uses.items()}
    for address, use in list(earlier_uses.items()):
        if address not in uses:
            if network_reader.is_active(use.interface, address):
                is_active_port = use == active_ports.get(address)  # a use that has not ended
                reasons[address] = str(use) if is_active_port else f"{use}{_ENDED}"
            else:
                earlier_uses.pop(address, None)
    for address, use in active_ports.items():
        if address not in reasons:
            reasons[address], earlier_uses[address] = str(use), use
    earlier_uses.update(uses)
    return reasons


def _queue_functions(sysfs: Sysfs) -> dict[str, str]:
    """Return the PCI functions of Intel DSA and IAA with an enabled work queue: a reason each."""
    # The kernel or a program may submit work to it, whatever enabled it
    # (``Documentation/ABI/stable/sysfs-driver-dma-idxd`` of the Linux kernel).
    found: dict[str, str] = {}
    for name in sysfs.list_names("bus/dsa/devices"):
        folder = f"bus/dsa/devices/{name}"
        if name.startswith("wq") and sysfs.read_text(f"{folder}/state") == "enabled":
            for address in sysfs.functions_of(folder)[:1]:
                found.setdefault(address, f"its work queue {name} is enabled")
    return found


def _user_space_functions(functions: Mapping[str, PciFunction]) -> dict[str, str]:
    """Return the PCI functions of drivers in user space, such as DPDK and SPDK."""
    return {
        address: f"it is bound to {function.kernel_driver}, for a driver in user space"
        for address, function in functions.items()
        if function.kernel_driver in networks.USER_SPACE
    }


def vgpu_functions(sysfs: Sysfs, functions: Mapping[str, PciFunction]) -> dict[str, str]:
    """Return the virtual functions that are vGPUs of NVIDIA, and their physical functions."""
    found: dict[str, str] = {}
    for address, function in functions.items():
        if function.physfn is None or function.vendor != NVIDIA:
            continue
        if sysfs.read_int(attributes_folder(address) / "current_vgpu_type"):
            found[address] = "it is a vGPU, which a server may use"
            found.setdefault(function.physfn, f"its virtual function {address} is a vGPU")
    return found


def mediated_parents(sysfs_root: Path) -> dict[str, str]:
    """Return the PCI functions with mediated devices: a text with the reason by address.

    A server may use a mediated device, which disappears without its parent. If the parent is a
    virtual function, its physical function is also returned.
    """
    # The sysfs folder of a mediated device is in the folder of its parent
    # (``Documentation/driver-api/vfio-mediated-device.rst`` of the Linux kernel).
    sysfs = Sysfs(sysfs_root)
    devices = Path("bus/mdev/devices")
    parents: set[str] = set()
    for name in sysfs.list_names(devices):
        # A device may disappear meanwhile, and a parent need not be on the PCI bus.
        with contextlib.suppress(OSError, Invalid):
            folder = Path(os.readlink(sysfs_root / devices / name))
            parents.add(str(PciAddress.parse(folder.parent.name)))
    reasons = dict.fromkeys(parents, "it has mediated devices, which servers may use")
    for parent in sorted(parents):
        if physfn := sysfs.read_link(f"bus/pci/devices/{parent}/physfn"):
            reasons.setdefault(physfn, f"its virtual function {parent} has mediated devices")
    return reasons
