# SPDX-License-Identifier: Apache-2.0
"""PCI functions that the machine itself depends on, whatever drives them."""

from collections.abc import Mapping

from cyborg.drivers.sysfs import PciFunction

ENCRYPTION = "1080"
"""Class of "other encryption controllers"."""
_VENDORS = frozenset({"1022", "1d94"})  # AMD, and Hygon, whose processors have AMD's functions
_WITHOUT = frozenset({"1537", "1468"})
"""Product ids of crypto engines alone: those without psp_vdata in the table of
``drivers/crypto/ccp/sp-pci.c`` of Linux. A function that is not in that table may be of a newer
processor, all of which have the security processor."""
_REASON = (
    "it contains the security processor (PSP) of the host, which firmware, SEV and TPM depend on"
)


def secure_processors(functions: Mapping[str, PciFunction]) -> dict[str, str]:
    """Return the PCI functions that contain a security processor (PSP): a reason by address."""
    return {
        address: _REASON
        for address, function in functions.items()
        if function.vendor in _VENDORS
        and function.class_code.startswith(ENCRYPTION)
        and function.product not in _WITHOUT
    }
