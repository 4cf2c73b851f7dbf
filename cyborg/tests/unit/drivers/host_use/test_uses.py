# SPDX-License-Identifier: Apache-2.0
"""Each use of a function by the host: refused with its reason, and offered when the use ends."""

import re
from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.drivers.generic import GenericDriver
from cyborg.testing.machine import HostTree
from cyborg.tests.unit.drivers.host_use.steps import A, Use
from cyborg.tests.unit.drivers.host_use.uses import USES

PAGE = Path(__file__).parents[5] / "doc/source/admin/host-use.rst"


def make_driver(host: HostTree) -> GenericDriver:
    return GenericDriver("g", {"devices": [f"address={A}"]}, host.root)


def find_reason(driver: GenericDriver) -> str | None:
    """Return why the function is not offered; None if it is."""
    (device,) = driver.discover()
    reason = device.vendor_board_info.get(NOT_OFFERED)
    assert (reason is None) == bool(device.deployables)
    return reason


@pytest.mark.parametrize("use", USES, ids=lambda use: use.name)
def test_use_is_refused_and_ends(use: Use, tmp_path: Path) -> None:
    host = HostTree(tmp_path)
    use.add(host)
    driver = make_driver(host)
    if use.end is not None:
        assert find_reason(driver) is None
    use.begin(host)
    assert find_reason(driver) == use.reason
    assert find_reason(make_driver(host)) == use.reason, "also for an agent that starts now"
    if "or adopt" not in use.reason and "unknown" not in use.reason:
        with pytest.raises(DriverFailed, match=re.escape(use.reason)):
            driver.check_adoption([A])
    if use.end is not None:
        use.end(host)
        assert find_reason(driver) is None


@pytest.mark.static
def test_page_has_each_use_with_its_reason() -> None:
    """Kinds of data and nodes in /dev are lists below the table."""
    text = PAGE.read_text()
    words = " ".join(text.split())
    offered, _, never = text.partition("\nNever offered:\n")
    for use in USES:
        if data := re.fullmatch(
            r"nvme0n1 holds (.*); erase it, .* or adopt the device", use.reason
        ):
            assert f'"{data[1]}"' in words, use.name
        elif node := re.fullmatch(r"(/dev/\S+) open", use.name):
            assert f"``{node[1]}``" in words, use.name
        else:
            row = f"   * - {use.name}\n     - {use.reason}\n"
            assert row in (never if use.end is None else offered), use.name
