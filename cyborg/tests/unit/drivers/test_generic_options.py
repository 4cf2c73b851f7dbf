# SPDX-License-Identifier: Apache-2.0
"""Invalid options of the generic driver, and its remarks."""

from pathlib import Path

import os_resource_classes
import pytest

from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.drivers.generic import GenericDriver
from cyborg.testing.machine import HostTree

QAT, GPU, BRIDGE, NONE = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:09:00.0"


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.add_function(QAT)
    tree.add_function(GPU, "10de", "1eb8", "030200")
    tree.add_function(BRIDGE, class_code="060400")
    return tree


def make_driver(host: HostTree, *rules: str, adopt: tuple[str, ...] = ()) -> GenericDriver:
    return GenericDriver("gen0", {"devices": rules, "adopt": adopt}, host.root)


@pytest.mark.parametrize("name", sorted(os_resource_classes.STANDARDS))
def test_resource_class_of_another_service_is_rejected(host: HostTree, name: str) -> None:
    if name in ("FPGA", "PGPU", "VGPU"):
        assert make_driver(host, f"vendor=8086,resource_class={name}")
        return
    with pytest.raises(Misconfigured, match="one of FPGA, PGPU, VGPU, or CUSTOM_NAME"):
        make_driver(host, f"vendor=8086,resource_class={name}")


def test_remarks_list_rules_that_apply_to_no_device(host: HostTree) -> None:
    driver = make_driver(
        host, "vendor=8086", "vendor=8086,class=0b40", "vendor=15b3", "class=06", "class=03"
    )
    assert tuple(driver.remarks) == ()
    driver.discover()
    assert tuple(driver.remarks) == (
        "rule 'vendor=8086,class=0b40' applies to no device: earlier rules match all devices "
        "that it matches",
        "rule 'vendor=15b3' matches no device of this host",
        "rule 'class=06' matches no device of this host",
    )
    host.add_function("0000:0a:00.0", "15b3", "101e", "020000")
    driver.discover()
    assert len(driver.remarks) == 2, "a device that came takes its rule's remark away"
    skipping = make_driver(host, "vendor=8086,action=skip", "class=03")
    skipping.discover()
    assert not skipping.remarks, "a rule that skips decides, too"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (NONE, "the host has no PCI function at this address"),
        (BRIDGE, "it is a bridge, and bridges are never offered"),
        (GPU, "the host uses it: eth0 has the default route"),
    ],
)
def test_check_adoption_of_unavailable_device_raises(
    host: HostTree, address: str, reason: str
) -> None:
    host.add_interface("eth0", GPU)
    host.add_route("eth0")
    driver = make_driver(host, adopt=(address,))
    with pytest.raises(DriverFailed, match=f"{address} cannot be adopted: {reason}"):
        driver.check_adoption([address])
    driver.check_adoption([QAT])
    driver.discover()
    assert driver.remarks == (f"{address} cannot be adopted: {reason}",)
