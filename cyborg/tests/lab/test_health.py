# SPDX-License-Identifier: Apache-2.0
"""The health measurements of the generic driver on a real kernel."""

from collections.abc import Mapping
from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest

pytestmark = [pytest.mark.lab, pytest.mark.matrix]

DRIVE_PROGRAM = "health"


@pytest.fixture(scope="module")
def measurements(drive_programs: Mapping[str, str]) -> tuple[str, list[dict[str, Any]]]:
    """Return the measurements: at first, after an Xid of a program, without kernel driver."""
    address, values = guest.read_result(drive_programs[DRIVE_PROGRAM])
    return address, values


def test_working_drive_is_healthy(measurements: tuple[str, list[dict[str, Any]]]) -> None:
    address, (first, _, _) = measurements
    assert first[address][0] == "ok"


def test_integrated_functions_have_no_link_state(
    measurements: tuple[str, list[dict[str, Any]]],
) -> None:
    _, (first, _, _) = measurements
    reasons = {reason.partition(" has ")[2] for _, reason in first.values() if reason}
    assert reasons == {
        "no kernel driver, expected nvme",
        "the kernel driver virtio-pci, expected nvme",
    }


def test_xid_written_by_a_program_is_ignored(
    measurements: tuple[str, list[dict[str, Any]]],
) -> None:
    address, (_, second, _) = measurements
    assert second[address][0] == "ok"


def test_drive_without_kernel_driver_is_unhealthy(
    measurements: tuple[str, list[dict[str, Any]]],
) -> None:
    address, (_, _, third) = measurements
    assert third[address] == ["unhealthy", f"{address} has no kernel driver, expected nvme"]
