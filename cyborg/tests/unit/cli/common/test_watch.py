# SPDX-License-Identifier: Apache-2.0
"""The option --watch, in a terminal and in a pipe."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
from webob import Request, Response

from cyborg.cli import app
from cyborg.cli.common import listing
from cyborg.cli.common.base import Command
from cyborg.tests.fixtures.cli.terminal import LEAVE, Terminal, run_in_terminal
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.unit.cli.common.test_rest import serving

COMMAND = str(Path(sys.executable).with_name("cyborg"))
UUID = "6a1c3e9d-5f70-4248-8b1e-0c9d7e5f3a21"
CHANGING = {"arq-create", "arq-bind", "audit", "device-layout-set", "discover-services"}


class Jobs:
    """An API with jobs, or an error."""

    def __init__(self, number: int = 1) -> None:
        self.states = ["pending"] * number
        self.failure = 0

    def __call__(self, request: Request) -> Response:
        if self.failure:
            return Response(json={"error_message": "away"}, status=self.failure)
        row = {"uuid": UUID, "kind": "install", "subject": "gpu", "progress": {}}
        return Response(json={"jobs": [{**row, "state": state} for state in self.states]})


@contextmanager
def watching(api: Jobs, rows: int = 24) -> Iterator[Terminal]:
    with serving(api) as url:
        options = ["--os-auth-type", "none", "--os-endpoint", url]
        command = [COMMAND, *options, "job-list", "--watch", "0.5"]
        env = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "HOME": "/nonexistent"}
        with run_in_terminal(command, env, 80, rows) as terminal:
            yield terminal


@pytest.mark.slow
@pytest.mark.parametrize("key", sample([b"q", b"\x03"], b"q"))
def test_watch_in_a_terminal_refreshes_until_a_key(key: bytes) -> None:
    api = Jobs()
    with watching(api) as terminal:
        terminal.wait_for("| pending |")
        assert "cyborg job-list" in terminal.text
        api.states = ["done"]
        terminal.wait_for("| done ")
        api.failure = 503
        terminal.wait_for("away (HTTP 503)")
        api.failure, api.states = 0, []
        terminal.wait_for("no jobs")
        terminal.type(key)
        assert terminal.wait() == 0
        assert terminal.raw.endswith(LEAVE) or LEAVE in terminal.raw


@pytest.mark.slow
def test_watch_shows_how_many_lines_do_not_fit() -> None:
    with watching(Jobs(30), rows=10) as terminal:
        terminal.wait_for("26 more lines")
        terminal.type(b"q")
        assert terminal.wait() == 0


@pytest.mark.slow
def test_watch_in_a_pipe_repeats_until_interrupted() -> None:
    api = Jobs()
    with serving(api) as url:
        line = f"--os-auth-type none --os-endpoint {url} job-list --watch 0.5 -f json --noindent"
        process = subprocess.Popen(
            [COMMAND, *line.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "LANG": "C.UTF-8"},
        )
        assert process.stdout is not None
        assert process.stderr is not None
        for state in ("pending", "done"):
            api.states = [state]
            while json.loads(process.stdout.readline())[0]["State"] != state:
                pass
        api.failure = 503
        assert process.stderr.readline() == "away (HTTP 503)\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130


def test_watch_fails_if_the_first_request_fails(capsys: pytest.CaptureFixture[str]) -> None:
    api = Jobs()
    api.failure = 503
    with serving(api) as url:
        connection = ["--os-auth-type", "none", "--os-endpoint", url]
        assert app.main([*connection, "job-list", "--watch"]) == 1
    assert capsys.readouterr().err == "away (HTTP 503)\n"


def test_every_list_that_changes_nothing_can_be_watched() -> None:
    entries = metadata.entry_points(group="cyborg.cli")
    classes = {entry.name: entry.load() for entry in entries}
    lists = {name: cls for name, cls in classes.items() if issubclass(cls, listing.Lister)}
    watched = {name for name, cls in lists.items() if has_watch(cls)}
    assert watched == set(lists) - CHANGING
    assert {name for name in classes if name.endswith("-list")} <= watched


def has_watch(command: type[Command]) -> bool:
    return any(option.dest == "watch" for option in command.OPTIONS)
