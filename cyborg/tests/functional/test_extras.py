# SPDX-License-Identifier: Apache-2.0
"""The extra ``agent`` in an empty environment: what pip installs, and an agent that runs there."""

import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborg.tests.fixtures.clouds.cloud import Cloud, make_and_run_cloud
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine import prerequisites
from cyborg.tests.fixtures.machine.processes import wait_until

# Half a minute of pip.
# An installation has taken 190 s on a machine with nine processes for each processor.
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

_BASE = getattr(sys, "_base_executable", sys.executable)
SERVER_LIBRARIES = {"alembic", "openstack-placement", "oslo-db", "pecan", "sqlalchemy", "wsme"}
BOUND_ARQ = {
    "uuid": "c2f0c1b0-2c4b-4f59-8f39-0d6d1d2f7c11",
    "state": "Bound",
    "attach_handle_type": "PCI",
    "attach_handle_info": {"domain": "0000", "bus": "3d", "device": "01", "function": "1"},
}
SERVER_COMMANDS = {
    "cyborg-api": ("api", "--help"),
    "cyborg-conductor": ("conductor", "--help"),
    "cyborg-dbsync": ("conductor", "version"),
    "cyborg-status": ("conductor", "work"),
    "cyborg": ("client", "device-list"),
}


def run(*command: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture(scope="module")
def agent_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs of an environment with the extra ``agent`` only."""
    prerequisites.require("clone")
    prerequisites.require("pip")
    folder = tmp_path_factory.mktemp("agent")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip = [*_pip_for(python), "--disable-pip-version-check", "-q"]
    # An arbitrary small package shows whether an index is reachable.
    index = [*pip, "download", "--no-deps", "--no-cache-dir", "-d", folder / "index", "pbr"]
    if run(*index, "--retries", "0", "--timeout", "5").returncode != 0:
        pytest.skip("no package index is reachable")
    source = folder / "source"
    for command in (
        ["git", "clone", "-q", prerequisites.ROOT, source],
        # By path: the name on the public index belongs to another package.
        [*pip, "install", "-c", source / "constraints.txt", f"{source}[agent]"],
    ):
        done = run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    return python.parent


def _pip_for(python: Path) -> list[str]:
    """Return a pip that installs into the environment of this interpreter."""
    for command in ([sys.executable, "-m", "pip"], [_BASE, "-m", "pip"]):
        if run(*command, "--python", python, "--version").returncode == 0:
            return [*command, "--python", str(python)]
    pytest.skip("no pip installs into another environment; apt install python3-pip")


@pytest.fixture
def cloud(agent_bin: Path, tmp_path: Path, rabbit_url: str) -> Iterator[Cloud]:
    """A cloud whose only host has no agent; ``agent_bin`` comes first, since it may skip."""
    with (
        fresh_database("mysql", tmp_path) as database,
        make_and_run_cloud(
            tmp_path,
            database,
            rabbit_url,
            (),
            other_hosts=("compute-1",),
            conductors=("conductor-1",),
        ) as running,
    ):
        yield running


def test_agent_extra_installs_no_server_library(agent_bin: Path) -> None:
    code = "from importlib import metadata; print(*(d.name for d in metadata.distributions()))"
    names = run(agent_bin / "python", "-c", code).stdout.split()
    installed = {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    assert {"cyborg", "oslo-messaging", "pyudev"} <= installed
    assert installed & SERVER_LIBRARIES == set()


@pytest.mark.parametrize("command", SERVER_COMMANDS)
def test_command_of_another_extra_names_it(command: str, agent_bin: Path) -> None:
    extra, *arguments = SERVER_COMMANDS[command]
    done = run(agent_bin / command, *arguments)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"{command} needs pip install 'cyborg[{extra}]': No module named" in done.stderr


def test_conformance_kit_runs_with_agent_extra(agent_bin: Path) -> None:
    done = run(agent_bin / "python", "-m", "cyborg.testing.conformance", "fake")
    assert "0 failed, 0 blocked" in done.stdout.splitlines()[-1]


def test_os_acc_runs_with_agent_extra(agent_bin: Path) -> None:
    code = f"from cyborg import os_acc; print(os_acc.attach({BOUND_ARQ!r}))"
    done = run(agent_bin / "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<hostdev ")


@pytest.mark.services
def test_agent_of_agent_extra_reports_its_device(agent_bin: Path, cloud: Cloud) -> None:
    config = cloud.config("agent-compute-1", host="compute-1")
    cloud.add("agent-compute-1", [agent_bin / "cyborg-agent", "--config-file", config])

    def providers() -> list[str]:
        rows = cloud.placement.get("/resource_providers").json()["resource_providers"]
        return [p["name"] for p in rows if p["name"].startswith("compute-1_")]

    assert len(wait_until("the card is in Placement", providers)) == 1
    assert cloud.daemons["agent-compute-1"].stop() == 0
