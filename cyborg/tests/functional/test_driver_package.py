# SPDX-License-Identifier: Apache-2.0
"""The example package of the developer's guide: installed, checked, and run by an agent."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

import cyborg
from cyborg.tests.fixtures.machine import prerequisites
from cyborg.tests.fixtures.machine.processes import Daemon, ini, wait_until

SOURCE = Path(cyborg.__file__).resolve().parents[1]
EXAMPLE = SOURCE / "doc/source/contributor/example_package"
KIT = "cyborg.testing.conformance"
CARDS = ["0000:5e:00.0", "0000:5f:00.0", "0000:60:00.0"]

LOAD = """
import sys
from oslo_config import cfg
from cyborg import conf as options
from cyborg.agent.backends.factory import load_drivers

conf = cfg.ConfigOpts()
options.register(conf)
conf(["--config-file", sys.argv[1]], project="cyborg")
(driver,) = load_drivers(conf)
print(driver.backend, type(driver).__module__, *(d.address for d in driver.discover()))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder into which pip installed a copy of the package."""
    prerequisites.require("pip")
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(
        EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    pip = [*(prerequisites.pip_command() or ()), "--disable-pip-version-check", "-q"]
    words = [
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        "site",
        "./source",
    ]
    ran([*pip, *words], folder)
    return folder / "site"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration with one backend of the driver."""
    file = tmp_path / "cyborg.conf"
    file.write_text(
        ini(
            {
                "DEFAULT": {"host": "compute-1"},
                "standalone": {"port": 0, "placement_port": 0},
                "agent": {"enabled_backends": "cards", "enabled_drivers": ""},
                "cards": {"driver": "acme", "count": 3},
            }
        )
    )
    return file


def ran(command: list[Any], folder: Path, site: Path | None = None, status: int = 0) -> str:
    """Run a command, check its exit status, and return its output."""
    env = os.environ | ({} if site is None else {"PYTHONPATH": str(site)})
    words = [str(word) for word in command]
    process = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert process.returncode == status, f"{words}: {process.stdout}{process.stderr}"
    return process.stdout


@pytest.mark.matrix
def test_driver_package_is_found_by_the_agent(
    installed: Path, config: Path, tmp_path: Path
) -> None:
    output = ran([sys.executable, "-c", LOAD, config], tmp_path, installed).split()
    assert output == ["cards", "acme_accelerator.driver", *CARDS]


@pytest.mark.matrix
def test_driver_package_passes_conformance_command(installed: Path, tmp_path: Path) -> None:
    kit = [sys.executable, "-m", KIT, "acme", "-o", "count=3"]
    last = ran(kit, tmp_path, installed).splitlines()[-1]
    assert "0 failed, 0 blocked" in last
    ran([sys.executable, "-m", KIT, "acme", "-o", "count=99"], tmp_path, installed, status=2)


@pytest.mark.matrix
def test_driver_package_passes_its_own_tests(installed: Path, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    output = ran(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        tmp_path,
        installed,
    )
    # One for each rule, and two of the driver's own.
    rules = ran([sys.executable, "-m", KIT, "--list"], tmp_path).splitlines()
    assert f"{len(rules) + 2} passed" in output


def test_conformance_command_passes_on_real_sysfs(tmp_path: Path) -> None:
    """The driver reads the devices of this machine and changes nothing."""
    classes = [f"devices=class={number:02x}" for number in (0x01, 0x02, 0x03, 0x08, 0x12)]
    words = [word for text in classes for word in ("-o", text)]
    output = ran([sys.executable, "-m", KIT, "generic", *words], tmp_path)
    assert "0 failed, 0 blocked" in output.splitlines()[-1]


@pytest.fixture
def service(installed: Path, config: Path, tmp_path: Path) -> Iterator[Daemon]:
    """Run the standalone service with the driver."""
    command = [sys.executable, "-m", "cyborg.cmd.standalone", "--config-file", str(config)]
    daemon = Daemon(
        "standalone",
        [*command, "--state-dir", str(tmp_path / "state")],
        tmp_path,
        {"PYTHONPATH": str(installed)},
    )
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


@pytest.mark.matrix
def test_driver_package_runs_in_an_agent(service: Daemon) -> None:
    wait_until("the service is ready", lambda: "ready:" in service.tail() or not service.alive())
    lines = service.tail().splitlines()
    urls = {
        name: next((x for x in lines if f"{name} listens on" in x), "").split("listens on ")[-1]
        for name in ("API", "Placement")
    }
    assert urls["API"].startswith("http"), service.tail()

    def devices() -> list[Any]:
        answer = requests.get(f"{urls['API']}/v2/devices", timeout=60).json()["devices"]
        return sorted(answer, key=lambda d: str(d["hostname"])) if len(answer) == 3 else []

    cards = wait_until("the cards are there", devices)
    assert {(d["type"], d["vendor"], d["model"]) for d in cards} == {
        ("CRYPTO", "1234", "Counting card")
    }
    placement = urls["Placement"].split()[0]

    def offered() -> list[str]:
        answer = requests.get(
            f"{placement}/resource_providers?resources=CUSTOM_CRYPTO:1",
            headers={"X-Auth-Token": "admin", "OpenStack-API-Version": "placement 1.39"},
            timeout=60,
        )
        names = sorted(p["name"] for p in answer.json().get("resource_providers", ()))
        return names if len(names) == 3 else []

    names = wait_until("the cards are in Placement", offered)
    assert names == sorted(f"compute-1_{address}" for address in CARDS)
