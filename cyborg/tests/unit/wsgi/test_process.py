# SPDX-License-Identifier: Apache-2.0
"""What a WSGI server's processes have of their own."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cyborg.fixtures.processes import ini
from cyborg.wsgi.process import Application, arguments, life


def test_where_the_configuration_is(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert arguments({}) == []
    assert arguments({"OS_CYBORG_CONFIG_FILES": "/a/b.conf; /c.conf;"}) == [
        *("--config-file", "/a/b.conf"),
        *("--config-file", "/c.conf"),
    ]
    assert arguments({"OS_CYBORG_CONFIG_DIR": folder}) == ["--config-dir", folder]
    both = {"OS_CYBORG_CONFIG_DIR": folder, "OS_CYBORG_CONFIG_FILES": "x.conf;/y.conf"}
    assert arguments(both) == [*("--config-file", f"{folder}/x.conf"), "--config-file", "/y.conf"]
    (tmp_path / "cyborg.conf").touch()
    found = arguments({"OS_CYBORG_CONFIG_DIR": folder})
    assert found == ["--config-file", f"{folder}/cyborg.conf"]


def test_many_first_requests_open_once() -> None:
    opened: list[int] = []

    def open_app() -> object:
        opened.append(os.getpid())
        return lambda environ, start_response: [b"x"]

    application = Application(open_app)  # type: ignore[arg-type]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: application({}, None), range(32))) == [[b"x"]] * 32
    assert opened == [os.getpid()]


def test_a_failed_opening_is_tried_again() -> None:
    tries: list[int] = []

    def open_app() -> object:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not yet")
        return lambda environ, start_response: [b"x"]

    application = Application(open_app)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="not yet"):
        application({}, None)
    assert application({}, None) == [b"x"]


def test_a_forked_worker_opens_its_own() -> None:
    script = """
import os
from cyborg.wsgi.process import Application
application = Application(lambda: (lambda me: lambda e, s: [me])(os.getpid()))
assert application({}, None) == [os.getpid()]
child = os.fork()
if child == 0:
    os._exit(0 if application({}, None) == [os.getpid()] else 1)
assert os.waitpid(child, 0)[1] == 0
assert application({}, None) == [os.getpid()]
"""
    done = run(script)
    assert done.returncode == 0, done.stderr


def test_workers_of_one_server_share_a_life() -> None:
    assert life() == life()
    command = [sys.executable, "-c", "from cyborg.wsgi.process import life; print(life())"]
    told = {subprocess.check_output(command, text=True) for _ in range(2)}
    assert len(told) == 1
    assert told != {f"{life()}\n"}


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, "--workers", "2", "--no-such-option"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_line_is_the_servers_own(tmp_path: Path) -> None:
    file = tmp_path / "api.conf"
    sections = {
        "DEFAULT": {"auth_strategy": "noauth", "transport_url": "kombu+memory:////"},
        "database": {"connection": f"sqlite:///{tmp_path}/none.db"},
    }
    file.write_text(ini(sections))
    script = """
import webob
from cyborg.wsgi.api import application
answer = webob.Request.blank("/v2").get_response(application)
assert (answer.status_int, answer.json["id"]) == (200, "v2.0")
assert webob.Request.blank("/v2/devices").get_response(application).status_int == 503
"""
    done = run(script, OS_CYBORG_CONFIG_FILES=str(file))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[DEFAULT]\nauth_strategy = trust-me\n", "[DEFAULT] auth_strategy"),
        ("[api]\nmax_limit = 0\n", "[api] max_limit"),
        ("", "[keystone_authtoken] auth_type"),
    ],
)
def test_a_wrong_option_keeps_the_server_from_starting(
    tmp_path: Path, text: str, named: str
) -> None:
    file = tmp_path / "api.conf"
    file.write_text(text)
    done = run("import cyborg.wsgi.api", OS_CYBORG_CONFIG_FILES=str(file))
    assert done.returncode != 0
    assert named in done.stderr
