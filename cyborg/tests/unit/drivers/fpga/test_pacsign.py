# SPDX-License-Identifier: Apache-2.0
"""Images that PACSign has signed: only those for a region may be loaded for a server."""

import struct
from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.fpga.images import BLOCKS, SIGNED_MAGIC, check_image
from cyborg.tests.fixtures.hosts.directory_images import DirectoryImages
from cyborg.tests.fixtures.hosts.gbs import make_gbs
from cyborg.tests.unit.drivers.fpga.simulated_fpga import (
    INTERFACE,
    NEW_FUNCTION,
    PAC,
    SimulatedFpgaDriver,
    SimulatedKernel,
)

IMAGE = "31111111-1111-4111-8111-111111111111"


def sign(content: int, certificate: int = 0, payload: bytes = b"\0" * 128) -> bytes:
    """Return a payload with the blocks of PACSign, as far as the check reads them."""
    head = struct.pack("<IIBB", SIGNED_MAGIC, len(payload), content, certificate)
    return head.ljust(BLOCKS, b"\0") + payload


@pytest.mark.parametrize("offset", [0, 20])
def test_image_for_a_region_is_accepted(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"G" * offset + sign(content=2))
    check_image(path, offset)


@pytest.mark.parametrize("content", [b"", b"\x19\xfd\xea", b"x" * 4096, b"\x93\x65\x56\x97" * 99])
def test_image_without_blocks_is_left_to_the_card(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "image"
    path.write_bytes(content)
    check_image(path, 0)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (sign(0), "signed for the static region of the card, not for a region"),
        (sign(1), "signed for the BMC of the card"),
        (sign(10), "signed for a test of a region"),
        (sign(77), "signed for content type 77"),
        (sign(2, certificate=1), "the image cancels a key of the card"),
        (sign(2, certificate=3), "the image sets a root key of the card"),
        (sign(2, certificate=9), "has a certificate of type 9"),
        (sign(2)[:-1], "ends in its payload of 128 bytes: it has 1151 bytes in all"),
    ],
)
def test_image_for_the_flash_of_the_card_is_refused(
    tmp_path: Path, image: bytes, reason: str
) -> None:
    path = tmp_path / "image"
    path.write_bytes(image)
    with pytest.raises(DriverFailed, match=reason):
        check_image(path, 0)


@pytest.mark.parametrize("programmer", ["dfl", "fpgasupdate", "fpgaconf"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (make_gbs(INTERFACE, NEW_FUNCTION, sign(content=1)), "signed for the BMC of the card"),
        (sign(content=1), "not a GBS file"),
    ],
)
def test_no_way_to_load_an_image_changes_the_flash(
    kernel: SimulatedKernel, tmp_path: Path, programmer: str, content: bytes, reason: str
) -> None:
    """Neither the ioctl nor a tool is called: there are none here."""
    kernel.add_dfl_card()
    images = DirectoryImages(tmp_path / "images")
    images.add(IMAGE, content, region_id=INTERFACE)
    options = {"devices": ("address=*",), "programmer": programmer}
    driver = SimulatedFpgaDriver("fpgas", options, kernel.root)
    driver.images = images
    with pytest.raises(DriverFailed, match=reason):
        driver.program(WorkItem("fpgas", PAC, PAC), IMAGE)
