# SPDX-License-Identifier: Apache-2.0
"""Programs that the lab tests run in the guest, each with one line of results."""

# Uuid of a mediated device that the driver did not create.
MTTY_FOREIGN = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"

# Interface id of the region in ``modules/edufpga.c``.
FPGA_INTERFACE = "69528db6eb31577a8c3668f9faa081f6"

FPGA_OTHER_INTERFACE = "9926ab6d6c925a68aabca7d84c545738"

# Functions of images that can be loaded.
FPGA_FUNCTIONS = {"first": "aa" * 16, "second": "bb" * 16}

# Last words of images for ``modules/edudfl.c``.
DFL_WORDS = {"first": "aaaaaaaa", "second": "bbbbbbbb", "fail": "deadbeef"}

# Uuids of images by their mode; ``other`` is for another region.
FPGA_IMAGES = {
    name: f"{number}1111111-1111-4111-8111-111111111111"
    for number, name in enumerate(("first", "second", "other", "refuse", "fail"))
}
