# SPDX-License-Identifier: Apache-2.0
"""SR-IOV layouts and a network card on a real kernel: virtual functions come and go."""

import re
from pathlib import Path
from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest

pytestmark = [pytest.mark.lab, pytest.mark.long]

DRIVE = "0000:01:00.0"
VIRTUAL = [f"0000:01:00.{number}" for number in range(1, 5)]
CARD = ("-netdev", "user,id=card0", "-device", "e1000e,netdev=card0,romfile=")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of the steps of the program by name."""
    disk: Path = tmp_path_factory.mktemp("disk") / "disk.raw"
    disk.write_bytes(bytes(16 << 20))
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME, *CARD]
    devices += ["-drive", f"file={disk},format=raw,if=none,id=disk0"]
    devices += ["-device", "nvme-ns,drive=disk0,bus=nvme0"]
    return guest.run_program("layouts", devices)


def test_layouts_are_predicted_as_the_kernel_creates_them(results: Any) -> None:
    whole = results["before"]
    assert (whole["layout"], whole["handles"]) == ("vfs-0", [DRIVE])
    assert whole["layouts"] == {f"vfs-{n}": {"CUSTOM_NVME": n or 1} for n in (0, 2, 4)}
    for step, count in (("two", 2), ("four", 4)):
        found = results[step]
        assert (found["error"], found["numvfs"]) == (None, str(count))
        assert (found["layout"], found["handles"]) == (f"vfs-{count}", VIRTUAL[:count])
        assert found["layouts"] == whole["layouts"]


def test_no_kernel_driver_binds_to_new_virtual_functions(results: Any) -> None:
    assert results["four"]["drivers"] == ["driver"] * 4  # the link does not exist


def test_removal_is_refused_while_one_is_open_by_vfio(results: Any) -> None:
    refused = results["open"]
    assert f"the virtual function {VIRTUAL[1]} is or may be in use: /dev/vfio/" in refused["error"]
    assert "Device or resource busy" in refused["error"]
    assert (refused["numvfs"], refused["handles"]) == ("4", VIRTUAL)


def test_removal_of_closed_functions_gives_the_whole_drive_back(results: Any) -> None:
    closed = results["closed"]
    assert (closed["error"], closed["numvfs"], closed["handles"]) == (None, "0", [DRIVE])


def test_drive_with_swap_is_not_changed(results: Any) -> None:
    used = results["used"]
    assert used["error"] == f"{DRIVE} cannot be changed: the host uses it: nvme0n1 holds swap"
    assert (used["numvfs"], used["handles"], used["layout"]) == ("0", [], "vfs-0")


def test_network_card_is_offered_with_its_network_until_the_host_uses_it(results: Any) -> None:
    unused, used, away = (results[f"nic {step}"] for step in ("unused", "used", "given away"))
    (handle,) = unused["device"]["deployables"][0]["handles"]
    assert handle["info"]["physical_network"] == "physnet1"
    assert "CUSTOM_PHYSNET_PHYSNET1" in unused["device"]["deployables"][0]["traits"]
    assert unused["remarks"] == [
        "physical_networks: net2:eth9 matches no network card of this host"
    ]
    assert used["device"]["deployables"] == []
    # QEMU also announces itself as an IPv6 router, so the first reason depends on the time.
    reason = used["device"]["vendor_board_info"]["not_offered"]
    assert re.search(r" has (an address of the host|a route|the default route)", reason)
    assert used["health"] == ["ok", None]
    assert int(used["device"]["std_board_info"]["link_speed_mbps"]) == 1000
    assert away["device"]["deployables"][0]["handles"] == [handle], "its network is remembered"
