# SPDX-License-Identifier: Apache-2.0
"""What a PCI function is: its type, its names, and its part of a card with several functions.

Class codes are defined in the "PCI Code and ID Assignment Specification" of the PCI-SIG, section 1;
the PCI id database (pci.ids) lists them below "List of known device classes", and the names of all
ids. A rule of a driver can override these defaults.

Of the functions of an FPGA card one manages the card, the others are for users. A user of the
management function can load another image into the card, write its flash, and reset it. Sources:

* AMD (Xilinx): the tables of management and user functions in
  ``src/runtime_src/core/pcie/driver/linux/xocl/devices.h`` of AMD's XRT. Shells of 2021 to 2023 are
  in the releases of that time only (5011 to 501d in 2021.2; 5009, 500d, 5059, 5061 in 2023.2). A
  card with its golden image (d000 and others, ``XBB_MFG``) has no user function.
* AMD V80 and V80P: ``hw/amd_v80_gen5x8_25.1/src/bd/create_bd_design.tcl`` and
  ``sw/AMI/driver/ami_pcie.h`` of AMD's AVED, and ``driver/slash_config.h`` of SLASH; 50bd, 50c1 and
  50c2 are in the latter's branch ``dev``.
* AWS F1 and F2: ``sdk/userspace/include/hal/fpga_common.h`` of aws-fpga (1041 and 9248), and
  ``src/runtime_src/core/pcie/driver/aws/kernel/mgmt/mgmt-core.c`` of XRT (1040). Images are loaded
  through the mailbox of the management function.
* Intel N3000: ``drivers/fpga/dfl-pci.c`` of Linux; 8086:0b30 has the interface that writes the
  flash. The functions for users are the FEC accelerator (0d8f) and the network ports.

A graphics card has other functions, such as its audio controller: pci.ids has their classes, and
those of NVIDIA, as 10de:1ad7 (UCSI).

Names are those of udev's hardware database: ``hwdb.d/20-pci-vendor-model.hwdb`` of systemd has
``ID_VENDOR_FROM_DATABASE`` and ``ID_MODEL_FROM_DATABASE``; it is made from the PCI id database
(pci.ids).
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from cyborg.core.inventory.device import DeviceType
from cyborg.core.log import get_logger
from cyborg.core.naming import make_custom_name
from cyborg.drivers.sysfs import PciFunction

LOG = get_logger(__name__)

# Base class code of bridges. They are part of the bus and are never offered.
BRIDGE = "06"

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


# Devices whose class code does not say what they are.
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

# Resource class, and trait, of a virtual function of a GPU: it is never like a whole card.
GPU_VF = make_custom_name("GPU_VF")


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
    for length in (4, 2):  # digits: base class and sub-class, then the base class alone
        code = class_code[:length]
        if (defaults := _BY_MAKER.get((vendor, code)) or _BY_CLASS.get(code)) is not None:
            return defaults
    return DeviceType.OTHER, make_custom_name(f"PCI_{vendor}_{product}")


VENDOR = "10ee"

# Names of cards by the product id of the user function: that of the other function plus one.
USER_FUNCTIONS: Mapping[str, str] = {
    "5001": "Alveo U200",
    "5005": "Alveo U250",
    "5009": "Alveo U280",
    "500d": "Alveo U280",
    "5011": "Alveo U200",  # the ids 501x are those of shells with QDMA
    "5015": "Alveo U250",
    "5019": "Alveo U280",
    "501d": "Alveo U280",
    "5021": "Alveo U50",
    "5035": "Alveo U2",
    "503d": "Alveo U30",
    "5045": "Versal VCK5000",
    "5049": "Versal VCK5000",
    "504f": "Alveo U26Z",
    "5051": "Alveo U25",
    "5059": "Alveo U55N",
    "505d": "Alveo U55C",
    "5061": "Alveo U50LV",
    "506d": "Alveo U50C",
    "5075": "Alveo X3522PV",
    "5079": "Alveo V65",
    "5095": "Alveo V70",
    "5099": "Alveo UL3524",
    "50b1": "Alveo V70",
    "513d": "Alveo U30",
    "6099": "Versal VCK190",
    "6988": "Alveo U2",
}

V80 = "Alveo V80"
# User functions of the V80 and V80P: DMA, and with the shell SLASH a second one for registers.
V80_USER_FUNCTIONS = ("50b5", "50b6", "50bd", "50c1", "50c2")

# Names of cards by vendor and product id of the management function.
_MANAGEMENT: Mapping[tuple[str, str], str] = {
    **{(VENDOR, f"{int(product, 16) - 1:04x}"): name for product, name in USER_FUNCTIONS.items()},
    **{(VENDOR, product): V80 for product in ("50b4", "50bc")},
    **{(VENDOR, product): "golden image" for product in ("d000", "d004", "d00c", "d020")},
    **{("1d0f", product): "AWS F1" for product in ("1040", "1041")},
    ("1d0f", "9248"): "AWS F2",
    ("8086", "0b30"): "Intel N3000",
}


def management_product(user_product: str) -> str:
    """Return the product id of the management function of a user function of XRT."""
    return f"{int(user_product, 16) - 1:04x}"


def describe_management(function: PciFunction, functions: Mapping[str, PciFunction]) -> str | None:
    """Return why a management function is not offered; None for any other function."""
    card = _MANAGEMENT.get((function.vendor, function.product))
    if card is None:
        return None
    user = find_user_function(function, functions)
    text = f"it manages the FPGA card ({card})"
    if user is not None:
        text += f" whose user function is {user.address}"
    return f"{text}; adopt it to let a server load images and write the flash of the card"


def find_user_function(
    function: PciFunction, functions: Mapping[str, PciFunction]
) -> PciFunction | None:
    """Return the first user function of a card of AMD, by slot; None if there is none.

    ``functions`` are those of the bus, by address.
    """
    slot = function.address.rpartition(".")[0]
    for number in range(8):
        other = functions.get(f"{slot}.{number}")
        if (
            other is not None
            and other.vendor == function.vendor == VENDOR
            and other.product in {*USER_FUNCTIONS, *V80_USER_FUNCTIONS}
            and other.product != function.product  # not the function itself
        ):
            return other
    return None


# Other functions of a graphics card, by class and sub-class.
COMPANIONS: Mapping[str, str] = {
    "0403": "audio",
    "0c03": "USB",
    "0c80": "serial bus",  # UCSI: the controller of a USB-C port
}


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


class Names(NamedTuple):
    """Display names of the vendor and the model of a PCI function; None if unknown."""

    vendor: str | None = None
    model: str | None = None


# Function that maps the address of a PCI function of this host to its names.
Lookup = Callable[[str], Names]


def udev_names(address: str) -> Names:
    """Return the names that udev stored for the PCI function at an address."""
    context = _context()
    if context is None:
        return Names()
    import pyudev

    try:
        properties = pyudev.Devices.from_name(context, "pci", address).properties
        return Names(
            _plain(properties.get("ID_VENDOR_FROM_DATABASE")),
            _plain(properties.get("ID_MODEL_FROM_DATABASE")),
        )
    except (pyudev.DeviceNotFoundError, OSError, ValueError, UnicodeError):
        return Names()


@functools.cache
def _context() -> Any:
    """Return the libudev context; without libudev log one warning and return None."""
    try:
        import pyudev

        return pyudev.Context()
    except (ImportError, OSError) as exc:
        reason = str(exc)
    LOG.warning("Cannot use libudev, devices are shown with numeric ids: %s", reason)
    return None


def _plain(name: Any) -> str | None:
    """Return a name without unprintable characters and with at most 255 characters."""
    text = "".join(c if c.isprintable() else " " for c in str(name or "")).strip()
    return text[:255] or None
