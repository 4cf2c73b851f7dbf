# SPDX-License-Identifier: Apache-2.0
"""Layouts of Intel GPUs: numbers of virtual functions (``pci.sriov``), and their scheduling.

The kernel drivers ``xe`` and ``i915`` create virtual functions by ``sriov_numvfs`` and divide the
resources of the card among them in equal parts. The scheduling is set after that, for all of them.
Functions of other vendors are not created this way: NVIDIA's need ``sriov-manage``, and AMD's are
created when the module ``gim`` is loaded (``vf_num``), which has no ``sriov_configure``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from cyborg.core.errors import CyborgError, DriverFailed
from cyborg.core.inventory.device import Device, Layout
from cyborg.drivers.base import InvalidOption
from cyborg.drivers.kernel import xe
from cyborg.drivers.pci import classes
from cyborg.drivers.pci.sriov import Layouts, parse_layout
from cyborg.drivers.sysfs import PciFunction, Sysfs

INTEL = "8086"


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


class VfLayouts:
    """Layouts of the Intel GPUs of a backend.

    ``layouts`` change the number of virtual functions. ``settings`` are those of the scheduling,
    which ``set_scheduling`` (``privileged.xe``) sets; empty leaves them as the driver has them.
    """

    def __init__(
        self,
        sysfs: Sysfs,
        layouts: Callable[[], Layouts],
        settings: Mapping[str, str],
        set_scheduling: Callable[[str, Mapping[str, str]], None],
    ) -> None:
        self._sysfs = sysfs
        self._layouts = layouts
        self._settings = settings
        self._set_scheduling = set_scheduling

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
        or a step fails; then the previous number of virtual functions is restored.
        """
        card = self._sysfs.pci_function(address)
        settings = self._settings if parse_layout(layout) else {}
        if card is not None and not xe.has_scheduling(self._sysfs, address, settings):
            raise DriverFailed(
                f"{address} cannot have {', '.join(settings)} of vf_scheduling: its kernel driver "
                f"{card.kernel_driver} has no sriov_admin (xe of Linux 6.19 or later has): "
                "remove the option"
            )
        self._layouts().apply(address, layout)
        if card is None or not settings:
            return
        try:
            self._set_scheduling(address, settings)
        except CyborgError as exc:
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

    def _restore(self, address: str, count: int) -> None:
        layouts = self._layouts()
        layouts.change(address, count, layouts.autoprobe, layouts.allow_network)
        if count:
            self._set_scheduling(address, self._settings)
