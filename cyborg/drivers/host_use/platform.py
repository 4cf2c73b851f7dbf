# SPDX-License-Identifier: Apache-2.0
"""PCI functions that the machine itself depends on, whatever drives them."""

from collections.abc import Mapping

from cyborg.drivers.sysfs import PciFunction

_ENCRYPTION, _DISPLAY = "1080", "03"  # class of "other encryption controllers"; displays
_AMD = frozenset({"1022", "1d94"})  # and Hygon, whose processors have AMD's functions
_ENGINES = frozenset({"1537", "1468"})
"""Product ids of crypto engines alone: those without psp_vdata in the table of
``drivers/crypto/ccp/sp-pci.c`` of Linux. A function that is not in that table may be of a newer
processor, all of which have the security processor."""
_MANAGEMENT = frozenset(
    {
        *(("1a03", product) for product in ("2000", "2010")),
        *(("102b", product) for product in ("0522", "0524", "0530", "0532", "0533", "0534")),
        *(("102b", product) for product in ("0536", "0538")),
        ("19e5", "1711"),
    }
)
"""Displays of management controllers: the tables of ``ast/ast_drv.c``, ``mgag200/mgag200_drv.c``
(without the cards of 1998) and ``hisilicon/hibmc/hibmc_drm_drv.c`` in ``drivers/gpu/drm`` of Linux.
"""


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
    return None
