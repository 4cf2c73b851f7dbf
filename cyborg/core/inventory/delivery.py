# SPDX-License-Identifier: Apache-2.0
"""Decision whether Nova can attach a PCI function to an instance by VFIO, with the reason if not.

VFIO gives an instance a whole IOMMU group (``Documentation/driver-api/vfio.rst`` of the Linux
kernel). The group is usable if no driver of the host does DMA with another device of the group.
So each other device must be a bridge, have no driver, or have a driver that sets
``driver_managed_dma``. The drivers that set it are the VFIO drivers, ``pci-stub`` and ``pcieport``
(``drivers/pci/pci-stub.c``, ``drivers/pci/pcie/portdrv.c``).
"""

from dataclasses import dataclass

from cyborg.core.text import join_limited

# Other functions of a group in a reason.
MAX_SHOWN = 3
_VFIO = "vfio"
_HARMLESS = frozenset({"pci-stub", "pcieport"})
_PCI_BRIDGE = "0604"  # class of the bridges between PCI buses


@dataclass(frozen=True, slots=True)
class GroupMember:
    """Another device of the IOMMU group, usually a PCI function.

    ``class_code`` has six digits; it is empty for a device that is not on the PCI bus.
    ``same_card`` is set if it is a PCI function of the same card. ``offered`` is set if it is
    an attach handle too, so that another instance may get it, ``used`` if the host uses it, and
    ``guest`` if a domain of libvirt has it, which then has the group when it runs.
    """

    address: str
    class_code: str
    kernel_driver: str | None = None
    same_card: bool = False
    offered: bool = False
    used: bool = False
    guest: bool = False


@dataclass(frozen=True, slots=True)
class FunctionFacts:
    """Facts that decide whether a PCI function can be attached.

    ``iommu_group`` is the number of its IOMMU group, None without a group. ``others`` are the other
    devices of the group. ``host_use`` is how the host uses the PCI function, None if it does not.
    The booleans are set if

    * ``host_has_iommu``: the host has at least one IOMMU group;
    * ``host_has_vfio``: a VFIO driver is loaded, or can be loaded;
    * ``denied``: the PCI function is in the denylist of vfio-pci, and the list is enabled;
    * ``direct_mapped``: the firmware requires a direct mapping of memory for the group.
    """

    iommu_group: str | None
    host_has_iommu: bool
    host_has_vfio: bool
    kernel_driver: str | None = None
    others: tuple[GroupMember, ...] = ()
    host_use: str | None = None
    denied: bool = False
    direct_mapped: bool = False


def find_obstacle(facts: FunctionFacts) -> str | None:
    """Return why a PCI function cannot be attached, with a remedy; None if it can be."""
    if facts.iommu_group is None and not facts.host_has_iommu:
        return (
            "the host has no IOMMU: enable VT-d or AMD-Vi in the firmware, and boot the kernel "
            "with intel_iommu=on or amd_iommu=on, and iommu=pt"
        )
    if facts.iommu_group is None:
        return (
            "the IOMMU does not cover this function: use another slot, and remove igfx_off from "
            "intel_iommu on the kernel command line"
        )
    # A function that a VFIO driver has already proves that the driver is there and takes the model.
    bound = is_vfio(facts.kernel_driver)
    if not facts.host_has_vfio and not bound:
        return (
            "the kernel driver vfio-pci is neither loaded nor installed: install the package of "
            "the running kernel that contains it"
        )
    if facts.denied and not bound:
        return (
            "vfio-pci refuses this model by its denylist: use another device, or load vfio-pci "
            "with disable_denylist=1 where you trust the users of the device"
        )
    if facts.direct_mapped:
        return (
            f"the firmware requires a direct mapping of memory for IOMMU group {facts.iommu_group} "
            "(RMRR or IVMD), which VFIO refuses: turn off the feature of the firmware that uses "
            "the device, or use another slot"
        )
    if blocking := [other for other in facts.others if _blocks(other)]:
        names = join_limited([_format(other) for other in blocking], MAX_SHOWN)
        remedy = "use another slot, or one with ACS"
        # What is not offered goes to the instance with its group: advised if the same card has such
        # a function, as a GPU has one for audio. But the host keeps a function that it uses.
        if any(other.same_card for other in blocking) and not any(other.used for other in blocking):
            remedy = "bind these to vfio-pci and do not offer them, or use a slot with ACS"
        # This remedy replaces the one before: what a guest has cannot be bound to another driver.
        if any(other.guest for other in blocking):
            remedy = "take these from the domain, or use a slot with ACS"
        return f"it shares IOMMU group {facts.iommu_group} with {names}: {remedy}"
    return describe_host_use(facts.host_use)


def describe_host_use(host_use: str | None) -> str | None:
    """Return the reason and the remedy if the host uses a PCI function; None if it does not."""
    if host_use is None:
        return None
    return f"the host uses it: {host_use}; free it on the host, or use another device"


def is_vfio(kernel_driver: str | None) -> bool:
    """Return whether a kernel driver is vfio-pci, or its variant for a family of devices.

    The variants of the kernel (``drivers/vfio/pci``) have names such as ``mlx5_vfio_pci``,
    ``nvgrace_gpu_vfio_pci`` and ``xe-vfio-pci``.
    """
    return kernel_driver is not None and _VFIO in kernel_driver


def _blocks(other: GroupMember) -> bool:
    """Return whether this other device of the group makes it impossible to attach the group."""
    if other.class_code.startswith(_PCI_BRIDGE):
        return False  # with any driver: older kernels permit it, newer ones bind pcieport
    driver = other.kernel_driver
    if driver is not None and driver not in _HARMLESS and not is_vfio(driver):
        return True
    # The group goes to one instance. What is not offered goes with it, such as the audio function
    # of a GPU; what is offered may be allocated to another instance, and a guest has the group.
    return other.offered or other.guest


def _format(other: GroupMember) -> str:
    uses = [*([other.kernel_driver] if other.kernel_driver else [])]
    uses += ["offered too"] if other.offered else []
    uses += ["used by a domain of libvirt"] if other.guest else []
    return f"{other.address} ({', '.join(uses)})" if uses else other.address
