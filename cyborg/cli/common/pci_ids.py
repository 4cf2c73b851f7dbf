# SPDX-License-Identifier: Apache-2.0
"""Display names of PCI vendors and products from the PCI id database of this machine.

An agent reports the names that udev of its host has. Missing names are added here, for display
only. Without a database the ids are shown.
"""

import functools
import gzip
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Agents do not add missing names: reports, their digests and filters would depend on the database
# of each host. One database gives the devices of all hosts the same names.
# Paths of the database in the packages hwdata and pciutils, in order of preference.
FILES = (
    Path("/usr/share/hwdata/pci.ids"),
    Path("/usr/share/misc/pci.ids"),
    Path("/usr/share/misc/pci.ids.gz"),
    Path("/var/lib/pciutils/pci.ids"),
    Path("/usr/share/pci.ids"),
)

# Model of fake devices, as existing clients of the API expect it.
UNKNOWN = "miss model info"

_ID = re.compile(r"(?:0x)?([0-9a-f]{4})")
_PAIR = re.compile(r"([0-9a-f]{4}):([0-9a-f]{4})")

# Maps a vendor id to the name of the vendor and the names of its products by product id.
VendorNames = Mapping[str, tuple[str, Mapping[str, str]]]


def parse_names(lines: Iterable[str]) -> VendorNames:
    """Parse the lines of a ``pci.ids`` file; subsystems and classes are skipped."""
    names: dict[str, tuple[str, dict[str, str]]] = {}
    products: dict[str, str] | None = None
    for line in lines:
        depth = len(line) - len(line.lstrip("\t"))
        code, _, name = line.strip().partition("  ")
        if depth == 0 and not line.startswith("#"):
            # None: the lines below a class, such as "C 03", are no products.
            products = {} if re.fullmatch(r"[0-9a-f]{4}", code) else None
            if products is not None:
                names[code] = (name, products)
        elif depth == 1 and products is not None:
            products[code] = name
    return names


# The file has tens of thousands of lines, and each row of a table asks for a name.
@functools.cache
def read_names() -> VendorNames:
    """Return the names in the database of this machine, cached; empty without a database."""
    for path in FILES:
        try:
            open_file = gzip.open if path.suffix == ".gz" else open
            # errors: one wrong byte must not hide all names.
            with open_file(path, "rt", encoding="utf-8", errors="replace") as file:
                return parse_names(file)
        except (OSError, EOFError, zlib.error):
            # Not installed, not readable for this user, or the rest of an interrupted update.
            continue
    return {}


def add_names(row: Mapping[str, Any], names: VendorNames | None = None) -> dict[str, Any]:
    """Return a device with the names of its vendor and model added, if they are missing.

    A model that the agent reported is kept and, without a product id, its vendor, too. A vendor
    that is not in the database keeps its id.
    """
    vendor_id, product_id = _ids(row)
    model = str(row.get("model") or "")
    lacks_model = model in ("", UNKNOWN) or _PAIR.fullmatch(model.lower()) is not None
    if vendor_id is None or (product_id is None and not lacks_model):
        return dict(row)
    database = read_names() if names is None else names
    vendor, products = database.get(vendor_id, (None, {}))
    shown = dict(row)
    if lacks_model and product_id is not None:
        shown["model"] = products.get(product_id, f"{vendor_id}:{product_id}")
    elif lacks_model:
        shown["model"] = vendor_id
    if vendor is not None:
        shown["vendor"] = f"{vendor} ({vendor_id})"
    return shown


def _ids(row: Mapping[str, Any]) -> tuple[str | None, str | None]:
    pair = _PAIR.fullmatch(str(row.get("model") or "").lower())
    if pair is not None:
        return pair[1], pair[2]
    board = row.get("std_board_info")
    # Only hardware-list has fields of their own; a device has them in the JSON text of its board.
    product = row.get("product_id")
    if product is None and isinstance(board, str):
        match = re.search(r'"product_id": *"([^"]*)"', board)
        product = match and match[1]
    return _id(row.get("vendor_id") or row.get("vendor")), _id(product)


def _id(value: Any) -> str | None:
    match = _ID.fullmatch(str(value or "").lower())
    return match and match[1]
