# SPDX-License-Identifier: Apache-2.0
"""The column Schedulable of ``device-list``, and times."""

import argparse
from datetime import UTC, datetime
from typing import Any

import pytest

from cyborg.cli.common.progress import parse_time
from cyborg.cli.devices import format_schedulable, format_schedulable_until


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


@pytest.mark.parametrize(
    ("owned", "cleaning", "text"),
    [(0, 0, "drained"), (1, 0, "1 handle in use"), (2, 1, "3 handles in use")],
)
def test_format_schedulable_until_shows_the_drain(owned: int, cleaning: int, text: str) -> None:
    window = {"until": "2030-01-31T14:00:00.5+00:00", "owned": owned, "cleaning": cleaning}
    row = {"state": "maintaining", "placement": "in_sync", "maintenance": window}
    shown = format_schedulable_until(row)
    assert shown == f"no: maintaining until 2030-01-31T14:00:00Z, {text}"
    assert format_schedulable_until({**row, "state": "host_down"}) == "no: host down"


@pytest.mark.parametrize(
    "text",
    [
        "+2",
        "+h",
        "+1w",
        "+-1h",
        "+999999999d",
        "+1.5h",
        "1w",
        "-1h",
        "h",
        "++1h",
        "soon",
        "",
        "\u0661h",
    ],
)
def test_parse_time_of_other_text_is_refused_with_both_forms(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"2030-01-31T14:00:00Z.*\+90m"):
        parse_time(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1h", "2030-01-31T13:00:00+00:00"),
        ("+1h", "2030-01-31T13:00:00+00:00"),
        ("1d", "2030-02-01T12:00:00+00:00"),
        ("2030-02-01", "2030-02-01"),
        ("20300201T120000Z", "20300201T120000Z"),
    ],
)
def test_parse_time_accepts_durations_with_and_without_a_sign(text: str, expected: str) -> None:
    assert parse_time(text, datetime(2030, 1, 31, 12, tzinfo=UTC)) == expected
