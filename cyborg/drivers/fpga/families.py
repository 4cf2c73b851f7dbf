# SPDX-License-Identifier: Apache-2.0
"""Known FPGA cards, by the ids of their PCI functions.

Sources: ``drivers/fpga/dfl-pci.c`` of Linux for Intel; ``fpga_management`` for AMD. For AWS,
``src/runtime_src/core/pcie/driver/linux/xocl/devices.h`` of XRT has 1042, 9048, f010 and f011, and
``hdk/cl/examples`` of aws-fpga the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cyborg.drivers.fpga import management as fpga_management

INTEL = "8086"
AWS = "1d0f"


class ProgrammerName(StrEnum):
    """Ways to load an image; ``programmers`` has a class for each except AUTO and NONE."""

    AUTO = "auto"
    FIRMWARE = "firmware"  # attribute "firmware" of the FPGA manager
    DFL = "dfl"  # ioctl of the FPGA management engine
    FPGASUPDATE = "fpgasupdate"
    FPGACONF = "fpgaconf"
    XBMGMT = "xbmgmt"
    XBUTIL = "xbutil"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Family:
    """Cards of one kind; ``programmer`` is the way to load images unless an option sets another.

    The user function of an Alveo card has the id of its management function plus one.
    """

    name: str
    programmer: ProgrammerName
    has_management: bool = False


def _intel(name: str, programmer: ProgrammerName, *products: str) -> dict[tuple[str, str], Family]:
    family = Family(name, programmer)
    return {(INTEL, product): family for product in products}


FAMILIES: Mapping[tuple[str, str], Family] = {
    # The physical function, then the virtual ones.
    **_intel("Intel PAC Arria 10", ProgrammerName.DFL, "09c4", "09c5"),
    **_intel("Intel PAC D5005", ProgrammerName.DFL, "0b2b", "0b2c"),
    # fpgasupdate writes the flash of an N3000: the new function needs a restart of the card
    # (doc/src/fpga_tools/fpgasupdate/fpgasupdate.md of OPAE).
    **_intel("Intel PAC N3000", ProgrammerName.NONE, "0b30"),
    **_intel("Intel DFL N6000", ProgrammerName.DFL, "bcce", "bccf"),
    **_intel("Intel integrated FPGA", ProgrammerName.DFL, "bcbd", "bcbf", "bcc0", "bcc1"),
    **{
        (fpga_management.VENDOR, product): Family(name, ProgrammerName.XBMGMT, has_management=True)
        for product, name in fpga_management.USER_FUNCTIONS.items()
    },
    # Its tools, ami_tool and v80-smi, write the flash of the card.
    **{
        (fpga_management.VENDOR, product): Family(fpga_management.V80, ProgrammerName.NONE)
        for product in fpga_management.V80_USER_FUNCTIONS
    },
    # The function of an image that is cleared, and those of Amazon's examples. AWS loads images by
    # their names, not from files.
    **{(AWS, product): Family("AWS F1", ProgrammerName.NONE) for product in ("1042",)},
    **{(AWS, product): Family("AWS F2", ProgrammerName.NONE) for product in ("9048",)},
    **{
        (AWS, product): Family("AWS image", ProgrammerName.NONE)
        for product in ("f000", "f001", "f002", "f004", "f010", "f011")
    },
}
"""Families by vendor and product id of the functions that are offered."""


def find_family(vendor: str, product: str) -> Family | None:
    """Return the family of a PCI function with these ids; None if the ids are unknown."""
    return FAMILIES.get((vendor, product))
