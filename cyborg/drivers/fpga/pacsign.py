# SPDX-License-Identifier: Apache-2.0
"""Check of what an image signed by PACSign would change in an Intel card.

PACSign puts two blocks before the payload: a GBS file has them after its metadata, any other file
at its begin. Block 0 says what the payload is for. An image for the static region, the management
controller (BMC) or the keys of the card changes the flash for good, and ``fpgasupdate`` writes it
without a question. A server may ask for an image of its region only.

Block 0, little-endian: magic number (32 bits), length of the payload in bytes (32 bits), content
(8 bits), certificate (8 bits). Both blocks together have 1024 bytes. Source:
``python/pacsign/pacsign/database.py`` and ``reader.py`` of OPAE. The images for a D5005 have other
blocks, which only a region can load.
"""

import struct
from pathlib import Path

from cyborg.core.errors import DriverFailed

SIGNED_MAGIC = 0xB6EAFD19
BLOCKS = 1024  # bytes
_BLOCK_0 = struct.Struct("<IIBB")
_REGION = 2
_CONTENTS = {
    0: "the static region",
    1: "the BMC",
    _REGION: "a region",
    3: "the factory image",
    4: "the PXE ROM",
    5: "thermal settings of the static region",
    6: "thermal settings of a region",
    7: "the SDM",
    8: "a test of the static region",
    9: "the factory image of the BMC",
    10: "a test of a region",
    11: "a certificate of the static region",
    12: "a test of the SDM",
}
_CERTIFICATES = {1: "cancels a key", 2: "sets a root key", 3: "sets a root key"}


def check_image(path: Path, offset: int) -> None:
    """Raise DriverFailed for a signed image that is not one for a region.

    ``offset`` is the byte after the metadata of a GBS file. An image without these blocks is
    accepted: the card decides whether it loads it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(offset)
        head = file.read(_BLOCK_0.size)
    if len(head) < _BLOCK_0.size:
        return
    magic, length, content, certificate = _BLOCK_0.unpack(head)
    if magic != SIGNED_MAGIC:
        return
    if certificate:
        action = _CERTIFICATES.get(certificate, f"has a certificate of type {certificate}")
        raise DriverFailed(f"the image {action} of the card: it is not one for a region")
    if content != _REGION:
        target = _CONTENTS.get(content, f"content type {content}")
        raise DriverFailed(f"the image is signed for {target} of the card, not for a region")
    if offset + BLOCKS + length > size:
        raise DriverFailed(
            f"the image ends in its payload of {length} bytes: it has {size} bytes in all"
        )
