# SPDX-License-Identifier: Apache-2.0
"""Default device type and resource class of a PCI function, derived from its class code.

Class codes are defined in the "PCI Code and ID Assignment Specification" of the PCI-SIG, section 1.
A rule of a driver can override these defaults.
"""

from collections.abc import Mapping

from cyborg.core.inventory.device import DeviceType
from cyborg.core.naming import make_custom_name

BRIDGE = "06"
"""Base class code of bridges. They are part of the bus and are never offered."""

_INTEL = "8086"
_BY_CLASS: Mapping[str, tuple[DeviceType, str]] = {
    "0108": (DeviceType.SSD, "CUSTOM_NVME"),  # non-volatile memory subsystems
    "02": (DeviceType.NIC, "CUSTOM_NIC"),  # network controllers
    "03": (DeviceType.GPU, "PGPU"),  # display controllers
    "0b40": (DeviceType.OTHER, "CUSTOM_COPROCESSOR"),  # co-processors
    "10": (DeviceType.CRYPTO, "CUSTOM_CRYPTO"),  # encryption and decryption controllers
    # Processing accelerators: FPGAs, AI chips and others, so a narrower type would be wrong.
    "12": (DeviceType.OTHER, "CUSTOM_ACCELERATOR"),
}
_PROCESSING = "12"
# Makers whose processing accelerators are all of one type. From the MI300X on, AMD's GPUs for
# computing have this class (``lspci -nn`` shows [1200] for 1002:74a1, and [0380] for the MI200);
# so have the chips of Habana Labs (Gaudi, 1da3:1020) and of Huawei (Ascend, 19e5:d802).
_BY_MAKER: Mapping[str, tuple[DeviceType, str]] = {
    "1002": (DeviceType.GPU, "PGPU"),
    "1da3": (DeviceType.AICHIP, "CUSTOM_AICHIP"),
    "19e5": (DeviceType.AICHIP, "CUSTOM_AICHIP"),
}


def default_type_and_class(vendor: str, product: str, class_code: str) -> tuple[DeviceType, str]:
    """Return the default type and resource class of a PCI function; a rule overrides them."""
    if vendor == _INTEL and class_code.startswith("0b40"):
        return DeviceType.QAT, "CUSTOM_QAT"  # Intel's co-processors are QuickAssist
    if class_code.startswith(_PROCESSING) and vendor in _BY_MAKER:
        return _BY_MAKER[vendor]
    for length in (4, 2):
        if (defaults := _BY_CLASS.get(class_code[:length])) is not None:
            return defaults
    return DeviceType.OTHER, make_custom_name(f"PCI_{vendor}_{product}")
