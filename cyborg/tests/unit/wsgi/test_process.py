# SPDX-License-Identifier: Apache-2.0
"""Per-process state of the API in a WSGI server."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Unavailable
from cyborg.db.engine import Reader
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import free_port, ini, start_fork_server
from cyborg.wsgi.application import Application, config_arguments, find_primary, server_id

OF_SERVER = ("--workers", "2", "--no-such-option")  # arguments of a WSGI server
HEAVY = (
    *("alembic", "cliff", "eventlet", "openstack", "placement", "pyudev", "rich"),
    *("cyborg.agent", "cyborg.cli", "cyborg.clients", "cyborg.conductor", "cyborg.db.migrations"),
    *("cyborg.db.binding.write", "cyborg.db.devices.write", "cyborg.db.services.write"),
    *("cyborg.drivers", "cyborg.standalone"),
)


def test_config_arguments_from_environment(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert config_arguments({}) == []
    assert config_arguments({"OS_CYBORG_CONFIG_FILES": "/a/b.conf; /c.conf;"}) == [
        *("--config-file", "/a/b.conf"),
        *("--config-file", "/c.conf"),
    ]
    assert config_arguments({"OS_CYBORG_CONFIG_DIR": folder}) == ["--config-dir", folder]
    environ = {"OS_CYBORG_CONFIG_DIR": folder, "OS_CYBORG_CONFIG_FILES": "x.conf;/y.conf"}
    assert config_arguments(environ) == [
        *("--config-file", f"{folder}/x.conf"),
        "--config-file",
        "/y.conf",
    ]
    (tmp_path / "cyborg.conf").touch()
    arguments = config_arguments({"OS_CYBORG_CONFIG_DIR": folder})
    assert arguments == ["--config-file", f"{folder}/cyborg.conf"]


def test_clock_of_deadlines_is_that_of_the_primary(
    sqlite_engine: sa.Engine, tmp_path: Path
) -> None:
    primary, replica = str(sqlite_engine.url), f"sqlite:///{tmp_path}/none/replica.db"
    conf = make_conf(database={"connection": primary})
    reader = Reader(conf)
    assert find_primary(conf, reader) is reader
    conf = make_conf(database={"connection": primary, "slave_connection": replica})
    reader = Reader(conf)
    with pytest.raises(Unavailable):
        reader.clock.measure()
    found = find_primary(conf, reader)
    assert found is not None
    found.clock.measure()
    found.close()
    conf = make_conf(database={"connection": None, "slave_connection": replica})
    assert find_primary(conf, Reader(conf)) is None


@pytest.mark.slow
def test_application_concurrent_first_requests_open_once() -> None:
    opened: list[int] = []

    def open_app() -> object:
        opened.append(os.getpid())
        return lambda environ, start_response: [b"x"]

    application = Application(open_app)  # type: ignore[arg-type]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: application({}, None), range(32))) == [[b"x"]] * 32
    assert opened == [os.getpid()]


@pytest.mark.slow
def test_application_retries_after_failed_open() -> None:
    attempts: list[int] = []

    def open_app() -> object:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("not yet")
        return lambda environ, start_response: [b"x"]

    application = Application(open_app)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="not yet"):
        application({}, None)
    assert application({}, None) == [b"x"]


@pytest.mark.slow
def test_application_opens_again_after_fork() -> None:
    script = """
import os
from cyborg.wsgi.application import Application
application = Application(lambda: (lambda pid: lambda e, s: [pid])(os.getpid()))
assert application({}, None) == [os.getpid()]
child = os.fork()
if child == 0:
    os._exit(0 if application({}, None) == [os.getpid()] else 1)
assert os.waitpid(child, 0)[1] == 0
assert application({}, None) == [os.getpid()]
"""
    done = run_forked(script)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_server_id_is_shared_by_children() -> None:
    assert server_id() == server_id()
    script = "from cyborg.wsgi.application import server_id; print(server_id())"
    results = [run_forked(script) for _ in range(2)]
    ids = {done.stdout for done in results}
    assert len(ids) == 1, results
    assert ids.isdisjoint({"", f"{server_id()}\n"})


def run_forked(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that has imported libraries, but not the application."""
    command = [sys.executable, "-c", script, *OF_SERVER]
    return start_fork_server().run(command, {**os.environ, **env})


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *OF_SERVER],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_application_ignores_command_line_of_server(tmp_path: Path) -> None:
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
    done = run_forked(script, OS_CYBORG_CONFIG_FILES=str(file))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_process_measures_the_clock_of_deadlines_without_a_request(tmp_path: Path) -> None:
    script = f"""
import time
from cyborg.wsgi import application as module
found = []
make = module.make_conductor_client
def keep(transport, conf, time_at):
    found.append(time_at)
    return make(transport, conf, time_at)
module.make_conductor_client = keep
file = {str(tmp_path / "api.conf")!r}
module.open_api(module.configure(["--config-file", file]))
for _ in range(600):
    if found[0](time.monotonic() + 60.0) is not None:
        break
    time.sleep(0.05)
else:
    raise SystemExit("the clock is not measured")
"""
    sections = {
        "DEFAULT": {"auth_strategy": "noauth", "transport_url": "kombu+memory:////"},
        "database": {"connection": f"sqlite:///{tmp_path}/none.db"},
    }
    (tmp_path / "api.conf").write_text(ini(sections))
    done = run_forked(script)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "option"),
    [
        pytest.param(
            "[DEFAULT]\nauth_strategy = trust-me\n",
            "[DEFAULT] auth_strategy",
            marks=pytest.mark.matrix,
        ),
        ("[api]\nmax_limit = 0\n", "[api] max_limit"),
        pytest.param("", "[keystone_authtoken] auth_type", marks=pytest.mark.matrix),
    ],
)
def test_application_invalid_option_fails_import(tmp_path: Path, text: str, option: str) -> None:
    file = tmp_path / "api.conf"
    file.write_text(text)
    done = run_forked("import cyborg.wsgi.api", OS_CYBORG_CONFIG_FILES=str(file))
    assert done.returncode != 0
    assert option in done.stderr


@pytest.mark.slow
def test_application_starts_without_eventlet_and_openapi_document(tmp_path: Path) -> None:
    file = tmp_path / "api.conf"
    token = dict.fromkeys(("username", "password", "project_name"), "x")
    url = f"http://127.0.0.1:{free_port()}"
    sections = {
        "DEFAULT": {"auth_strategy": "keystone", "transport_url": "kombu+memory:////"},
        "database": {"connection": f"sqlite:///{tmp_path}/none.db"},
        "keystone_authtoken": {"auth_type": "password", "auth_url": url, **token},
    }
    file.write_text(ini(sections))
    script = f"""
import os, sys
from cyborg.api.openapi import document
from cyborg.wsgi import application as api
from cyborg.wsgi.application import config_arguments
# The document cannot be made.
document.Schemas = None
conf = api.configure(config_arguments(os.environ))
conductor = api.make_conductor_client(api.make_transport(conf), conf)
api.make_app(conf, conductor, api.Reader(conf))
print([m for m in {HEAVY!r} if sys.modules.get(m)])
"""
    done = run(script, OS_CYBORG_CONFIG_FILES=str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"  # after a warning of keystonemiddleware
