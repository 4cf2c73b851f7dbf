# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from pathlib import Path

import pytest

import cyborg
from cyborg.cli import app
from cyborg.tests.fixtures.machine.http_server import serve_http

ROOT = Path(cyborg.__file__).parent.parent
UUID = "6a1c3e9d-5f70-4248-8b1e-0c9d7e5f3a21"


def commands() -> dict[str, metadata.EntryPoint]:
    return {e.name: e for e in metadata.entry_points(group="cyborg.cli")}


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_prints_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([name, "--help"]) == 0
    assert f"usage: cyborg {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spaced", "dashed"),
    [
        ("device list", "device-list"),
        ("device profile show", "device-profile-show"),
        ("install driver", "install-driver"),
        ("driver install", "install-driver"),
        ("service discover", "discover-services"),
        ("discover services", "discover-services"),
        ("audit create", "audit"),
        ("attachment create", "attach-instance"),
        ("device custody show", "device-custody"),
        ("driver-install", "install-driver"),
        ("service-discover", "discover-services"),
    ],
)
def test_command_with_spaces_is_found(
    spaced: str, dashed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([*spaced.split(), "--help"], ["help", *spaced.split()]):
        assert app.main(arguments) == 0
        assert f"usage: cyborg {dashed}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["bash"], ["zsh"], ["fish"]])
def test_complete_lists_the_commands(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["complete", *arguments]) == 0
    shell = (arguments or ["bash"])[0]
    lines = capsys.readouterr().out.splitlines()
    assert f"# Completion of cyborg for {shell}, written by: cyborg complete {shell}" in lines[:2]
    assert any("device-list" in line for line in lines)


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"], ["-h"]])
def test_main_without_command_prints_the_help_screen(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert app.main(arguments) == 0
    except SystemExit as exc:
        assert exc.code is None
    out = capsys.readouterr().out
    assert "\n  device list|show|custody " in out
    assert "--os-auth-url" not in out


def test_help_auth_prints_the_options_of_the_login(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help-auth"], ["device-list", "--help-auth"]):
        with pytest.raises(SystemExit) as ended:
            app.main(arguments)
        assert ended.value.code is None
        out = capsys.readouterr().out
        assert "--os-auth-url" in out
        assert "device" not in out.split()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
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
def test_main_error_prints_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(arguments) == code
    output = capsys.readouterr()
    assert message in output.out + output.err
    assert "Traceback" not in output.err


@pytest.mark.parametrize("command", ["audit", "discover-services"])
@pytest.mark.parametrize("duration", ["nan", "inf", "-1", "soon"])
def test_within_invalid_duration_is_rejected(
    command: str, duration: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        app.main(["--os-auth-type", "none", command, f"--within={duration}"])
    assert f"{duration!r} is not a number of seconds" in capsys.readouterr().err


HEAVY = (
    *("cmd2", "eventlet", "oslo_config", "oslo_messaging", "osprofiler", "pecan", "rich"),
    *("openstack.accelerator", "openstack.cloud", "openstack.connection", "sqlalchemy"),
    *("cyborg.cli.drivers", "cyborg.core.inventory.report", "cyborg.db", "cyborg.rpc"),
)


class DeviceHandler(BaseHTTPRequestHandler):
    """An API with one device."""

    def do_GET(self) -> None:
        body = json.dumps({"devices": [{"uuid": UUID, "type": "GPU"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.mark.slow
def test_device_list_imports_no_heavy_modules() -> None:
    code = (
        "import sys; from cyborg.cmd.scripts import client; client(); "
        f"print([m for m in {HEAVY!r} if sys.modules.get(m)])"
    )
    with serve_http(DeviceHandler) as url:
        options = ("--os-auth-type", "none", "--os-endpoint", url)
        result = subprocess.run(
            [sys.executable, "-c", code, *options, "device-list", "-f", "table"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    *table, modules = result.stdout.splitlines()
    assert UUID[:8] in "".join(table), result.stderr
    assert modules == "[]"
