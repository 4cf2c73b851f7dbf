# SPDX-License-Identifier: Apache-2.0
"""The driver commands of ``cyborg`` and of ``openstack accelerator``."""

import json
import os
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cyborg.cli import app
from cyborg.standalone.stack import StandaloneStack
from cyborg.tests.fixtures.clouds.osc import GROUP, IMPORTED, entries, typed_command
from cyborg.tests.fixtures.clouds.standalone import HOST, running
from cyborg.tests.fixtures.drivers import all_drivers
from cyborg.tests.fixtures.machine.processes import BIN, start_fork_server, wait_until

OWN_GROUP = "openstack.cyborg.v2"
SECOND = ("--backend", "second")
WAIT = ("--wait", "--within", "300")
Run = Callable[..., tuple[Any, str]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneStack]:
    """Yield a separate stack, whose drivers are changed."""
    with running(tmp_path_factory.mktemp("drivers")) as new_stack:
        yield new_stack


@pytest.fixture
def cyborg(stack: StandaloneStack, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*line: str, code: int = 0) -> tuple[Any, str]:
        connection = ["--os-auth-type", "none", "--os-endpoint", stack.endpoint]
        assert app.main([*connection, *line, "-f", "json"]) == code, capsys.readouterr()
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return json.loads(output.out) if output.out else None, output.err

    return run


@pytest.fixture
def openstack(stack: StandaloneStack, tmp_path: Path) -> Run:
    """The installed command, with python-cyborgclient installed as well."""
    assert metadata.version("python-cyborgclient")
    program = str(BIN / "openstack")
    command = [program, "--os-auth-type", "none", "--os-endpoint", stack.endpoint, "accelerator"]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def run(*line: str, code: int = 0) -> tuple[Any, str]:
        process = start_fork_server().run([*command, *line], env, IMPORTED, timeout=120)
        assert "Traceback" not in process.stderr, process.stderr
        assert process.returncode == code, process.stderr
        return json.loads(process.stdout) if process.stdout.strip() else None, process.stderr

    return run


def statuses(cyborg: Run, driver: str) -> dict[str | None, str]:
    """Return the status of each backend of a driver."""
    return {
        place["backend"]: place["status"] for place in cyborg("driver-show", driver)[0]["Hosts"]
    }


def test_driver_commands_install_update_and_uninstall(cyborg: Run) -> None:
    assert statuses(cyborg, "generic") == {None: "INSTALLED"}
    install_job, err = cyborg("install-driver", "generic", *SECOND, "--host", HOST, *WAIT)
    assert (install_job["State"], install_job["Progress"]) == ("done", {"done": 1})
    assert f"{HOST} (second) done" in err
    wait_until("it is there", lambda: statuses(cyborg, "generic") == {"second": "READY"})
    # An applied state succeeds at once.
    assert cyborg("install-driver", "generic", *SECOND, *WAIT)[0]["State"] == "done"
    rule = ("--config", "devices=vendor=10de,product=1eb8", "--config", "devices=vendor=8086")
    assert cyborg("update-driver", "generic", *SECOND, *rule, *WAIT)[0]["State"] == "done"
    for change, status in (("--disable", "disabled"), ("--enable", "enabled")):
        assert cyborg("update-driver", "generic", *SECOND, change, *WAIT)[0]["State"] == "done"
        (place,) = cyborg("driver-show", "generic")[0]["Hosts"]
        assert (place["desired_status"], place["applied"]) == (status, True)
    begun, _ = cyborg("uninstall-driver", "generic", *SECOND, "--drain")
    assert set(begun) == {"UUID", "Kind", "State"}
    wait_until("it is over", lambda: cyborg("job-show", begun["UUID"])[0]["State"] == "done")
    wait_until("it is gone", lambda: statuses(cyborg, "generic") == {None: "INSTALLED"})
    kinds = [job["Kind"] for job in cyborg("job-list", "--subject", "generic", "--host", HOST)[0]]
    assert kinds == ["install", "install", "update", "update", "update", "uninstall"]


def test_driver_install_failure_names_host_and_reason(cyborg: Run, tmp_path: Path) -> None:
    invalid_options = ("--config", "setup=fail", "--config", "num_devices=1")
    job, err = cyborg(
        "install-driver", "fake", "--backend", "sick", *invalid_options, *WAIT, code=1
    )
    (step,) = job["Steps"]
    assert (job["State"], step["state"]) == ("failed", "failed")
    assert f"{HOST} (sick) failed: {step['error']}" in err
    assert "sick" not in statuses(cyborg, "fake")


def test_hardware_commands_release_and_adopt_a_device(cyborg: Run) -> None:
    def list_hardware() -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = cyborg("hardware-list", "--driver", "fake")[0]
        return entries

    (device,) = list_hardware()
    name = f"{device['Host']}/{device['Address']}"
    assert cyborg("hardware-release", name, *WAIT)[0]["State"] == "done"
    wait_until("it is left alone", lambda: list_hardware() == [])
    words = ("hardware-adopt", HOST, device["Address"], "--backend", "fake")
    assert cyborg(*words, *WAIT)[0]["State"] == "done"
    wait_until(
        "it is managed again",
        lambda: [d["Address"] for d in list_hardware()] == [device["Address"]],
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["install-driver", "generc"], "generic"),
        (["install-driver", "generic", "--config", "device=x"], "devices"),
        (["install-driver", "generic", "--host", "elsewhere"], "elsewhere"),
        (["install-driver", "generic", "--backend", "fake"], "(HTTP 409)"),
        (["uninstall-driver", "generic"], "(HTTP 404)"),
        (["update-driver", "fake", "--config", "num_devices=many"], "many"),
        (["job-show", "x"], "is not a uuid"),
        (["hardware-adopt", "elsewhere", "a", "--backend", "fake"], "elsewhere"),
        (["hardware-release", "a0000000-0000-4000-8000-00000000ffff"], "(HTTP 404)"),
    ],
)
def test_driver_commands_reject_invalid_requests(
    cyborg: Run, line: list[str], message: str
) -> None:
    assert message in cyborg(*line, code=1)[1]


def test_openstack_commands_have_no_name_conflict() -> None:
    own_commands = {typed_command(entry) for entry in entries("cyborg", OWN_GROUP)}
    for other in ("python-openstackclient", "python-cyborgclient"):
        assert own_commands & {typed_command(entry) for entry in entries(other, GROUP)} == set()
    assert {name.split()[0] for name in own_commands} == {"accelerator"}


@pytest.mark.matrix
def test_openstack_accelerator_commands_succeed(openstack: Run, cyborg: Run) -> None:
    form = ("-f", "json")
    rows, _ = openstack("driver", "list", *form)
    assert [row["Driver"] for row in rows] == list(all_drivers())
    shown_driver, same = (
        openstack("driver", "show", "fake", *form)[0],
        cyborg("driver-show", "fake")[0],
    )
    # The agent sends a heartbeat between the two.
    assert shown_driver | {"Hosts": []} == same | {"Hosts": []}
    job, err = openstack("driver", "install", "generic", *SECOND, *WAIT, *form)
    assert job["State"] == "done"
    assert f"{HOST} (second) done" in err
    assert openstack("job", "show", job["UUID"], *form)[0] == job
    assert job["UUID"] in [row["UUID"] for row in openstack("job", "list", *form)[0]]
    change = ("driver", "update", "generic", *SECOND, "--reload", *WAIT, *form)
    assert openstack(*change)[0]["State"] == "done"
    uninstall = ("driver", "uninstall", "generic", *SECOND, *WAIT, *form)
    assert openstack(*uninstall)[0]["State"] == "done"
    assert "(HTTP 404)" in openstack("driver", "uninstall", "generic", code=1)[1]


@pytest.mark.matrix
def test_openstack_accelerator_works_with_other_plugins_installed(openstack: Run) -> None:
    form = ("-f", "json")
    (device,) = openstack("hardware", "list", *form)[0]
    (same,) = openstack("device", "list", *form)[0]
    assert same["uuid"] == device["UUID"]
    discovery = openstack("service", "discover", "--wait", "--within", "300", *form)[0]
    assert [row["State"] for row in discovery] == ["DONE"]
    assert "cyborg-agent" in [row["Service"] for row in openstack("service", "list", *form)[0]]
    first, *_ = openstack("list", *form)[0]
    assert openstack("show", first["UUID"], *form)[0]["State"] == "free"
    assert "is not bound" in openstack("set", first["UUID"], "--name", "x", code=1)[1]
    assert openstack("device", "profile", "list", *form)[0] == []
    nobody = "a0000000-0000-4000-8000-00000000ffff"
    assert "(HTTP 404)" in openstack("hardware", "release", nobody, code=1)[1]
    adopt = ("hardware", "adopt", "elsewhere", "a", "--backend", "fake")
    assert "elsewhere" in openstack(*adopt, code=1)[1]
