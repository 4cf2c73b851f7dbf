# SPDX-License-Identifier: Apache-2.0
"""Example of a driver for cards with several ports and a capability tree."""

from collections.abc import Sequence

from cyborg.core.address import PciAddress
from cyborg.core.drivers.registry import Option
from cyborg.core.inventory import capability
from cyborg.core.inventory.device import AttachHandle, Deployable, Device, DeviceType, HandleType
from cyborg.drivers.base import Driver
from cyborg.drivers.sysfs import Sysfs

# What each port can do: 2 sessions of IPsec, of which one can use GCM.
TREE = {"num": 2, "ipsec": {"aes": {"cbc": True, "gcm": True, "num": 1}}}


class PortCardDriver(Driver):
    """Driver for the cards of one vendor; the PCI functions of a card are its ports."""

    name = "portcard"
    version = "1.0"
    DEVICE_TYPE = DeviceType.CRYPTO
    UEVENT_SUBSYSTEMS = frozenset({"pci"})
    OPTIONS = (Option("vendor", "str", "1d6a", "The vendor's id, four hexadecimal digits."),)

    def discover(self) -> Sequence[Device]:
        """Return one device for each card."""
        cards: dict[str, list[PciAddress]] = {}
        for function in Sysfs(self.sysfs_root).pci_functions():
            if function.vendor == self.options["vendor"]:
                address = PciAddress.parse(function.address)
                cards.setdefault(str(address).rpartition(".")[0], []).append(address)
        return [self._card(ports) for ports in cards.values()]

    def _card(self, ports: Sequence[PciAddress]) -> Device:
        return Device(
            address=str(ports[0]),
            type=DeviceType.CRYPTO,
            vendor=self.options["vendor"],
            model="Port card",
            backend=self.backend,
            # hardware-list shows the capability tree of a device.
            vendor_board_info=capability.to_board_info(TREE),
            deployables=tuple(_port(number, port) for number, port in enumerate(ports)),
        )


def _port(number: int, port: PciAddress) -> Deployable:
    return Deployable(
        address=str(port),
        resource_class="CUSTOM_CRYPTO",
        # A trait for each function of the tree, and a trait by which a profile requests this port.
        traits=capability.build_traits("crypto", TREE) | {f"CUSTOM_PORTCARD_PORT_{number}"},
        handles=(AttachHandle(str(port), HandleType.PCI, port.attach_info()),),
        attributes={"port": str(number)},
    )
