# SPDX-License-Identifier: Apache-2.0
"""Layouts of Intel GPUs: numbers of virtual functions (``pci.sriov``), and what they have.

The kernel drivers ``xe`` and ``i915`` create virtual functions by ``sriov_numvfs`` and divide the
resources of the card among them in equal parts; that of the memory is rounded down to a power of
two (``pf_estimate_fair_lmem`` of ``xe``). The memory and the scheduling are set after that, the
same for all of them. Alternative not taken: memory that is set before the functions are created,
which ends the division of the other resources by the driver.
Functions of other vendors are not created this way: NVIDIA's need ``sriov-manage``, and AMD's are
created when the module ``gim`` is loaded (``vf_num``). Its ``pci_driver`` (``gim_shim/gim_drv.c``
of amd/MxGPU-Virtualization) has no ``sriov_configure``, without which ``sriov_numvfs_store`` of
Linux refuses a write with ENOENT.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from cyborg.core.errors import CyborgError, DriverFailed
from cyborg.core.inventory.device import Device, Layout
from cyborg.drivers.base import Driver, InvalidOption
from cyborg.drivers.kernel import xe
from cyborg.drivers.pci import classes
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.pci.sriov import Layouts, parse_layout
from cyborg.drivers.sysfs import PCI_DEVICES, PciFunction, Sysfs

INTEL = "8086"

_PART = re.compile(r"(?P<count>[1-9][0-9]{0,4}):(?P<mib>[1-9][0-9]{0,6})")


def is_supported(card: PciFunction) -> bool:
    """Return whether a card is a GPU whose virtual functions this module creates."""
    return card.vendor == INTEL and card.physfn is None and classes.is_gpu(card)


def parse_scheduling(texts: Sequence[str]) -> dict[str, str]:
    """Parse the option ``vf_scheduling``. Raise InvalidOption."""
    settings: dict[str, str] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if name in settings or not xe.is_valid(name, value):
            raise InvalidOption(
                text,
                f"one of {', '.join(f'{name}=NUMBER' for name in xe.NUMBERS)}, "
                f"{xe.PRIORITY}={'|'.join(xe.PRIORITIES)}, each once",
            )
        settings[name] = value
    return settings


def parse_vram(texts: Sequence[str]) -> dict[int, int]:
    """Parse the option ``vf_vram_mib``: MiB by number of functions. Raise InvalidOption."""
    found: dict[int, int] = {}
    for text in texts:
        match = _PART.fullmatch(text)
        if match is None or int(match["count"]) in found:
            raise InvalidOption(text, "COUNT:MIB, such as 2:11776, each count once")
        found[int(match["count"])] = int(match["mib"])
    return found


@dataclass(frozen=True, slots=True)
class VfResources:
    """What the virtual functions of a card get, and the functions of ``privileged.xe`` for it.

    ``settings`` are those of the scheduling, ``vram`` has MiB of memory by the number of virtual
    functions; what is missing stays as the kernel driver has divided it.
    """

    settings: Mapping[str, str]
    vram: Mapping[int, int]
    set_scheduling: Callable[[str, Mapping[str, str]], None]
    set_vram: Callable[[str, int], None]

    @classmethod
    def of(cls, driver: Driver, access: HostAccess) -> Self:
        """Return those of the options of a driver. Raise Misconfigured."""
        return cls(
            driver.parse_option("vf_scheduling", parse_scheduling),
            driver.parse_option("vf_vram_mib", parse_vram),
            access.set_scheduling,
            access.set_vram,
        )

    def check(self, sysfs: Sysfs, card: PciFunction, count: int) -> None:
        """Raise DriverFailed if a card cannot have them with a number of virtual functions."""
        # The option, the attribute that it needs, and the first Linux whose ``xe`` has that.
        missing: tuple[str, str, str] | None = None
        if count and not xe.has_scheduling(sysfs, card.address, self.settings):
            missing = f"{', '.join(self.settings)} of vf_scheduling", "sriov_admin", "6.19"
        if count in self.vram and not xe.has_vram(sysfs, card.address):
            missing = f"vf_vram_mib={count}:{self.vram[count]}", xe.VRAM, "7.0"
        if missing is not None:
            option, attribute, version = missing
            raise DriverFailed(
                f"{card.address} cannot have {option}: its kernel driver {card.kernel_driver} has "
                f"no {attribute} (xe of Linux {version} or later has): remove the option"
            )

    def set(self, address: str, count: int) -> None:
        """Set them for a card with a number of virtual functions. Raise DriverFailed."""
        if count in self.vram:
            self.set_vram(address, self.vram[count])
        if count and self.settings:
            self.set_scheduling(address, self.settings)


class VfLayouts:
    """Layouts of the Intel GPUs of a backend.

    ``layouts`` change the number of virtual functions, ``resources`` what these have.
    """

    def __init__(
        self,
        sysfs: Sysfs,
        layouts: Callable[[], Layouts],
        resources: VfResources,
    ) -> None:
        self._sysfs = sysfs
        self._layouts = layouts
        self._resources = resources

    def has_layouts(self, address: str) -> bool:
        """Return whether the device at an address is a card with layouts."""
        if not self._layouts().counts:
            return False
        card = self._sysfs.pci_function(address)
        return card is not None and is_supported(card)

    def of_device(self, device: Device) -> Sequence[Layout]:
        """Return the layouts of a card, the current one first."""
        return self._layouts().of_device(device)

    def apply(self, address: str, layout: str) -> None:
        """Apply a layout to the card at an address.

        Raise DriverFailed if the card does not have the layout, a virtual function may be in use,
        or a step fails; then the previous number of virtual functions is restored, with what they
        had.
        """
        # 0 also for a name that is no layout, which ``Layouts.apply`` refuses below.
        card, count = self._sysfs.pci_function(address), parse_layout(layout) or 0
        if card is not None:
            self._resources.check(self._sysfs, card, count)
        functions_id = self._identify_functions(address)
        try:
            self._layouts().apply(address, layout)
        except CyborgError as exc:
            # Functions that were created again lack what they had. The others are not touched:
            # guests may have them, and the options may have changed.
            if card is not None and self._identify_functions(address) != functions_id:
                self._set_again(address, card.numvfs, exc)
            raise
        if card is None:
            return  # it appeared after the check: its functions keep what the kernel driver gave
        try:
            self._resources.set(address, count)
        except CyborgError as exc:
            if card.numvfs == count:
                raise  # the functions are the same ones, which servers may have
            try:
                self._restore(address, card.numvfs)
            except CyborgError as failed:
                raise DriverFailed(
                    f"{exc.message}; the {card.numvfs} previous virtual functions could not be "
                    f"restored: {failed.message}"
                ) from exc
            raise DriverFailed(f"{exc.message}; {address} is as before") from exc

    def describe_missing(self, cards: Iterable[str]) -> list[str]:
        """Return warnings about cards that should have layouts and cannot."""
        found = (self._sysfs.pci_function(name) for name in cards if self.has_layouts(name))
        return [
            f"{card.address} can have no virtual functions: enable SR-IOV in the firmware, and set "
            f"max_vfs of the kernel driver {card.kernel_driver or 'xe'}"
            for card in found
            if card is not None and not card.totalvfs
        ]

    def _identify_functions(self, address: str) -> int | None:
        """Return the identity of the first virtual function of a card, None without any."""
        return self._sysfs.identity(PCI_DEVICES / address / "virtfn0")

    def _set_again(self, address: str, count: int, error: CyborgError) -> None:
        """Give the functions of a card what they had before a change that failed.

        Do nothing if the card has another number of functions. Raise DriverFailed if it fails.
        """
        card = self._sysfs.pci_function(address)
        if card is None or card.numvfs != count:
            return
        try:
            self._resources.set(address, count)
        except CyborgError as failed:
            raise DriverFailed(
                f"{error.message}; what its {count} virtual functions have could not be set again: "
                f"{failed.message}"
            ) from error

    def _restore(self, address: str, count: int) -> None:
        layouts = self._layouts()
        layouts.change(address, count, layouts.autoprobe, layouts.allow_network)
        self._resources.set(address, count)
