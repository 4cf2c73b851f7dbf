# SPDX-License-Identifier: Apache-2.0
"""Topology of a PCI function: path on the bus, IOMMU group, link, reset methods.

The topology is a map with these keys; an unknown key is omitted:

``pci_root``        the host bridge, domain and bus, such as ``0000:3a``
``pci_path``        the addresses from the root port to the function, separated by ``/``
``iommu_group``     the number of its IOMMU group
``max_link_width``  the number of lanes that the function supports
``max_link_speed``  the highest speed that the function supports
``reset_methods``   the ways in which the kernel can reset it, the preferred one first
``module_id``       the module id of a GPU of a baseboard, by which its fabric names it
``nvlink_peers``    the addresses of the GPUs with an NVLink to it, separated by commas
``nvlink_links``    the number of NVLinks to each of them, in the same order
``nvlink_mbps``     the speed of one of these NVLinks, in megabytes per second

The map does not have the current width and speed of the link: an idle device lowers the speed, and
so the report of the host would change all the time.

Sources in Linux: ``max_link_width_show`` and ``max_link_speed_show`` of
``drivers/pci/pci-sysfs.c``; ``Documentation/ABI/testing/sysfs-bus-pci`` (``reset_method``) and
``sysfs-devices-power`` (``runtime_status``).
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from cyborg.core.naming import make_custom_name, numa_trait
from cyborg.drivers.sysfs import PCI_DEVICES, PciFunction, Sysfs

MODULE_ID, NVLINK_PEERS, NVLINK_LINKS = "module_id", "nvlink_peers", "nvlink_links"
NVLINK_MBPS = "nvlink_mbps"

# Values of a width for a function without its own link, such as an integrated one.
# 63 is read from a function without power (D3cold), all of whose registers read as ones: the width
# has six bits (``PCI_EXP_LNKCAP_MLW`` of ``include/uapi/linux/pci_regs.h``). 255 is
# ``PCIE_LNK_WIDTH_UNKNOWN`` of ``include/linux/pci.h``.
NO_WIDTH = (None, 0, 63, 255)

# Values of ``power/runtime_status`` of a function with power; None without power management.
ACTIVE = (None, "active", "unsupported")


class TopologyReader:
    """Reader of the topology of PCI functions; it stores the last read link of each function.

    The link is read only while the function is active; otherwise the last read values are returned.
    """

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs
        self._links: dict[str, dict[str, str]] = {}

    def read(self, function: PciFunction) -> dict[str, str]:
        """Return the topology of a PCI function."""
        folder = PCI_DEVICES / function.address
        root, path = self._sysfs.pci_path(function.address)
        found = {
            "pci_root": root,
            "pci_path": "/".join(path),
            "iommu_group": function.iommu_group,
            "reset_methods": self._sysfs.read_text(folder / "reset_method"),
        } | self._link(function.address, folder)
        return {key: value for key, value in found.items() if value}

    def forget_others(self, addresses: Collection[str]) -> None:
        """Forget the stored links of all PCI functions except these."""
        self._links = {a: link for a, link in self._links.items() if a in addresses}

    def _link(self, address: str, folder: Path) -> dict[str, str]:
        # The files are registers of the function: reading them may resume a suspended function, or
        # return invalid values.
        if self._sysfs.read_text(folder / "power/runtime_status") not in ACTIVE:
            return self._links.get(address, {})
        width = self._sysfs.read_int(folder / "max_link_width")
        speed = self._sysfs.read_text(folder / "max_link_speed")
        if width is None or width in NO_WIDTH or speed is None or is_unknown_speed(speed):
            return self._links.get(address, {})
        self._links[address] = {"max_link_width": str(width), "max_link_speed": speed}
        return self._links[address]


def traits(function: PciFunction, topology: Mapping[str, str]) -> frozenset[str]:
    """Return the affinity traits of a PCI function, such as ``CUSTOM_NUMA_NODE_0``."""
    # The traits are custom: os-traits has none for the NUMA node or the PCIe root of a device.
    names = [] if function.numa_node is None else [numa_trait(function.numa_node)]
    if "pci_root" in topology:
        names.append(make_custom_name(f"PCIE_ROOT_{topology['pci_root']}"))
    return frozenset(names)


def is_unknown_speed(speed: str | None) -> bool:
    """Return whether a link speed is missing, or ``Unknown``."""
    # ``pci_speed_string`` of ``drivers/pci/probe.c`` of Linux writes the speeds.
    return speed is None or speed.startswith("Unknown")
