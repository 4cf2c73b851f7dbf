# SPDX-License-Identifier: Apache-2.0
"""A device of a real kernel in a domain of libvirt that is no server: refused until it ends."""

from collections.abc import Mapping

import pytest

from cyborg.tests.fixtures.machine import guest

pytestmark = [
    pytest.mark.lab,
    pytest.mark.matrix,
    pytest.mark.requires("libvirt_qemu", "libvirt_python"),
]

USED = "it is used by the domain guest1 of libvirt"
REASONS: Mapping[str, str | None] = {
    "no domain": None,
    "a defined domain": USED,
    "a running domain": USED,
    "a stopped domain": USED,
    "no domain any more": None,
    "a running server": None,
    "a stopped server": None,
    "a stopped server without its request": None,
    "a server without the device": None,
    "the same server with the device again": USED,
    "no server any more": None,
}


def test_device_of_a_domain_is_refused_until_the_domain_does_not_have_it() -> None:
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.EDU]
    assert guest.run_program("domains", devices, memory="2G") == REASONS
