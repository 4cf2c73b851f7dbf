# SPDX-License-Identifier: Apache-2.0
"""The fpga driver with FPGA managers, bridges, regions and DFL drivers of a real kernel."""

from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest, kernel_module
from cyborg.tests.lab.programs import DFL_WORDS, FPGA_FUNCTIONS, FPGA_IMAGES, FPGA_INTERFACE

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.requires("kernel_headers")]

REGION = f"CUSTOM_FPGA_REGION_{FPGA_INTERFACE.upper()}"
FIRST, SECOND = (f"CUSTOM_FPGA_FUNCTION_{FPGA_FUNCTIONS[n].upper()}" for n in ("first", "second"))


@pytest.fixture(scope="module")
def results() -> Any:
    modules = kernel_module.build(kernel_module.FPGA)
    devices = (*guest.IOMMU, *guest.EDU, *guest.SHARED_MEMORY)
    return guest.run_program("reconfigure", devices, *modules)


def test_discover_reports_the_region_of_the_kernel(results: Any) -> None:
    device = results["report"]
    (deployable,) = device["deployables"]
    assert (device["type"], deployable["resource_class"]) == ("FPGA", "FPGA")
    assert device["std_board_info"]["regions"] == "1"
    assert device.get("deliverable", True)
    assert deployable["attributes"]["fpga_region"] == "region0"
    assert deployable["attributes"]["fpga_manager"] == "fpga0"
    assert results["empty"] == {
        "image": None,
        "traits": [REGION],
        "handles": [device["address"]],
        "loaded": [f"{'11' * 16} on"],
        "health": ["ok"],
        "files": [],
    }


def loaded(results: Any, step: str) -> tuple[Any, ...]:
    """Return image, traits, function and traffic, and health of the card after a step."""
    return tuple(results[step][key] for key in ("image", "traits", "loaded", "health", "files"))


IMAGE_1: tuple[Any, ...] = (FPGA_IMAGES["first"], [FIRST, REGION], [f"{'aa' * 16} on"], ["ok"], [])
IMAGE_2: tuple[Any, ...] = (
    FPGA_IMAGES["second"],
    [SECOND, REGION],
    [f"{'bb' * 16} on"],
    ["ok"],
    [],
)


def test_program_loads_the_image_and_another_process_shows_it(results: Any) -> None:
    assert results["first"]["error"] == ""
    assert loaded(results, "first") == loaded(results, "restarted") == IMAGE_1


def test_image_for_another_region_is_refused_without_a_write(results: Any) -> None:
    assert "its property accel:region_id is" in results["other"]["error"]
    assert loaded(results, "other") == IMAGE_1
    assert FPGA_IMAGES["other"] not in results["opened"]


@pytest.mark.parametrize(
    ("step", "reason", "state"),
    [("refuse", "Invalid argument", "write init error"), ("fail", "Input/output", "write error")],
)
def test_failed_image_leaves_the_previous_one(
    results: Any, step: str, reason: str, state: str
) -> None:
    error = results[step]["error"]
    assert reason in error
    assert f"its state is '{state}'" in error
    assert error.endswith(f"the previous image {FPGA_IMAGES['first']} was restored")
    assert loaded(results, step) == IMAGE_1


def test_prepare_loads_the_image_of_a_function_once(results: Any) -> None:
    assert loaded(results, "prepared") == IMAGE_2
    assert results["opened"].count(FPGA_IMAGES["second"]) == 1


def test_card_of_a_server_keeps_its_traits_and_is_unknown_afterwards(results: Any) -> None:
    attached, returned = results["attached"], results["returned"]
    assert "no FPGA region: it is bound to the kernel driver vfio-pci" in attached["error"]
    assert (attached["image"], attached["loaded"]) == (FPGA_IMAGES["second"], [])
    assert attached["traits"] == [SECOND, REGION]
    assert (returned["image"], returned["traits"]) == (None, [REGION])
    assert returned["handles"] == attached["handles"] == results["empty"]["handles"]


def test_discover_reports_the_port_of_a_dfl_card(results: Any) -> None:
    device = results["dfl"]["report"]
    (deployable,) = device["deployables"]
    assert device["std_board_info"]["static_region_id"] == "0x23000110010310"
    assert device["std_board_info"]["ports"] == "1"
    assert deployable["attributes"]["function_id"] == "1" * 32
    assert {REGION, f"CUSTOM_FPGA_FUNCTION_{'1' * 32}"} <= set(deployable["traits"])


@pytest.mark.parametrize("name", ["first", "second"])
def test_dfl_ioctl_changes_the_function_of_the_port(results: Any, name: str) -> None:
    assert results["dfl"][name] == {"error": "", **describe_port(name)}


def describe_port(name: str) -> dict[str, Any]:
    """Return what is shown of a healthy port with an image."""
    function = DFL_WORDS[name] * 4
    return {
        "image": FPGA_IMAGES[name],
        "function": function,
        "port": function,
        "health": ["ok"],
    }


def test_dfl_file_for_another_region_is_refused(results: Any) -> None:
    found = results["dfl"]["other"]
    assert "the file of the image is for the interface id" in found["error"]
    assert found["error"].endswith("the region is unchanged")
    assert found == {"error": found["error"], **describe_port("second")}


def test_dfl_error_of_the_hardware_leaves_port_in_reset_until_it_is_bound_again(
    results: Any,
) -> None:
    """The kernel loads the previous image, and does not enable the port."""
    found = results["dfl"]["fail"]
    assert "Input/output error; the manager fpga1 shows 'reconfig CRC error'" in found["error"]
    assert f"previous image {FPGA_IMAGES['second']} could not be restored" in found["error"]
    assert "is in reset, as after a failed reconfiguration: bind the physical" in found["error"]
    assert (found["image"], found["port"], found["health"]) == (None, None, ["unhealthy"])
    assert results["dfl"]["again"] == {"error": "", **describe_port("first")}
