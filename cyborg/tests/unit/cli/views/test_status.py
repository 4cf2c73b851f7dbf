# SPDX-License-Identifier: Apache-2.0
"""The lines of ``cyborg top``."""

from typing import Any

import pytest

from cyborg.cli.views.text import ASCII, UNICODE, Canvas, Glyphs
from cyborg.cli.views.top import build_lines
from cyborg.tests.fixtures.cli.cloud import AN_HOUR_AGO, UUIDS, snapshot

QUIET: dict[str, Any] = {
    "hosts": {"up": 1, "late": 0, "down": 0, "cordoned": 0},
    "services": [],
    "devices": {"total": 0, "disabled": 0, "unhealthy": 0, "maintenance": 0},
    "providers": {"total": 0, "stale": 0, "failing": 0},
    **{name: [] for name in ("down_services", "unhealthy_devices", "jobs", "outbox")},
}


def texts(width: int, glyphs: Glyphs = UNICODE, height: int | None = None, **changes: Any) -> str:
    lines = build_lines(snapshot(**changes), Canvas(width, glyphs), height)
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize("width", [20, 33, 59, 60, 80, 200])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_lines_fit_the_width_and_the_characters(width: int, glyphs: Glyphs) -> None:
    lines = build_lines(snapshot(), Canvas(width, glyphs))
    assert max(line.cell_len for line in lines) <= width
    assert max(line.cell_len for line in lines) >= min(width, 100)
    text = "\n".join(line.plain for line in lines)
    assert text.isascii() is (glyphs is ASCII)
    assert "\x1b" not in text


@pytest.mark.parametrize("height", range(1, 45))
def test_lines_fit_the_height_and_say_what_is_omitted(height: int) -> None:
    for width in (20, 80):
        lines = build_lines(snapshot(), Canvas(width, UNICODE), height)
        assert len(lines) <= height
    text = texts(80, UNICODE, height)
    if height >= 12:
        assert "3 dead letters" in text or "8 more alarms" in text
        assert "resource classes" in text or "FPGA" in text
        assert "more jobs" in text or "discovery" in text


def test_lines_name_alarms_with_their_age() -> None:
    text = texts(200)
    assert "! 3 dead letters of nova-event, the oldest for 1 h" in text
    assert "! 1 of 2 update jobs past the deadline" in text
    assert "! cyborg-agent on compute-7.example.org down, last seen 1 h ago" in text
    assert "! compute-1 0000:3b:00.0 unhealthy for 1 h" in text
    assert "! 1 resource providers failing in Placement" in text
    assert "notification" not in text


def test_lines_count_alarms_that_the_summary_does_not_name() -> None:
    down = [{"binary": "cyborg-agent", "state": "down", "count": 500}]
    text = texts(80, services=down)
    # The summary has named three of them.
    assert "  497 more alarms" in text
    assert text.count("!") == 8


def test_lines_of_a_quiet_cloud_have_no_alarm() -> None:
    text = texts(80, **QUIET)
    assert "Alarms  none" in text
    assert "!" not in text


def test_bar_shows_each_use() -> None:
    (line,) = [line for line in texts(80, ASCII).splitlines() if line.startswith("CUSTOM")]
    assert line == (
        "CUSTOM_INTEL_QAT_VIRTUAL_~ #%=. 100/256 owned, 120 free, 4 dirty, 32 unavailable"
    )
    (line,) = [line for line in texts(80, ASCII).splitlines() if line.startswith("FPGA")]
    # One owned handle of a thousand is seen.
    assert line.count("#") == 1
    (line,) = [line for line in texts(80, ASCII).splitlines() if line.startswith("PGPU")]
    assert "." not in line


def test_bar_of_a_summary_without_cordoned_handles_is_shown() -> None:
    uses = {"free": 2, "owned": 1, "dirty": 0, "draining": 1}
    text = texts(80, resource_classes=[{"resource_class": "FPGA", "total": 4, **uses}])
    assert "1/4 owned, 2 free, 1 unavailable" in text


def test_lines_show_work_with_its_progress() -> None:
    text = texts(200)
    assert "update generic, 1 h: 4 done, 8 pending" in text
    assert f"prepare {UUIDS[12][:8]} on compute-3, 0 s: programs the image 3/16" in text
    assert "error: the card [2J did not answer" in text
    assert f"discovery {UUIDS[13][:8]}, 0 s: 9 DONE, 3 IN-PROGRESS" in text


def test_lines_count_jobs_that_are_not_listed() -> None:
    jobs = [{"kind": "prepare", "count": 40, "overdue": 0, "oldest": AN_HOUR_AGO}]
    # Two jobs and a discovery are listed.
    assert "  38 more jobs" in texts(80, jobs=jobs)
