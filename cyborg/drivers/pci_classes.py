# SPDX-License-Identifier: Apache-2.0
"""What a PCI function is likely to be for, by its class code.

Class codes are those of the "PCI Code and ID Assignment Specification" of the PCI-SIG, section 1.
A rule of the generic driver may say otherwise.
"""

from collections.abc import Mapping

from cyborg.core.device import DeviceType
from cyborg.core.names import custom

BRIDGE = "06"
"""Base class of bridges, which hold up the bus and are never given away."""

_INTEL = "8086"
_BY_CLASS: Mapping[str, tuple[DeviceType, str]] = {
    "0108": (DeviceType.SSD, "CUSTOM_NVME"),  # non-volatile memory subsystems
    "02": (DeviceType.NIC, "CUSTOM_NIC"),  # network controllers
    "03": (DeviceType.GPU, "PGPU"),  # display controllers
    "0b40": (DeviceType.OTHER, "CUSTOM_COPROCESSOR"),  # co-processors
    "10": (DeviceType.CRYPTO, "CUSTOM_CRYPTO"),  # encryption and decryption controllers
    # Processing accelerators: FPGAs, AI chips and more alike, so that no narrower type is true.
    "12": (DeviceType.OTHER, "CUSTOM_ACCELERATOR"),
}


def defaults(vendor: str, product: str, class_code: str) -> tuple[DeviceType, str]:
    """Return the type and the resource class of a function that no rule gives any."""
    if vendor == _INTEL and class_code.startswith("0b40"):
        return DeviceType.QAT, "CUSTOM_QAT"  # Intel's co-processors are QuickAssist
    for length in (4, 2):
        if (known := _BY_CLASS.get(class_code[:length])) is not None:
            return known
    return DeviceType.OTHER, custom(f"PCI_{vendor}_{product}")
