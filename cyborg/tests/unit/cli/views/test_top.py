# SPDX-License-Identifier: Apache-2.0
"""``cyborg top``, also in a terminal."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cyborg.cli import app
from cyborg.cli.common.listing import parse_interval
from cyborg.tests.fixtures.cli.cloud import ViewService
from cyborg.tests.fixtures.cli.terminal import ENTER, LEAVE, SHOW_CURSOR, Terminal, run_in_terminal
from cyborg.tests.unit.cli.common.test_rest import serving

COMMAND = str(Path(sys.executable).with_name("cyborg"))


@contextmanager
def top(
    service: ViewService, *arguments: str, term: str = "xterm-256color", columns: int = 80
) -> Iterator[Terminal]:
    """Run ``cyborg top`` in a terminal of 30 lines."""
    # The command writes a cache of entry points below HOME.
    with serving(service) as url, TemporaryDirectory() as home:
        options = ["--os-auth-type", "none", "--os-endpoint", url]
        command = [COMMAND, *options, "top", *arguments]
        env = {"TERM": term, "LANG": "C.UTF-8", "HOME": home}
        with run_in_terminal(command, env, columns, 30) as terminal:
            yield terminal


def assert_restored(terminal: Terminal) -> None:
    assert terminal.raw.rindex(LEAVE) > terminal.raw.rfind(ENTER)
    assert SHOW_CURSOR in terminal.raw
    assert terminal.attributes() == terminal.before
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize("text", ["0", "0.4", "3601", "-1", "nan", "inf", "x", ""])
def test_interval_out_of_range_is_rejected(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"from 0\.5 to 3600"):
        parse_interval(text)


def run(service: ViewService, *arguments: str) -> int:
    with serving(service) as url:
        return app.main(["--os-auth-type", "none", "--os-endpoint", url, "top", *arguments])


@pytest.mark.parametrize("variable", ["COLUMNS=20", "NO_COLOR=1", "TERM=dumb", "FORCE_COLOR=1"])
def test_top_without_terminal_prints_once_and_plain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    assert run(ViewService()) == 0
    expected = capsys.readouterr().out
    assert expected.startswith("Hosts  12 up  1 late  2 down  2 cordoned\n")
    assert "\x1b" not in expected
    monkeypatch.setenv(*variable.split("="))
    assert run(ViewService(), "--once") == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(("number", "noun"), [(1, "device that its"), (2, "devices that guests")])
def test_top_has_an_alarm_for_guests_without_their_devices(
    capsys: pytest.CaptureFixture[str], number: int, noun: str
) -> None:
    service = ViewService()
    assert run(service) == 0
    assert "that guests lack" not in capsys.readouterr().out
    service.summary = {**service.summary, "guest_devices_missing": number}
    assert run(service) == 0
    assert f"{number} {noun}" in capsys.readouterr().out


def test_top_makes_three_requests(capsys: pytest.CaptureFixture[str]) -> None:
    service = ViewService(1000)
    assert run(service, "-f", "json") == 0
    assert [request.partition("?")[0] for request in service.requests] == [
        "/v2/summary",
        "/v2/jobs",
        "/v2/discoveries",
    ]
    document = json.loads(capsys.readouterr().out)
    assert document["summary"]["hosts"]["up"] == 12
    assert (len(document["jobs"]), len(document["discoveries"])) == (2, 1)


def test_top_without_permission_fails(capsys: pytest.CaptureFixture[str]) -> None:
    service = ViewService()
    service.failure = 403
    assert run(service) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("the database is away (HTTP 403)\n")


@pytest.mark.slow
def test_top_in_terminal_refreshes_until_q() -> None:
    service = ViewService()
    with top(service, "--interval", "0.5") as terminal:
        # The last of the texts first: a read may end within the frame.
        terminal.wait_for("3 dead letters of nova-event")
        assert ENTER in terminal.raw
        assert "every 0.5 s" in terminal.text
        service.summary = {**service.summary, "outbox": []}
        service.summary["hosts"] = {"up": 77, "late": 0, "down": 0, "cordoned": 0}
        terminal.wait_for("77 up")
        service.failure = 500
        terminal.wait_for("the database is away (HTTP 500)")
        assert "data of" in terminal.text
        service.failure = None
        terminal.wait_for("every 0.5 s")
        terminal.resize(40, 10)
        terminal.wait_for("7 more alarms")
        terminal.type(b"xq")
        assert terminal.wait() == 0
        assert_restored(terminal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.matrix),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.matrix),
    ],
)
def test_top_ended_by_a_signal_restores_the_terminal(number: signal.Signals, status: int) -> None:
    with top(ViewService()) as terminal:
        terminal.wait_for("q quits")
        if number is signal.SIGINT:
            terminal.type(b"\x03")
        else:
            os.kill(terminal.process.pid, number)
        assert terminal.wait() == status
        assert_restored(terminal)


@pytest.mark.slow
def test_top_with_a_defect_restores_the_terminal() -> None:
    service = ViewService()
    with top(service, "--interval", "0.5") as terminal:
        terminal.wait_for("q quits")
        service.summary = {**service.summary, "hosts": None}
        assert terminal.wait() == 1
        assert_restored(terminal)


@pytest.mark.slow
def test_top_in_a_dumb_terminal_prints_once() -> None:
    with top(ViewService(), term="dumb", columns=200) as terminal:
        assert terminal.wait() == 0
        assert ENTER not in terminal.raw
        assert "Hosts  12 up" in terminal.text
