# SPDX-License-Identifier: Apache-2.0
"""The devstack plugin: every phase, twice, with a real keystone, MariaDB, RabbitMQ and uWSGI.

The functions of devstack are those of ``fixtures/devstack``.
"""

import configparser
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openstack
import pytest

import cyborg
from cyborg.tests.fixtures.clouds.keystone_stack import ADMIN, PASSWORD, REGION, SERVICES, Keystone
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine.processes import BIN, Daemon, free_port, wait_until
from cyborg.tests.fixtures.machine.tiers import sample

ROOT = Path(cyborg.__file__).parents[1]
SCRIPTS = ROOT / "cyborg" / "tests" / "fixtures" / "devstack"
STACK = ("pre-install", "install", "post-config", "extra", "test-config")
# Each function of the plugin has the name of the service.
OWN = re.compile(r"\w*cyborg\w*")

pytestmark = [
    pytest.mark.services,
    pytest.mark.matrix,
    # A start of the plugin has taken 300 s on a machine with nine processes for each processor.
    pytest.mark.timeout(900),
    pytest.mark.requires("uwsgi"),
    pytest.mark.filterwarnings("ignore::openstack.warnings.RemovedInSDK50Warning"),
]


@dataclass(frozen=True)
class Devstack:
    """A machine on which the plugin runs; ``folder`` has all its files."""

    folder: Path
    env: dict[str, str]
    keystone: Keystone
    endpoint: str

    def run(self, mode: str, *phases: str) -> str:
        """Run phases of the plugin and return the output."""
        command: list[Any] = ["bash", SCRIPTS / "run.sh", ROOT, mode, *phases]
        process = subprocess.run(
            command,
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        logs = "".join(file.read_text()[-2000:] for file in self.folder.glob("cyborg-*.log"))
        assert process.returncode == 0, process.stdout + process.stderr + logs
        return str(process.stdout)

    def read(self, name: str) -> configparser.RawConfigParser:
        """Return a configuration file."""
        parser = configparser.RawConfigParser(default_section="none")
        assert parser.read(self.folder / name), name
        return parser

    def pids(self) -> dict[str, int]:
        """Return the ids of the processes by service."""
        return {file.stem: int(file.read_text()) for file in self.folder.glob("*.pid")}

    def ask(self, *words: str) -> str:
        """Return the output of the command ``openstack`` as the administrator."""
        env = os.environ | self.keystone.environment("another admin")
        command: list[Any] = [BIN / "openstack", *words]
        process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        return str(process.stdout)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Devstack]:
    folder: Path = tmp_path_factory.mktemp("devstack")
    keystone = Keystone(folder / "keystone")
    keystone.prepare()
    daemon = Daemon("keystone", keystone.command, folder, keystone.env)
    port = free_port()
    with fresh_database("mysql", folder) as database:
        daemon.start()
        try:
            wait_until("keystone answers", lambda: _listens(keystone.port))
            # Nova and Placement are not on this machine: the conductor waits for them.
            keystone.fill({"placement": ("placement", "http://127.0.0.1:1")})
            services = "key,mysql,rabbit,placement-api,n-api,n-cpu,g-api,tempest"
            files = {
                "CYBORG_CONF_DIR": folder / "etc",
                "CYBORG_STATE_PATH": folder / "state",
                "NOVA_CONF": folder / "nova.conf",
                "TEMPEST_CONFIG": folder / "tempest.conf",
                "TEST_FOLDER": folder,
            }
            env = os.environ | {name: str(path) for name, path in files.items()}
            env |= {
                "ADMIN_PASSWORD": PASSWORD,
                "ADMIN_USERNAME": ADMIN,
                "CYBORG_DIR": str(ROOT),
                "CYBORG_PORT": str(port),
                "CYBORG_USE_PORT": "True",
                "DATABASE_URL": database,
                "DATA_DIR": str(folder),
                "DEST": str(folder),
                "ENABLED_SERVICES": services,
                "ENABLE_DEBUG_LOG_LEVEL": "True",
                "KEYSTONE_SERVICE_URI": keystone.url,
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "REGION_NAME": REGION,
                "SERVICE_DOMAIN_NAME": "Default",
                "SERVICE_HOST": "127.0.0.1",
                "SERVICE_PASSWORD": PASSWORD,
                "SERVICE_PROJECT_NAME": SERVICES,
                "SERVICE_PROTOCOL": "http",
                "SERVICE_TIMEOUT": "60",
                "STACK_USER": str(os.geteuid()),
                "TEST_PYTHON": sys.executable,
                "TRANSPORT_URL": rabbit_url,
            }
            new_machine = Devstack(folder, env, keystone, f"http://127.0.0.1:{port}/v2")
            yield new_machine
            for pid in new_machine.pids().values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, 9)
        finally:
            daemon.stop()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists() and bool(Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.parametrize("round_", sample(["first", "second"], "first", mark=pytest.mark.long))
def test_plugin_starts_and_removes_the_service(machine: Devstack, round_: str) -> None:
    output = machine.run("stack", *STACK)
    assert [line for line in output.splitlines() if line.startswith("phase: ")] == [
        f"phase: stack {phase}" for phase in STACK
    ]
    pids = machine.pids()
    assert pids.keys() == {"cyborg-api", "cyborg-cond", "cyborg-agent"}
    assert all(map(_alive, pids.values()))
    assert machine.read("nova.conf")["service_user"]["send_service_user_token"] == "True"
    assert machine.read("tempest.conf")["service_available"]["cyborg"] == "True"
    section = machine.read("etc/cyborg.conf")["keystone_authtoken"]
    assert section["service_token_roles_required"] == "True"

    with openstack.connect(**_login(machine.keystone)) as connection:
        assert connection.accelerator.get_endpoint() == machine.endpoint
        wait_until(
            "the agent has reported a fake card",
            lambda: [device.type for device in connection.accelerator.devices()] == ["FPGA"],
            60,
        )
    # python-cyborgclient, and our own commands, with the endpoint of the catalog.
    assert "FPGA" in machine.ask("accelerator", "device", "list")
    assert "cyborg-agent" in machine.ask("accelerator", "service", "list")

    machine.run("unstack")
    assert machine.pids() == {}
    assert not any(map(_alive, pids.values()))
    machine.run("clean")
    assert not (machine.folder / "etc").exists()
    assert not (machine.folder / "state").exists()


def _login(keystone: Keystone) -> dict[str, Any]:
    login = keystone.options("another admin")
    return {
        "auth": {
            "auth_url": login["auth_url"],
            "username": "another admin",
            "password": PASSWORD,
            "user_domain_id": "default",
            "project_name": "project-1",
            "project_domain_id": "default",
        },
        "region_name": REGION,
        "load_yaml_config": False,
    }


def test_plugin_replaces_no_function_of_devstack(machine: Devstack) -> None:
    """It is sourced in the shell of devstack: every function carries the name of the service."""
    text = (ROOT / "devstack" / "plugin.sh").read_text(encoding="utf-8")
    defined = re.findall(r"^(\w+)\(\) \{$", text, re.MULTILINE)
    assert len(defined) > 10
    assert [name for name in defined if not OWN.fullmatch(name)] == []
    # A phase for a disabled service does nothing.
    env = machine.env | {"ENABLED_SERVICES": ""}
    script = f". {SCRIPTS}/functions.sh; . {ROOT}/devstack/plugin.sh stack extra"
    process = subprocess.run(["bash", "-ec", script], env=env, capture_output=True, check=False)
    assert (process.returncode, process.stdout) == (0, b"")


def test_scripts_have_the_style_of_openstack() -> None:
    files = [ROOT / "devstack" / "plugin.sh", ROOT / "devstack" / "settings"]
    # E006 is the length of lines, which OpenStack's projects do not check.
    command: list[Any] = [BIN / "bashate", "-i", "E006", *files, *SCRIPTS.glob("*.sh")]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (0, "")
