# SPDX-License-Identifier: Apache-2.0
import argparse
from typing import Any

import pytest

from cyborg.cli import arqs
from cyborg.cli.app import CyborgApp

ARQ = "6f4fa6e9-3c5c-4a8b-9a35-3f4b0c3e1a11"
VARIABLE = "OS_CYBORG_SERVICE_TOKEN"


class RecordingRest:
    """A REST client that records the bodies of its calls."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    def call(self, method: str, path: str, body: Any = None, **_: Any) -> Any:
        self.bodies.append(body)

    def list_all(self, path: str, key: str, **_: Any) -> list[dict[str, Any]]:
        return []


def parsed(*arguments: str) -> argparse.Namespace:
    command = arqs.Unbind(CyborgApp([]), None)
    return command.get_parser("cyborg arq-unbind").parse_args(["arq", *arguments])


def test_service_token_from_option_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert parsed().service_token is None
    assert parsed("--service-token", " novas\n").service_token == "novas"
    monkeypatch.setenv(VARIABLE, "gAAAAA-_=")
    assert parsed().service_token == "gAAAAA-_="
    assert parsed("--service-token", "").service_token == ""


@pytest.mark.parametrize("token", ["two words", "a\nb", "tökén", "\x7fx"])
def test_service_token_invalid_value_is_not_printed(
    token: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed("--service-token", token)
    stderr = capsys.readouterr().err
    assert "a token must be one word" in stderr
    assert token not in stderr


@pytest.mark.parametrize("project", [None, "p1"])
def test_bind_names_the_project_of_the_instance_only_if_given(project: str | None) -> None:
    app = CyborgApp([])
    rest: Any = RecordingRest()
    app.rest = rest
    command = arqs.Bind(app, None)
    words = [ARQ, "--host", "h", "--provider", ARQ, "--instance", ARQ]
    words += [] if project is None else ["--project", project]
    command.read_rows(command.get_parser("cyborg arq-bind").parse_args(words))
    values = {change["path"]: change["value"] for change in rest.bodies[0][ARQ]}
    assert values.get("/project_id") == project
    assert values["/hostname"] == "h"
