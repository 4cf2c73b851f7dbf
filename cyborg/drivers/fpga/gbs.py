# SPDX-License-Identifier: Apache-2.0
"""Parser of the header of a GBS file, the format of images for Intel's DFL cards.

The file begins with a magic number of 16 bytes, the length of the metadata (32 bits, little-endian)
and the metadata, a JSON document with the ids of the interface and of the image's function
(``afu-image``). The raw image follows. Source: ``libbitstream/metadatav1.c`` and ``bitstream.c`` of
OPAE.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyborg.core.errors import DriverFailed
from cyborg.drivers.fpga.matching import parse_id

GBS_MAGIC = b"XeonFPGA\xb7GBSv001"
MAX_METADATA = 65536  # bytes; the metadata of a real image has about 1000
_HEADER = struct.Struct("<16sI")


@dataclass(frozen=True, slots=True)
class GbsHeader:
    """Header of a GBS file; the raw image begins at byte ``offset``."""

    offset: int
    interface_id: str
    function_id: str | None


def read_header(path: Path) -> GbsHeader:
    """Return the header of a GBS file. Raise DriverFailed if it is malformed."""
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(GBS_MAGIC):
            raise DriverFailed("the image is not a GBS file: its magic number is missing")
        length = _HEADER.unpack(head)[1]
        if not 0 < length <= MAX_METADATA:
            raise DriverFailed(f"the image has metadata of {length} bytes: the limit is 64 KiB")
        text = file.read(length)
    if len(text) < length:
        raise DriverFailed("the image ends in its metadata")
    interface, function = _read_ids(text)
    if (interface_id := parse_id(interface)) is None:
        raise DriverFailed("the metadata of the image has no valid interface-uuid")
    return GbsHeader(_HEADER.size + length, interface_id, parse_id(function))


def _read_ids(text: bytes) -> tuple[str | None, str | None]:
    """Return the ids of the interface and of the first function in the metadata."""
    try:
        image: Any = json.loads(text)["afu-image"]
        clusters = image.get("accelerator-clusters") or [{}]
        found = image.get("interface-uuid"), clusters[0].get("accelerator-type-uuid")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as exc:
        raise DriverFailed(f"the metadata of the image is malformed: {type(exc).__name__}") from exc
    return tuple(value if isinstance(value, str) else None for value in found)  # type: ignore[return-value]
