# SPDX-License-Identifier: Apache-2.0
"""FPGA cards with several functions: one manages the card, the others are for users.

A user of the management function can load another image into the card, write its flash, and reset
it. Sources:

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
"""

from collections.abc import Mapping

from cyborg.drivers.sysfs import PciFunction

VENDOR = "10ee"

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
"""Names of cards by the product id of the user function: that of the other function plus one."""

V80 = "Alveo V80"
V80_USER_FUNCTIONS = ("50b5", "50b6", "50bd", "50c1", "50c2")
"""User functions of the V80 and V80P: DMA, and with the shell SLASH a second one for registers."""

_MANAGEMENT: Mapping[tuple[str, str], str] = {
    **{(VENDOR, f"{int(product, 16) - 1:04x}"): name for product, name in USER_FUNCTIONS.items()},
    **{(VENDOR, product): V80 for product in ("50b4", "50bc")},
    **{(VENDOR, product): "golden image" for product in ("d000", "d004", "d00c", "d020")},
    **{("1d0f", product): "AWS F1" for product in ("1040", "1041")},
    ("1d0f", "9248"): "AWS F2",
    ("8086", "0b30"): "Intel N3000",
}
"""Names of cards by vendor and product id of the management function."""


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
            and other.product != function.product
        ):
            return other
    return None
