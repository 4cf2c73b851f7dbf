# SPDX-License-Identifier: Apache-2.0
"""The rules of the nvme driver on a real kernel: when it offers a drive, and how it erases it."""

from collections.abc import Mapping
from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest
from cyborg.tests.lab.test_nvme_driver import SECRETS

pytestmark = [pytest.mark.lab, pytest.mark.matrix]

DRIVE_PROGRAM = "erase_rules"


@pytest.fixture(scope="module")
def results(drive_programs: Mapping[str, str]) -> Any:
    """Return the results of the program ``erase_rules``."""
    return guest.read_result(drive_programs[DRIVE_PROGRAM])


def test_drive_with_partitions_is_not_offered_until_they_are_erased(results: Any) -> None:
    """The guest has no udev: the disk itself is read."""
    before, after = results[0]
    reason = "nvme0n1 holds a partition table (dos); erase it, for example with wipefs, or adopt "
    assert before == [reason + "the device", ["/dev/nvme0n1p1"]]
    assert after == [None, []]


@pytest.mark.parametrize("policy", ["purge", "block|crypto"])
def test_drive_without_a_permitted_method_is_neither_scheduled_nor_erased(
    results: Any, policy: str
) -> None:
    """QEMU's controller supports only Format NVM with user data erase."""
    reason, error, lines, secrets = results[1][policy]
    assert "can be erased only by: format, user data erase. Permit that with erase=clear" in reason
    assert error == reason
    assert lines == []
    assert secrets == SECRETS


def test_drive_is_erased_by_the_second_choice_of_its_rule(results: Any) -> None:
    reason, error, lines, secrets = results[1]["block|clear"]
    assert (reason, error, secrets) == (None, "", 0)
    (line,) = lines
    assert line.startswith(
        "Erased 1 namespaces by format, user data erase (policy erase=block|clear), verified: "
    )
