# SPDX-License-Identifier: Apache-2.0
"""Default device type and resource class of a PCI function, derived from its class code.

Class codes are defined in the "PCI Code and ID Assignment Specification" of the PCI-SIG, section 1;
the PCI id database (pci.ids) lists them below "List of known device classes", and the names of all
ids. A rule of a driver can override these defaults.
"""

from collections.abc import Mapping

from cyborg.core.inventory.device import DeviceType
from cyborg.core.naming import make_custom_name
from cyborg.drivers.sysfs import PciFunction

BRIDGE = "06"
"""Base class code of bridges. They are part of the bus and are never offered."""

_BY_CLASS: Mapping[str, tuple[DeviceType, str]] = {
    "0108": (DeviceType.SSD, "CUSTOM_NVME"),  # non-volatile memory subsystems
    "02": (DeviceType.NIC, "CUSTOM_NIC"),  # network controllers
    "03": (DeviceType.GPU, "PGPU"),  # display controllers
    "0b40": (DeviceType.OTHER, "CUSTOM_COPROCESSOR"),  # co-processors
    "10": (DeviceType.CRYPTO, "CUSTOM_CRYPTO"),  # encryption and decryption controllers
    # Processing accelerators: FPGAs, AI chips and others, so a narrower type would be wrong.
    "12": (DeviceType.OTHER, "CUSTOM_ACCELERATOR"),
}
_BY_MAKER: Mapping[tuple[str, str], tuple[DeviceType, str]] = {
    # Intel's co-processors are QuickAssist, except those of _BY_PRODUCT.
    ("8086", "0b40"): (DeviceType.QAT, "CUSTOM_QAT"),
    # Makers whose processing accelerators are all of one type. From the MI300X on, AMD's GPUs for
    # computing have this class (``lspci -nn`` shows [1200] for 1002:74a1, and [0380] for the
    # MI200); so have the chips of Habana Labs (Gaudi, 1da3:1020) and Huawei (Ascend, 19e5:d802).
    ("1002", "12"): (DeviceType.GPU, "PGPU"),
    ("1da3", "12"): (DeviceType.AICHIP, "CUSTOM_AICHIP"),
    ("19e5", "12"): (DeviceType.AICHIP, "CUSTOM_AICHIP"),
}


_BY_PRODUCT: Mapping[tuple[str, str], tuple[DeviceType, str]] = {
    # ``idxd_pci_tbl`` of ``drivers/dma/idxd/init.c`` of Linux, whose ids are in its ``registers.h``
    # and in ``include/linux/pci_ids.h``: Data Streaming Accelerators, and In-Memory Analytics
    # Accelerators.
    **{
        ("8086", product): (DeviceType.OTHER, make_custom_name("DSA"))
        for product in ("0b25", "11fb", "1212")
    },
    **{
        ("8086", product): (DeviceType.OTHER, make_custom_name("IAA"))
        for product in ("0cfe", "1216", "b02d", "fd2d")
    },
    # Co-processors that are neither: Intel's Dynamic Load Balancer (``drivers/event/dlb2/pf/base/
    # dlb2_hw_types.h`` of DPDK), and AMD's PTDMA, which copies memory (``drivers/dma/amd/ptdma/
    # ptdma-pci.c`` of Linux).
    **{
        (vendor, product): (DeviceType.OTHER, make_custom_name(f"PCI_{vendor}_{product}"))
        for vendor, product in (
            *(("8086", product) for product in ("2710", "2711", "2714", "2715")),
            ("1022", "1498"),
        )
    },
}
"""Devices whose class code does not say what they are."""

GPU_VF = make_custom_name("GPU_VF")
"""Resource class, and trait, of a virtual function of a GPU: it is never like a whole card."""


def is_gpu(function: PciFunction) -> bool:
    """Return whether a PCI function is a GPU by its class code and its maker."""
    type_, _ = default_type_and_class(function.vendor, function.product, function.class_code)
    return type_ is DeviceType.GPU


def is_gpu_vf(function: PciFunction) -> bool:
    """Return whether a PCI function is a virtual function of a GPU."""
    return function.physfn is not None and is_gpu(function)


def default_type_and_class(vendor: str, product: str, class_code: str) -> tuple[DeviceType, str]:
    """Return the default type and resource class of a PCI function; a rule overrides them."""
    if (defaults := _BY_PRODUCT.get((vendor, product))) is not None:
        return defaults
    for length in (4, 2):
        code = class_code[:length]
        if (found := _BY_MAKER.get((vendor, code)) or _BY_CLASS.get(code)) is not None:
            return found
    return DeviceType.OTHER, make_custom_name(f"PCI_{vendor}_{product}")
