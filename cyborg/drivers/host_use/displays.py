# SPDX-License-Identifier: Apache-2.0
"""PCI functions that are displays of the host."""

import re
from pathlib import Path

from cyborg.core.inventory.delivery import is_vfio
from cyborg.drivers.sysfs import Sysfs, functions_on

_CARD, _CONNECTOR = re.compile(r"card[0-9]+"), re.compile(r"card[0-9]+-.+")
_FRAMEBUFFER = re.compile(r"fb[0-9]+")


class DisplayReader:
    """Reader of the displays of a host."""

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs

    def used_functions(self) -> dict[str, str]:
        """Return the PCI functions that are displays of the host: a reason by address.

        A PCI function is a display of the host if it has a framebuffer or an enabled connector, or
        if it is the VGA device of the boot and has a display device of a kernel driver. A compute
        GPU without a screen counts as unused, although its kernel driver creates a DRM device. A
        PCI function that is bound to VFIO counts as unused: ``vfio_pci_vga_init`` of
        ``drivers/vfio/pci/vfio_pci_core.c`` removes the framebuffer of the firmware.

        Sources: ``Documentation/gpu/vgaarbiter.rst`` (the default VGA device),
        ``drivers/pci/pci-sysfs.c`` (``boot_vga``), ``Documentation/fb/framebuffer.rst``,
        ``Documentation/admin-guide/sysfs-rules.rst`` (a class device is below its device),
        ``drivers/gpu/drm/drm_sysfs.c`` (names of cards, ``enabled`` of a connector) and
        ``drivers/video/fbdev/core/fbsysfs.c`` (names of framebuffers) of the Linux kernel.
        """
        cards = self._displays_of("drm", _CARD)
        framebuffers = self._displays_of("graphics", _FRAMEBUFFER)
        found: dict[str, str] = {}
        for address in cards | framebuffers:
            folder = Path("bus/pci/devices") / address
            driver = self._sysfs.read_link(folder / "driver")
            if driver is not None and self._sysfs.read_text(folder / "boot_vga") == "1":
                found[address] = f"it is the VGA device of the boot, bound to {driver}"
        for address, name in framebuffers.items():
            found.setdefault(address, f"it has the framebuffer {name}")
        for address, connector in self._displays_of("drm", _CONNECTOR, enabled=True).items():
            found.setdefault(address, f"its display output {connector} is enabled")
        return found

    def _displays_of(
        self, class_: str, pattern: re.Pattern[str], *, enabled: bool = False
    ) -> dict[str, str]:
        """Return the PCI functions with a device of a class: the first device name by address.

        With ``enabled`` only enabled devices count. PCI functions that are bound to VFIO are
        omitted.
        """
        found: dict[str, str] = {}
        for name in self._sysfs.list_names(f"class/{class_}"):
            path = f"class/{class_}/{name}"
            if not pattern.fullmatch(name):
                continue
            if enabled and self._sysfs.read_text(f"{path}/enabled") != "enabled":
                continue
            # The first is the device itself; those above it are bridges.
            for address in functions_on(self._sysfs.resolve(path) or self._sysfs.root)[:1]:
                if not is_vfio(self._sysfs.read_link(f"bus/pci/devices/{address}/driver")):
                    found.setdefault(address, name)
        return found
