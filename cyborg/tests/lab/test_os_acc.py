# SPDX-License-Identifier: Apache-2.0
"""Devices of a real kernel in a running domain of libvirt, by the XML of os_acc."""

from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest, kernel_module, prerequisites

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.requires("libvirt_qemu")]


@pytest.fixture(scope="module")
def results() -> Any:
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME]
    # The virtual function is attached also on a machine without kernel headers.
    found = prerequisites.find_missing("kernel_headers") is None
    modules = kernel_module.build() if found else []
    return guest.run_program("attach", devices, *modules, memory="3G")


def test_virtual_function_is_attached_with_its_alias(results: Any) -> None:
    found = results["pci"]
    assert (found["before"], found["driver"]) == (None, "vfio-pci")
    assert found["attached"] == "ua-cyborg-c2f0c1b0-2c4b-4f59-8f39-0d6d1d2f7c01"


def test_virtual_function_is_detached_by_its_source(results: Any) -> None:
    found = results["pci"]
    assert found["request"] == ""
    assert found["released"] is None
    assert "not found" in found["detach again"]


def test_alias_prevents_a_second_attachment(results: Any) -> None:
    assert "non unique alias" in results["pci"]["again"]


@pytest.mark.requires("kernel_headers")
def test_mediated_device_is_attached_and_its_removal_requested(results: Any) -> None:
    """The removal needs a guest: a reset does not confirm it below a bridge of conventional PCI."""
    found = results["mdev"]
    assert found["before"] is None
    assert found["attached"] == "ua-cyborg-c2f0c1b0-2c4b-4f59-8f39-0d6d1d2f7c02"
    assert "non unique alias" in found["again"]
    assert found["request"] == ""
