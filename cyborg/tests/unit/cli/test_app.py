# SPDX-License-Identifier: Apache-2.0
import configparser
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import cyborg
from cyborg.cli import app

ROOT = Path(cyborg.__file__).parent.parent


def commands() -> dict[str, metadata.EntryPoint]:
    return {e.name: e for e in metadata.entry_points(group="cyborg.cli")}


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_loads_and_explains_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main([name, "--help"]) == 0
    assert f"usage: cyborg {name}" in capsys.readouterr().out


def test_installed_commands_are_those_of_this_tree() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    if not setup.has_section("entry_points"):
        pytest.skip("not run from a source tree")
    lines = setup["entry_points"]["cyborg.cli"].strip().splitlines()
    assert {line.partition("=")[0].strip() for line in lines} == set(commands())


def test_completion_knows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["complete"]) == 0
    assert "device-list" in capsys.readouterr().out


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([]) == 0
    assert "device-list" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["device-lisp"], 2, "device-list"),
        (["--os-cloud", "none-such", "device-list"], 2, "none-such"),
        (["--os-auth-type", "none-such", "device-list"], 2, "none-such"),
        (
            ["--os-auth-type", "none", "--os-endpoint", "http://127.0.0.1:1", "device-list"],
            1,
            "Unable to establish connection to http://127.0.0.1:1/v2/devices\n",
        ),
        (["device-show", "\udcff"], 2, "not UTF-8"),
    ],
)
def test_mistakes_get_one_line(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(words) == code
    shown = capsys.readouterr()
    assert said in shown.out + shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("command", ["audit", "discover-services"])
@pytest.mark.parametrize("time", ["nan", "inf", "-1", "soon"])
def test_a_time_that_never_ends(
    command: str, time: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        app.main(["--os-auth-type", "none", command, f"--within={time}"])
    assert f"{time!r} is not a number of seconds" in capsys.readouterr().err


def test_the_client_starts_light() -> None:
    heavy = ("sqlalchemy", "oslo_messaging", "pecan", "cyborg.db", "cyborg.rpc", "rich", "cmd2")
    code = (
        "import sys; from cyborg.cli import app, devices; app.Cyborg([]); "
        f"print(*[m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
