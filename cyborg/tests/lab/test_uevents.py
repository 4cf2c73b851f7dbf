# SPDX-License-Identifier: Apache-2.0
"""The uevent socket of the agent on a real kernel: received and lost events."""

from collections.abc import Mapping
from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest

pytestmark = [pytest.mark.lab, pytest.mark.matrix]

DRIVE_PROGRAM = "uevents"


@pytest.fixture(scope="module")
def counts(drive_programs: Mapping[str, str]) -> dict[str, Any]:
    """Return the numbers of received and lost events by action."""
    events: dict[str, Any] = guest.read_result(drive_programs[DRIVE_PROGRAM])
    return events


def test_subscribed_uevents_are_delivered(counts: dict[str, Any]) -> None:
    assert counts["sriov_drivers_autoprobe 0"] == [0, 0]
    for act in ("sriov_numvfs 2", "sriov_numvfs 0", "driver/unbind 0"):
        events, overflows = counts[act]
        assert events >= 1, act
        assert overflows == 0


def test_uevent_burst_fits_into_the_buffer(counts: dict[str, Any]) -> None:
    assert counts["storm"] == [3000, 0]


def test_small_buffer_overflow_is_detected_and_reading_continues(counts: dict[str, Any]) -> None:
    events, overflows = counts["small"]
    assert events < 3000
    assert overflows >= 1
    assert counts["small again"] == [1, 0]


def test_uevents_of_other_subsystems_are_filtered(counts: dict[str, Any]) -> None:
    assert counts["deaf"][0] == 0
