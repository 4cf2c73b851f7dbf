# SPDX-License-Identifier: Apache-2.0
import argparse

import pytest

from cyborg.cli import arqs
from cyborg.cli.app import CyborgApp

VARIABLE = "OS_CYBORG_SERVICE_TOKEN"


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
