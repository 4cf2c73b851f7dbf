# SPDX-License-Identifier: Apache-2.0
"""Options of the connection to Fabric Manager."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import Misconfigured
from cyborg.core.inventory.device import Device
from cyborg.drivers.base import Driver, VolatileMemory
from cyborg.drivers.device_sets.fabric import Fabric
from cyborg.drivers.gpu.fabric.options import OPTIONS, open_fabric
from cyborg.testing.fabric_manager import FabricManagerDouble, Programs


class Source(Driver):
    """A driver with the options."""

    name = "source"
    version = "1"
    OPTIONS = OPTIONS

    def discover(self) -> Sequence[Device]:
        return ()


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("fabric_address", "fm", "expected host:port or the path of a unix socket"),
        ("fabric_timeout", 15.5, "expected 0.1 to 15 s"),
        ("fabric_timeout", float("nan"), "expected 0.1 to 15 s"),
    ],
)
def test_open_fabric_invalid_option_is_misconfigured(
    option: str, value: Any, expected: str
) -> None:
    with pytest.raises(Misconfigured, match=rf"\[hgx\] {option}: found .*; {expected}"):
        open_fabric(Source("hgx", {option: value}))


def test_options_that_name_files_are_of_the_host_only() -> None:
    names = {option.name for option in OPTIONS if option.host_only}
    assert names == {"fabric_address", "fabric_library", "fabric_command", "fabric_config"}


@pytest.mark.requires("compiler")
@pytest.mark.slow
def test_open_fabric_uses_options_and_memory_of_the_driver(
    programs: Programs, double: FabricManagerDouble, tmp_path: Path
) -> None:
    options = {"fabric_address": double.address, "fabric_library": str(programs.library)}
    driver = Source("hgx", options, tmp_path)
    fabric: Fabric = open_fabric(driver)
    driver.memory = VolatileMemory()
    assert fabric.read().problem is None
    assert driver.memory.get(f"fabric:{double.address}") is not None
