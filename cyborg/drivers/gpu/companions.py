# SPDX-License-Identifier: Apache-2.0
"""Other PCI functions of a graphics card, such as its audio controller.

The PCI id database (pci.ids) has the classes, and such functions of NVIDIA, as 10de:1ad7 (UCSI).
"""

from collections.abc import Iterable, Mapping

from cyborg.drivers.sysfs import PciFunction

COMPANIONS: Mapping[str, str] = {
    "0403": "audio",
    "0c03": "USB",
    "0c80": "serial bus",  # UCSI: the controller of a USB-C port
}
"""Other functions of a graphics card, by class and sub-class."""


def find_companions(card: PciFunction, functions: Iterable[PciFunction]) -> list[PciFunction]:
    """Return the other PCI functions of a graphics card, such as audio, sorted by address."""
    place = card.address.rpartition(".")[0]
    return sorted(
        (
            other
            for other in functions
            if other.address.rpartition(".")[0] == place
            and other.address != card.address
            and other.class_code[:4] in COMPANIONS
        ),
        key=lambda other: other.address,
    )
