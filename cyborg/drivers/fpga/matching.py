# SPDX-License-Identifier: Apache-2.0
"""Comparison of the properties of an image with a region, before the image is fetched.

Custom properties of an image in the image service:

``accel:region_id``    the interface ids of the regions that the image fits, separated by commas
``accel:function_id``  the function that the image implements
``accel:vendor_id``    the PCI vendor of the cards that it fits: four hexadecimal digits
``accel:product_id``   the PCI product of these cards: four hexadecimal digits

Ids of regions and functions are 32 hexadecimal digits; here they may be upper-case and have dashes.
"""

import re
from collections.abc import Mapping

from cyborg.core.errors import DriverFailed

REGION, FUNCTION = "accel:region_id", "accel:function_id"
VENDOR, PRODUCT = "accel:vendor_id", "accel:product_id"
_ID = re.compile(r"[0-9a-f]{32}")


def parse_id(text: str | None) -> str | None:
    """Return an id of a region or function as 32 digits; None if the text is no id."""
    plain = (text or "").strip().lower().replace("-", "")
    return plain if _ID.fullmatch(plain) else None


def check_properties(
    properties: Mapping[str, str], vendor: str, product: str, interface_id: str | None
) -> None:
    """Raise DriverFailed if an image does not fit a region of a card.

    An image must name the interface id of the region. If the kernel does not show one, the image
    must name the vendor and the product of the card instead, and no region.
    """
    found = [parse_id(text) for text in properties.get(REGION, "").split(",")]
    if interface_id is not None:
        if interface_id not in found:
            raise DriverFailed(
                f"the image does not fit the region: its property {REGION} is "
                f"{properties.get(REGION)!r:.200}, the interface id of the region is {interface_id}"
            )
    elif REGION in properties:
        raise DriverFailed(
            f"the image is for regions with an interface id ({REGION}), and the region has none"
        )
    for key, expected in ((VENDOR, vendor), (PRODUCT, product)):
        if key not in properties and interface_id is not None:
            continue
        if properties.get(key, "").strip().lower().removeprefix("0x") != expected:
            raise DriverFailed(
                f"the image does not fit the card: its property {key} is "
                f"{properties.get(key)!r:.200}, expected {expected}"
            )
