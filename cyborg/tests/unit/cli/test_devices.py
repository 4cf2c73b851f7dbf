# SPDX-License-Identifier: Apache-2.0
"""The column Schedulable of ``device-list``."""

from typing import Any

import pytest

from cyborg.cli.devices import format_schedulable


@pytest.mark.parametrize(
    ("state", "placement", "text"),
    [
        ("ready", "in_sync", "yes"),
        ("ready", "stale", "opening"),
        ("host_down", "stale", "closing: host down"),
        ("maintaining", "in_sync", "no: maintaining"),
        ("ready", "error", "error in Placement"),
        ("ready", None, "no: nothing to offer"),
    ],
)
def test_format_schedulable_follows_state_and_placement(
    state: str, placement: str | None, text: str
) -> None:
    assert format_schedulable({"state": state, "placement": placement}) == text


def test_format_schedulable_withheld_device_is_not_offered() -> None:
    row: dict[str, Any] = {"state": "ready", "placement": None}
    assert (
        format_schedulable(row | {"vendor_board_info": '{"not_offered": "sda"}'})
        == "no: not offered"
    )
