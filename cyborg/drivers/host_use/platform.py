# SPDX-License-Identifier: Apache-2.0
"""PCI functions that the machine itself depends on, whatever drives them."""

from collections.abc import Mapping

from cyborg.drivers.sysfs import PciFunction

_ENCRYPTION, _DISPLAY = "1080", "03"  # class of "other encryption controllers"; displays
_AMD = frozenset({"1022", "1d94"})  # and Hygon, whose processors have AMD's functions
_ENGINES = frozenset({"1537", "1468", "1498"})
"""Product ids of engines alone: those without psp_vdata in the table of
``drivers/crypto/ccp/sp-pci.c`` of Linux, and that of ``drivers/dma/amd/ptdma/ptdma-pci.c``, which
only copies memory (PTDMA). A function that is not in that table may be of a newer
processor, all of which have the security processor."""
_MANAGEMENT = frozenset(
    {
        *(("1a03", product) for product in ("2000", "2010")),
        *(("102b", product) for product in ("0522", "0524", "0530", "0532", "0533", "0534")),
        *(("102b", product) for product in ("0536", "0538")),
        ("19e5", "1711"),
    }
)
"""Displays of management controllers: the tables of ``ast/ast_drv.c`` (ids in ``ast_drv.h``),
``mgag200/mgag200_drv.c`` (without the cards of 1998) and ``hisilicon/hibmc/hibmc_drm_drv.c`` in
``drivers/gpu/drm`` of Linux.
"""


_SWITCHES = frozenset(("1000", product) for product in ("00b2", "c010", "c012", "c030", "c034"))
"""Management endpoints of the PCIe switches of Broadcom, and other functions of these switches, by
the names of the PCI id database (pci.ids). Their bridges have the class of bridges."""
_SWITCHTEC = ("11f8", "0580")
"""Maker and class of the management endpoints of the switches of Microchip
(``drivers/pci/switch/switchtec.c`` of Linux)."""


def platform_functions(functions: Mapping[str, PciFunction]) -> dict[str, str]:
    """Return the PCI functions that belong to the machine: a reason by address."""
    reasons = {address: _find_reason(function) for address, function in functions.items()}
    return {address: reason for address, reason in reasons.items() if reason is not None}


def _find_reason(function: PciFunction) -> str | None:
    is_encryption = function.class_code.startswith(_ENCRYPTION)
    if is_encryption and function.vendor in _AMD and function.product not in _ENGINES:
        return (
            "it contains the security processor (PSP) of the host, which firmware, SEV and TPM "
            "depend on"
        )
    is_display = function.class_code.startswith(_DISPLAY)
    if is_display and (function.vendor, function.product) in _MANAGEMENT:
        return "it is the display of the management controller (BMC) of the host"
    is_switch = (function.vendor, function.product) in _SWITCHES
    if is_switch or (function.vendor, function.class_code[:4]) == _SWITCHTEC:
        return "it manages a PCIe switch of the host"
    return None
