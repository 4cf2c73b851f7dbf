# SPDX-License-Identifier: Apache-2.0
"""Rules for mediated devices and functions that are no GPUs."""

from pathlib import Path

import pytest

from cyborg.core.errors import Misconfigured
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.testing.machine import HostTree


def test_rule_for_mediated_devices_does_not_select_other_functions(tmp_path: Path) -> None:
    """Such as the switches of the same maker, which are no parents without a type."""
    host = HostTree(tmp_path)
    host.add_function("0000:3d:00.0", "10de", "1af1", "068000", kernel_driver="nvidia")
    driver = GpuDriver("gpus", {"mdev_types": ["vendor=10de,type=nvidia-222"]}, host.root)
    assert driver.discover() == []
    assert driver.remarks == ("rule 'vendor=10de,type=nvidia-222' matches no parent of this host",)


@pytest.mark.parametrize("key", ["active_port=offer", "kernel_driver=nvidia", "erase=purge"])
def test_rule_for_mediated_devices_has_no_keys_of_other_devices(tmp_path: Path, key: str) -> None:
    with pytest.raises(Misconfigured, match=f"no {key.partition('=')[0]} in a rule for mediated"):
        GpuDriver("gpus", {"mdev_types": [f"vendor=10de,type=nvidia-222,{key}"]}, tmp_path)
