# SPDX-License-Identifier: Apache-2.0
"""Layouts of physical functions: each layout is a number of SR-IOV virtual functions.

``Documentation/ABI/testing/sysfs-bus-pci`` and ``drivers/pci/iov.c`` of the Linux kernel describe
``sriov_numvfs``, ``sriov_totalvfs``, ``sriov_offset``, ``sriov_stride`` and ``sriov_vf_device``. A
routing id is bus, device and function as one number. The routing id of virtual function ``n``, from
0, is ``routing id of the physical function + offset + n * stride`` (``pci_iov_virtfn_bus``). A
virtual function has the vendor id and the class code of its physical function ("Single Root I/O
Virtualization and Sharing Specification" of the PCI-SIG, section 3.4.1).
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cyborg.core.address import PciAddress
from cyborg.core.drivers.registry import Option
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import MAX_LAYOUTS, Device, Layout, count_handles
from cyborg.core.naming import make_custom_name
from cyborg.drivers.base import InvalidOption
from cyborg.drivers.sysfs import PCI_DEVICES, PciFunction, Sysfs

OPTIONS = (
    Option(
        "vf_counts",
        "list",
        (),
        "Numbers of SR-IOV virtual functions that a card can have, such as 0,4,8; the driver gpu "
        "creates those of Intel. Each number up to the maximum of a card is a layout, such as "
        "vfs-4, which an operator applies. An empty list: the driver creates no virtual functions.",
    ),
    Option(
        "vf_autoprobe",
        "bool",
        False,
        "Whether kernel drivers of the host bind to the virtual functions that the driver "
        "creates. Nova needs no such driver, and without it the host cannot begin to use them.",
    ),
)

# Name of the only layout of a device without SR-IOV.
FIXED = "fixed"

# Key of the board info with the number of virtual functions, if the driver has layouts.
NUMVFS = "sriov_numvfs"

# Why a physical function is shown that is not offered itself.
NOT_SELECTED = "no rule selects it; its virtual functions are offered in another layout"

MAX_VFS = 0xFFFF  # the registers have 16 bits (PCI_SRIOV_NUM_VF of pci_regs.h of Linux)
_MAX_ROUTING_ID = 0xFFFF  # eight bits of the bus, five of the device, three of the function
_NAME = re.compile(r"vfs-(0|[1-9][0-9]{0,4})")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,4}")
_PRODUCT = re.compile(r"(0x)?[0-9a-f]{1,4}")


def parse_counts(texts: Sequence[str]) -> tuple[int, ...]:
    """Parse the numbers of the option ``vf_counts``. Raise InvalidOption."""
    for text in texts:
        if not _NUMBER.fullmatch(text) or int(text) > MAX_VFS:
            raise InvalidOption(text, f"numbers from 0 to {MAX_VFS}")
    counts = sorted({int(text) for text in texts})
    # One more layout is the current one.
    if len(counts) >= MAX_LAYOUTS:
        raise InvalidOption(len(counts), f"fewer than {MAX_LAYOUTS} numbers")
    return tuple(counts)


def layout_name(card: PciFunction) -> str:
    """Return the name of the current layout of a card."""
    return f"vfs-{card.numvfs}" if card.totalvfs else FIXED


def trait_of(count: int) -> str:
    """Return the trait of the deployables of a card with this number of virtual functions."""
    return make_custom_name(f"SRIOV_VFS_{count}")


def predict(sysfs: Sysfs, card: PciFunction, count: int) -> list[PciFunction]:
    """Return the ``count`` virtual functions that a card would have; an empty list if unknown.

    They have the address of the card if the card does not show their addresses before they exist.
    """
    # The virtual functions are assumed to have the subsystem ids of the card.
    folder = PCI_DEVICES / card.address
    product = sysfs.read_text(folder / "sriov_vf_device")
    if product is None or not _PRODUCT.fullmatch(product):
        return []
    return [
        replace(
            card,
            address=address,
            product=f"{int(product, 16):04x}",
            physfn=card.address,
            kernel_driver=None,
            iommu_group=None,
            numvfs=0,
            totalvfs=0,
        )
        for address in _predict_addresses(sysfs, card, count)
    ]


def _predict_addresses(sysfs: Sysfs, card: PciFunction, count: int) -> list[str]:
    """Return the addresses of the virtual functions to come; if unknown, that of the card."""
    folder = PCI_DEVICES / card.address
    offset = sysfs.read_int(folder / "sriov_offset") or 0
    stride = sysfs.read_int(folder / "sriov_stride") or 0
    at = PciAddress.parse(card.address)
    first = (at.bus << 8 | at.device << 3 | at.function) + offset
    # The registers are undefined while there is no virtual function, and may change with their
    # number (pci_iov_set_numvfs): this is a forecast.
    is_unknown = not offset or (count > 1 and not stride)
    if is_unknown or first + (count - 1) * stride > _MAX_ROUTING_ID:
        return [card.address] * count
    ids = [first + number * stride for number in range(count)]
    return [str(PciAddress(at.domain, id_ >> 8, id_ >> 3 & 0x1F, id_ & 7)) for id_ in ids]


def parse_layout(layout: str) -> int | None:
    """Return the number of virtual functions of a layout; None if the name is not ``vfs-N``."""
    match = _NAME.fullmatch(layout)
    return None if match is None else int(match[1])


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts of the cards of one backend.

    ``offered_class`` returns a PCI function's resource class; None if it is not offered. ``change``
    is ``privileged.pci.set_count``. ``counts`` are the configured numbers of virtual functions; if
    empty, no device has layouts. If ``allow_network`` is True, a card can be changed while the host
    uses its interface. ``supports`` returns whether a card may have layouts.
    """

    sysfs: Sysfs
    offered_class: Callable[[PciFunction], str | None]
    change: Callable[[str, int, bool, bool], None]
    counts: tuple[int, ...] = ()
    autoprobe: bool = False
    allow_network: bool = False
    supports: Callable[[PciFunction], bool] = lambda card: True

    def describe(self, card: PciFunction) -> tuple[dict[str, str], frozenset[str]]:
        """Return board info and traits of a card's current layout; both empty without layouts."""
        if not self.counts or not card.totalvfs or not self.supports(card):
            return {}, frozenset()
        return {NUMVFS: str(card.numvfs)}, frozenset({trait_of(card.numvfs)})

    def find_virtual(self, card: PciFunction) -> PciFunction | None:
        """Return a virtual function that the backend would offer if the card had it, or None.

        Return None also for a card that has virtual functions now.
        """
        if card.physfn is not None or card.numvfs or not self.supports(card):
            return None
        counts = [count for count in self.counts if 0 < count <= card.totalvfs]
        functions = predict(self.sysfs, card, max(counts)) if counts else []
        return next((f for f in functions if self.offered_class(f) is not None), None)

    def of_device(self, device: Device) -> Sequence[Layout]:
        """Return the layouts of a device; the first is the layout of the last discovery."""
        text = device.std_board_info.get(NUMVFS)
        if text is None:
            return [Layout(FIXED, count_handles(device))]
        # First, because a device without a deployable matches each layout that offers nothing.
        current = int(text)
        layouts = [Layout(f"vfs-{current}", count_handles(device), frozenset({trait_of(current)}))]
        card = self.sysfs.pci_function(device.address)
        for count in self.counts:
            offers = None if card is None or count == current else self._predict(card, count)
            if offers is not None:
                layouts.append(Layout(f"vfs-{count}", offers, frozenset({trait_of(count)})))
        return layouts

    def apply(self, address: str, layout: str) -> None:
        """Apply a layout to the device at an address. Raise DriverFailed if this fails."""
        card = self.sysfs.pci_function(address)
        if card is None:
            raise DriverFailed(f"there is no device {address}")
        if layout == layout_name(card):
            return
        counts = [n for n in self.counts if self._predict(card, n) is not None]
        count = parse_layout(layout)
        if count is None or count not in counts:
            names = ", ".join(f"vfs-{n}" for n in counts) or layout_name(card)
            raise DriverFailed(f"{address} has no layout {layout!r}: expected one of {names}")
        self.change(address, count, self.autoprobe, self.allow_network)

    def _predict(self, card: PciFunction, count: int) -> Mapping[str, int] | None:
        """Return how many handles of each resource class a card would have, or None.

        ``count`` is the number of virtual functions. The result is None if the card cannot have
        this number, or if the backend would offer none of the virtual functions, so that the device
        would disappear.
        """
        if not card.totalvfs or count > card.totalvfs:
            return None
        functions = predict(self.sysfs, card, count) if count else [replace(card, numvfs=0)]
        names = map(self.offered_class, functions)
        handles = Counter(name for name in names if name is not None)
        # Without virtual functions the card is shown for its other layouts, also with no handle.
        return handles if handles or not count else None
