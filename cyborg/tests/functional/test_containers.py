# SPDX-License-Identifier: Apache-2.0
"""The cloud of ``etc/containers/compose.yaml``, without containers.

Its commands run as processes of this machine, with its configuration files, in the order of their
dependencies. MariaDB and RabbitMQ are those of this machine. Addresses and folders are replaced.
"""

import graphlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openstack
import pytest
import requests
import yaml

import cyborg
from cyborg.cmd import status_checks
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine.processes import BIN, Daemon, free_port, wait_until

CONTAINERS = Path(cyborg.__file__).parents[1] / "etc" / "containers"
COMPOSE: Mapping[str, Any] = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())
SERVICES: Mapping[str, Mapping[str, Any]] = COMPOSE["services"]
OF_MACHINE = ("database", "broker")
CARDS = 4

pytestmark = [
    pytest.mark.services,
    pytest.mark.matrix,
    pytest.mark.filterwarnings("ignore::openstack.warnings.RemovedInSDK50Warning"),
]


class LocalCloud:
    """The processes of the compose file; ``url`` is the address of keystone."""

    def __init__(self, folder: Path, replaced: Mapping[str, str]) -> None:
        self._folder = folder
        # Longer texts first: one may begin with another.
        self._replaced = sorted(replaced.items(), key=lambda item: -len(item[0]))
        self._daemons: list[Daemon] = []
        self.url = self.translate("http://keystone:5000/v3")

    def translate(self, text: str) -> str:
        """Replace the addresses and folders of containers."""
        for old, new in self._replaced:
            text = text.replace(old, new)
        return text

    def start(self) -> None:
        """Start all services in the order of their dependencies."""
        order = graphlib.TopologicalSorter(
            {name: service.get("depends_on", {}) for name, service in SERVICES.items()}
        )
        for name in order.static_order():
            if name not in OF_MACHINE:
                self._write_files(SERVICES[name])
                self._start_service(name)

    def api_answers(self) -> bool:
        """Return whether the API has database and broker, as the image's health check does."""
        url = self.translate("http://api:6666") + "/healthcheck"
        try:
            return requests.get(url, timeout=10).ok
        except requests.ConnectionError:
            return False

    def stop(self) -> list[int]:
        """Stop all daemons, the last one first; return their exit codes."""
        codes = [daemon.stop() for daemon in reversed(self._daemons)]
        self._daemons = []
        return codes

    def run(self, name: str) -> None:
        """Run a service to its end."""
        process = subprocess.run(
            self._command(SERVICES[name]["command"]),
            env=self._env(name),
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert process.returncode == 0, f"{name}: {process.stdout}{process.stderr}"

    def _start_service(self, name: str) -> None:
        conditions = {
            other["depends_on"][name]["condition"]
            for other in SERVICES.values()
            if name in other.get("depends_on", {})
        }
        if "service_completed_successfully" in conditions:
            self.run(name)
            return
        command = self._command(SERVICES[name]["command"])
        daemon = Daemon(name, command, self._folder, self._env(name))
        daemon.start()
        self._daemons.append(daemon)
        if "service_healthy" in conditions:
            check = self._command(SERVICES[name]["healthcheck"]["test"][1:])

            def is_healthy() -> bool:
                assert daemon.alive(), daemon.tail()
                return not subprocess.run(check, capture_output=True, check=False).returncode

            wait_until(f"{name} is healthy", is_healthy, 120)

    def _command(self, words: list[str]) -> list[Any]:
        return [self.translate(word) for word in words]

    def _env(self, name: str) -> dict[str, str]:
        own = {
            key: self.translate(str(value))
            for key, value in SERVICES[name].get("environment", {}).items()
        }
        plain = {key: value for key, value in os.environ.items() if not key.startswith("OS_")}
        return {**plain, "PATH": f"{BIN}:{os.environ['PATH']}", **own}

    def _write_files(self, service: Mapping[str, Any]) -> None:
        for volume in service.get("volumes", ()):
            source, target, *_ = volume.split(":")
            path = Path(self.translate(target))
            if source.startswith("./"):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self.translate((CONTAINERS / source).read_text()))
            else:
                path.mkdir(parents=True, exist_ok=True)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[LocalCloud]:
    folder: Path = tmp_path_factory.mktemp("containers")
    replaced = {"rabbit://cyborg:secret@broker/": rabbit_url, "host_ip = 0.0.0.0": "# loopback"}
    for name, port in (("keystone", 5000), ("placement", 8778), ("api", 6666)):
        local = free_port()
        replaced[f"http://{name}:{port}"] = f"http://127.0.0.1:{local}"
        replaced[f"http://127.0.0.1:{port}"] = f"http://127.0.0.1:{local}"
        replaced[f"0.0.0.0:{port}"] = f"127.0.0.1:{local}"
        replaced[f"port = {port}"] = f"port = {local}"
    for path in ("/etc/keystone", "/etc/placement", "/etc/cyborg", "/etc/cloud", "/var/lib"):
        replaced[path] = f"{folder}{path}"
    with ExitStack() as stack:
        for name in ("keystone", "placement", "cyborg"):
            url = stack.enter_context(fresh_database("mysql", folder))
            replaced[f"mysql+pymysql://root:secret@database/{name}"] = url
        running = LocalCloud(folder, replaced)
        stack.callback(running.stop)
        running.start()
        yield running


@pytest.mark.long
def test_cloud_offers_its_cards(cloud: LocalCloud) -> None:
    auth = {
        **{"auth_url": cloud.url, "username": "admin", "password": "secret"},
        **{"project_name": "admin", "user_domain_name": "Default"},
        "project_domain_name": "Default",
    }
    wait_until("the API answers", cloud.api_answers, 60)
    with openstack.connect(
        auth=auth, region_name="RegionOne", load_yaml_config=False
    ) as connection:
        wait_until(
            "all cards are reported",
            lambda: len(list(connection.accelerator.devices())) == CARDS,
            60,
        )
        wait_until(
            "Placement has them below the compute node",
            lambda: (
                len([p for p in connection.placement.resource_providers() if p.name != "compute-1"])
                == CARDS
            ),
            60,
        )
    cloud.run("setup")  # again: it finds what it has made
    cloud.run("bootstrap")
    assert cloud.stop() == [0] * 5


def test_configuration_has_known_options_only() -> None:
    result = status_checks.check_options([str(CONTAINERS / "cloud" / "cyborg.conf")])
    assert result.details is None


def test_images_are_those_of_the_container_files() -> None:
    for name, service in SERVICES.items():
        if name in OF_MACHINE:
            assert "image" in service
            continue
        build = service["build"]
        text = (CONTAINERS.parents[1] / build["dockerfile"]).read_text()
        assert (CONTAINERS / build["context"]).resolve() == CONTAINERS.parents[1]
        stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
        assert build.get("target", stages[-1]) in stages
        # A published port is one of this machine only.
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_linter_of_container_files_finds_nothing() -> None:
    for file in CONTAINERS.glob("*Containerfile"):
        command: list[Any] = [BIN / "hadolint", "--no-color", file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, ""), file
