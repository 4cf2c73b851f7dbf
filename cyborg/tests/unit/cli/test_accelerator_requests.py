# SPDX-License-Identifier: Apache-2.0
import argparse

import pytest

from cyborg.cli import accelerator_requests
from cyborg.cli.app import Cyborg

VARIABLE = "OS_CYBORG_SERVICE_TOKEN"


def parsed(*words: str) -> argparse.Namespace:
    command = accelerator_requests.Unbind(Cyborg([]), None)
    return command.get_parser("cyborg arq-unbind").parse_args(["arq", *words])


def test_the_service_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert parsed().service_token is None
    assert parsed("--service-token", " novas\n").service_token == "novas"
    monkeypatch.setenv(VARIABLE, "gAAAAA-_=")
    assert parsed().service_token == "gAAAAA-_="
    assert parsed("--service-token", "").service_token == ""


@pytest.mark.parametrize("token", ["two words", "a\nb", "tökén", "\x7fx"])
def test_what_is_no_token_is_not_shown(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed("--service-token", token)
    shown = capsys.readouterr().err
    assert "a token is one word" in shown
    assert token not in shown
