# SPDX-License-Identifier: Apache-2.0
"""FPGA cards of AMD (Xilinx) with two functions: one manages the card, the other one is for users.

Whoever has the management function can load another image into the card, and reset it. Sources: the
tables of management and user functions in ``src/runtime_src/core/pcie/driver/linux/xocl/devices.h``
of AMD's XRT; the names are those of the PCI id database and of AMD's manuals.
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
    "5049": "Versal VCK5000",
    "5059": "Alveo U55N",
    "505d": "Alveo U55C",
    "5061": "Alveo U50LV",
    "506d": "Alveo U50C",
    "5095": "Alveo V70",
}
"""Names of cards by the product id of the user function: that of the other function plus one."""


def management_product(user_product: str) -> str:
    """Return the product id of the management function of a user function."""
    return f"{int(user_product, 16) - 1:04x}"


def describe_management(function: PciFunction, functions: Mapping[str, PciFunction]) -> str | None:
    """Return why a management function is not offered; None for any other function."""
    if (user := find_user_function(function, functions)) is None:
        return None
    return (
        f"it manages the FPGA card whose user function is {user.address}; adopt it to give the "
        "whole card to one server"
    )


def find_user_function(
    function: PciFunction, functions: Mapping[str, PciFunction]
) -> PciFunction | None:
    """Return the user function that a management function manages, by slot; None if there is none.

    ``functions`` are those of the bus, by address.
    """
    if function.vendor != VENDOR:
        return None
    slot = function.address.rpartition(".")[0]
    for number in range(8):
        other = functions.get(f"{slot}.{number}")
        if (
            other is not None
            and other.vendor == VENDOR
            and other.product in USER_FUNCTIONS
            and management_product(other.product) == function.product
        ):
            return other
    return None
