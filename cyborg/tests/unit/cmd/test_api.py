# SPDX-License-Identifier: Apache-2.0
"""cyborg-api: its settings of gunicorn and its errors; test_packaging.py runs it."""

from pathlib import Path

import pytest

from cyborg.cmd import api
from cyborg.tests.fixtures.machine.options import make_conf


@pytest.mark.parametrize(
    ("host", "bind"),
    [("10.0.0.1", "10.0.0.1:6666"), ("controller", "controller:6666"), ("::1", "[::1]:6666")],
)
def test_address_is_that_of_the_configuration(host: str, bind: str) -> None:
    settings = api.make_settings(make_conf(api={"host_ip": host, "workers": 5, "threads": 3}))
    assert settings["bind"] == bind
    assert (settings["workers"], settings["threads"]) == (5, 3)


def test_invalid_option_is_an_error_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cyborg.conf"
    file.write_text("[DEFAULT]\nauth_strategy = noauth\n[api]\nthreads = 0\n")
    assert api.main(["--config-file", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("cyborg-api: ")
    assert "threads" in error


def test_missing_file_is_an_error_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert api.main(["--config-file", str(tmp_path / "none.conf")]) == 1
    assert "none.conf" in capsys.readouterr().err
