# SPDX-License-Identifier: Apache-2.0
"""Layouts of AMD GPUs for computing: the modes in which ``amdgpu`` divides a card.

Only a card that is not divided (SPX) is offered. The partitions of all other modes are nodes of DRM
for processes of the host, such as containers, and no PCI functions, so no server can get them.
The memory mode is not changed: a request applies to all linked cards, and only when the module is
unloaded and loaded again, for which none of them may be in use. ``cyborg.drivers.kernel.amdgpu``
has the sources.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Device, Layout, count_handles
from cyborg.core.naming import make_custom_name
from cyborg.drivers.base import InvalidOption, Memory
from cyborg.drivers.kernel import amdgpu
from cyborg.drivers.pci import classes
from cyborg.drivers.sysfs import PciFunction, Sysfs

# Name of the layout of a card whose mode cannot be read.
OTHER = "other"


def parse_modes(texts: Sequence[str]) -> tuple[str, ...]:
    """Parse the option ``partition_modes``. Raise InvalidOption."""
    for text in texts:
        if text not in amdgpu.MODES:
            raise InvalidOption(text, f"one of {', '.join(amdgpu.MODES)}")
    return tuple(dict.fromkeys(texts))


def trait_of(layout: str) -> str:
    """Return the trait of a layout, such as ``CUSTOM_GPU_PARTITION_SPX``."""
    return make_custom_name(f"GPU_PARTITION_{layout}")


class PartitionLayouts:
    """Layouts of the AMD GPUs of a backend; without ``modes`` no card has any.

    ``memory`` returns the memory of the driver: while a server has a card, its modes are not shown.
    ``class_of_whole`` returns the resource class of a whole card, None if it is not offered.
    """

    def __init__(
        self,
        sysfs: Sysfs,
        modes: Sequence[str],
        memory: Callable[[], Memory],
        set_mode: Callable[[str, str], None],
        class_of_whole: Callable[[str], str | None],
    ) -> None:
        self._sysfs = sysfs
        self._modes = modes
        self._memory = memory
        self._set_mode = set_mode
        self._class_of_whole = class_of_whole

    def has_layouts(self, address: str) -> bool:
        """Return whether the device at an address is a card with layouts."""
        card = self._sysfs.pci_function(address) if self._modes else None
        return card is not None and bool(self._available(card))

    def describe(self, card: PciFunction) -> tuple[dict[str, str], frozenset[str]]:
        """Return board info and traits of a card's current layout; both empty without layouts."""
        if not self.has_layouts(card.address):
            return {}, frozenset()
        layout = self._current(card)
        info = {"compute_partition": layout}
        if (memory_mode := amdgpu.read_memory_mode(self._sysfs, card.address)) is not None:
            info["memory_partition"] = memory_mode
        return info, frozenset({trait_of(layout)})

    def find_divided(self, functions: Iterable[PciFunction]) -> dict[str, str]:
        """Return the cards that must not be offered as a whole: a reason by address."""
        reasons: dict[str, str] = {}
        for card in functions:
            if self._modes and self._available(card):
                mode, advice = self._current(card), f"apply the layout {amdgpu.WHOLE}"
            else:
                mode, advice = self._mode_without_layouts(card), f"set the mode {amdgpu.WHOLE}"
            if mode != amdgpu.WHOLE:
                reasons[card.address] = (
                    f"its partition mode is {mode}, for processes of the host: {advice}"
                )
        return reasons

    def of_device(self, device: Device) -> Sequence[Layout]:
        """Return the layouts of a card, the current one first."""
        card = self._sysfs.pci_function(device.address)
        if card is None:
            raise DriverFailed(f"there is no card {device.address}")
        # The current one with the handles of now, which may be fewer than it could have:
        # ``Layout.matches`` recognises it by them.
        offers: dict[str, Mapping[str, int]] = {self._current(card): count_handles(device)}
        offered_class = self._class_of_whole(device.address)
        for mode in self._possible(card):
            has_handle = mode == amdgpu.WHOLE and offered_class is not None
            offers.setdefault(mode, {str(offered_class): 1} if has_handle else {})
        return [
            Layout(name, counts, frozenset({trait_of(name)})) for name, counts in offers.items()
        ]

    def apply(self, address: str, layout: str) -> None:
        """Apply a layout to the card at an address.

        Raise DriverFailed if the card does not have the layout, a process uses it, or the kernel
        refuses; then the card is as before.
        """
        card = self._sysfs.pci_function(address)
        if card is None:
            raise DriverFailed(f"there is no device {address}")
        if layout == self._current(card):
            return
        if layout not in (possible := self._possible(card)):
            memory_mode = amdgpu.read_memory_mode(self._sysfs, address)
            raise DriverFailed(
                f"{address} has no layout {layout!r} with the memory mode {memory_mode}: expected "
                f"one of {', '.join(possible)}"
            )
        self._set_mode(address, layout)

    def _possible(self, card: PciFunction) -> list[str]:
        return [m for m in self._available(card) if m in self._modes or m == amdgpu.WHOLE]

    def _available(self, card: PciFunction) -> tuple[str, ...]:
        if card.vendor != amdgpu.AMD or card.physfn is not None or not classes.is_gpu(card):
            return ()
        key = f"partition modes {card.address} {card.product}"
        if card.kernel_driver == amdgpu.KERNEL_DRIVER:
            found = amdgpu.read_available(self._sysfs, card.address)
            self._memory().put(key, ",".join(found) or None)
            return found
        text = self._memory().get(key)
        return tuple(m for m in amdgpu.MODES if m in text.split(",")) if text else ()

    def _mode_without_layouts(self, card: PciFunction) -> str:
        """Return the mode of a card without layouts; that of a whole card if it has none."""
        if card.vendor != amdgpu.AMD or card.physfn is not None or not classes.is_gpu(card):
            return amdgpu.WHOLE
        if card.kernel_driver != amdgpu.KERNEL_DRIVER:
            return amdgpu.WHOLE
        return amdgpu.read_mode(self._sysfs, card.address) or amdgpu.WHOLE

    def _current(self, card: PciFunction) -> str:
        if card.kernel_driver != amdgpu.KERNEL_DRIVER:
            return amdgpu.WHOLE  # without its driver, a card has no partitions
        return amdgpu.read_mode(self._sysfs, card.address) or OTHER
