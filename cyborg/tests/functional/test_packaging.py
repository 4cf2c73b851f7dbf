# SPDX-License-Identifier: Apache-2.0
"""The files for packagers: systemd units, users, directories, rotation of logs, images."""

import getpass
import grp
import logging
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import requests
from oslo_config import cfg
from oslo_log import log

from cyborg.compat.oslo import set_up_logging
from cyborg.tests.fixtures.clouds.web_servers import ROOT, gunicorn, serving
from cyborg.tests.fixtures.machine.processes import BIN, wait_until

ETC = ROOT / "etc"
UNITS = sorted(path.name for path in (ETC / "systemd").glob("*.service"))
PRIVILEGED = ETC / "systemd" / "cyborg-agent-privileged.conf"
# The limit of ``systemd-analyze security``, from 0 to 10.
EXPOSURE = 4.0


def run(*command: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "SYSTEMD_COLORS": "0", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Return a folder with the units, for the commands of this environment."""
    for path in (ETC / "systemd").iterdir():
        text = path.read_text(encoding="utf-8").replace("/opt/cyborg/bin", str(BIN))
        (tmp_path / path.name).write_text(text)
    return tmp_path


def read_exposure(unit: Path) -> float:
    """Return the exposure level of a unit."""
    done = run("systemd-analyze", "security", "--offline=true", unit)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    return float(found[1])


@pytest.mark.requires("systemd")
def test_units_are_valid(units: Path) -> None:
    files = [path for path in units.iterdir() if path.suffix in (".service", ".socket")]
    assert len(files) == 4
    done = run("systemd-analyze", "verify", *files)
    # Units of the machine, which ours depend on, have messages of their own.
    lines = (done.stdout + done.stderr).splitlines()
    assert [line for line in lines if "cyborg" in line] == []


@pytest.mark.requires("systemd")
@pytest.mark.parametrize("name", UNITS)
def test_unit_restricts_its_service(units: Path, name: str) -> None:
    assert read_exposure(units / name) < EXPOSURE


@pytest.mark.requires("systemd")
def test_unit_of_a_privileged_agent_restricts_it_too(units: Path) -> None:
    unprivileged = read_exposure(units / "cyborg-agent.service")
    folder = units / "cyborg-agent.service.d"
    folder.mkdir()
    shutil.copy(PRIVILEGED, folder / "privileged.conf")
    assert unprivileged < read_exposure(units / "cyborg-agent.service") < EXPOSURE


@pytest.mark.requires("systemd")
def test_user_and_directories_are_created(tmp_path: Path) -> None:
    users, directories = (ETC / f"{name}.d" / "cyborg.conf" for name in ("sysusers", "tmpfiles"))
    if os.geteuid():
        pytest.skip("only root can create users and directories of others")
    for name in ("etc", "var/lib", "var/log"):
        (tmp_path / name).mkdir(parents=True)
    done = run("systemd-sysusers", f"--root={tmp_path}", users)
    assert done.returncode == 0, done.stderr
    (account,) = re.findall(r"^cyborg:.*$", (tmp_path / "etc/passwd").read_text(), re.MULTILINE)
    uid, gid, _, home, shell = account.split(":")[2:]
    assert (home, shell) == ("/var/lib/cyborg", "/usr/sbin/nologin")
    assert 0 < int(uid) < 1000
    done = run("systemd-tmpfiles", "--create", f"--root={tmp_path}", directories)
    assert done.returncode == 0, done.stderr
    for name, owner in (("etc", 0), ("var/lib", int(uid)), ("var/log", int(uid))):
        status = (tmp_path / name / "cyborg").stat()
        assert (status.st_uid, status.st_gid) == (owner, int(gid))
        assert stat.S_IMODE(status.st_mode) == 0o750


@pytest.mark.requires("logrotate")
def test_daemon_continues_in_the_new_log(tmp_path: Path) -> None:
    conf = cfg.ConfigOpts()
    log.register_options(conf)
    conf(["--log-dir", str(tmp_path)], project="cyborg")
    handlers, level = list(logging.root.handlers), logging.root.level
    try:
        set_up_logging(conf, "cyborg-agent")
        logger = logging.getLogger("cyborg.rotation")
        logger.info("before")
        group = grp.getgrgid(os.getegid()).gr_name
        text = (ETC / "logrotate.d" / "cyborg").read_text(encoding="utf-8")
        text = text.replace("/var/log/cyborg", str(tmp_path)).replace(
            "cyborg cyborg", f"{getpass.getuser()} {group}"
        )
        (tmp_path / "rules").write_text(text)
        (tmp_path / "rules").chmod(0o644)
        command = ("logrotate", "--force", "--state", tmp_path / "state", tmp_path / "rules")
        done = run(*command)
        assert done.returncode == 0, done.stderr
        logger.info("after")
    finally:
        for handler in logging.root.handlers[:]:
            if handler not in handlers:
                logging.root.removeHandler(handler)
                handler.close()
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    assert "before" in (tmp_path / "cyborg-agent.log.1").read_text()
    current = (tmp_path / "cyborg-agent.log").read_text()
    assert "after" in current
    assert "before" not in current


def test_linter_of_container_files_finds_nothing() -> None:
    done = run(BIN / "hadolint", "--no-color", ETC / "containers" / "Containerfile")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.static
def test_containers_run_the_commands_of_this_package() -> None:
    text = (ETC / "containers" / "Containerfile").read_text(encoding="utf-8")
    form = r'^CMD \["(cyborg-\w+)", "--config-file", "(\S+)"\]$'
    commands = re.findall(form, text, re.MULTILINE)
    assert [name for name, _ in commands] == ["cyborg-api", "cyborg-conductor", "cyborg-agent"]
    assert {file for _, file in commands} == {"/etc/cyborg/cyborg.conf"}
    assert all((BIN / name).exists() for name, _ in commands)


def read_link(url: str) -> str:
    """Return the address of the API that it gives itself."""
    answer = requests.get(url, timeout=60).json()
    return str(answer["versions"][0]["links"][0]["href"])


@pytest.mark.matrix
def test_hangup_reads_the_configuration_again(tmp_path: Path) -> None:
    options = {"public_endpoint": "http://first.example", "workers": 1}
    with serving(gunicorn, tmp_path, options) as server:
        assert read_link(server.url).startswith("http://first.example/")
        config = tmp_path / "cyborg.conf"
        config.write_text(config.read_text().replace("first", "second"))
        server.hang_up()
        wait_until(
            "a new worker answers",
            lambda: read_link(server.url).startswith("http://second.example/"),
        )
