# SPDX-License-Identifier: Apache-2.0
"""The gpu driver with mediated devices of a real kernel."""

from typing import Any

import pytest

from cyborg.core.naming import handle_uuid
from cyborg.tests.fixtures.machine import guest, kernel_module
from cyborg.tests.lab.programs import MTTY_FOREIGN

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.requires("kernel_headers")]

DEVICE = handle_uuid("labguest", "mtty", "mtty/mtty-2/3")


@pytest.fixture(scope="module")
def results() -> Any:
    return guest.run_program("mediate", [], *kernel_module.build())


def test_discover_reports_the_slots_of_the_enabled_type(results: Any) -> None:
    (device,) = results["report"]
    (part,) = device["deployables"]
    assert (device["address"], part["address"], part["resource_class"]) == ("mtty", "mtty", "VGPU")
    assert part["handles"][3]["type"] == "MDEV"
    assert part["handles"][3]["address"] == "mtty/mtty-2/3"
    # mtty has 24 ports, and a device of this type uses two.
    assert results["empty"]["slots"] == [*range(12)]
    assert results["empty"]["available"] == {"mtty-1": 24, "mtty-2": 12}


def test_prepare_creates_one_device_and_keeps_the_slots(results: Any) -> None:
    assert results["prepared"]["devices"] == {DEVICE: "mtty-2"}
    assert results["prepared"]["available"] == {"mtty-1": 22, "mtty-2": 11}
    assert results["prepared"]["slots"] == [*range(12)]


def test_device_of_others_is_not_offered(results: Any) -> None:
    assert results["foreign"]["devices"] == {DEVICE: "mtty-2", MTTY_FOREIGN: "mtty-1"}
    assert results["foreign"]["slots"] == [*range(11)]


def test_release_of_a_device_in_use_is_refused(results: Any) -> None:
    assert results["used"].startswith(f"{DEVICE} may still be used by a process: /dev/vfio/")
    assert results["used"].endswith("cannot be opened: Device or resource busy")


def test_prepare_reports_the_error_of_the_kernel(results: Any) -> None:
    assert results["missing type"] == "mtty has no type mtty-9 of mediated devices"
    assert results["exhausted"] == (
        "a device of type mtty-2 could not be created at mtty: No space left on device; "
        "available instances: 0"
    )
    assert results["full"]["slots"] == [*range(11)]
    assert len(results["full"]["devices"]) == 12


def test_slots_are_the_same_after_the_kernel_lost_all_devices(results: Any) -> None:
    assert results["unloaded"] == {
        "devices": {},
        "available": {},
        "slots": [],
        "remarks": ["rule 'parent=mtty,type=mtty-2' matches no parent of this host"],
    }
    assert results["booted"] == results["empty"]
    assert results["restored"] == results["prepared"]
    assert results["released"] == results["empty"]
