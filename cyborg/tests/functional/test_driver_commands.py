# SPDX-License-Identifier: Apache-2.0
"""The life of a driver at the keyboard: by ``cyborg``, and by ``openstack accelerator``."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cyborg.cli import app
from cyborg.fixtures.osc import GROUP, entries, words
from cyborg.fixtures.processes import until
from cyborg.fixtures.stack import HOST, running
from cyborg.standalone.stack import StandaloneStack

OWN_GROUP = "openstack.cyborg.v2"
SECOND = ("--backend", "second")
WAIT = ("--wait", "--within", "60")
Run = Callable[..., tuple[Any, str]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneStack]:
    """A stack of its own: drivers come and go."""
    with running(tmp_path_factory.mktemp("drivers")) as it:
        yield it


@pytest.fixture
def cyborg(stack: StandaloneStack, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*line: str, code: int = 0) -> tuple[Any, str]:
        way = ["--os-auth-type", "none", "--os-endpoint", stack.endpoint]
        assert app.main([*way, *line, "-f", "json"]) == code, capsys.readouterr()
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return json.loads(shown.out) if shown.out else None, shown.err

    return run


@pytest.fixture
def openstack(stack: StandaloneStack, tmp_path: Path) -> Run:
    """The real command, as it is installed, with python-cyborgclient beside it."""
    assert metadata.version("python-cyborgclient")
    program = str(Path(sys.executable).parent / "openstack")
    way = [program, "--os-auth-type", "none", "--os-endpoint", stack.endpoint, "accelerator"]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def run(*line: str, code: int = 0) -> tuple[Any, str]:
        done = subprocess.run(
            [*way, *line], env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if done.stdout.strip() else None, done.stderr

    return run


def statuses(cyborg: Run, driver: str) -> dict[str | None, str]:
    """Return the word of each backend of a driver."""
    return {
        place["backend"]: place["status"] for place in cyborg("driver-show", driver)[0]["Hosts"]
    }


def test_from_installing_to_uninstalling(cyborg: Run) -> None:
    assert statuses(cyborg, "generic") == {None: "INSTALLED"}
    made, err = cyborg("install-driver", "generic", *SECOND, "--host", HOST, *WAIT)
    assert (made["State"], made["Progress"]) == ("done", {"done": 1})
    assert f"{HOST} (second) done" in err
    until("it is there", lambda: statuses(cyborg, "generic") == {"second": "READY"})
    # What is there already is done at once.
    assert cyborg("install-driver", "generic", *SECOND, *WAIT)[0]["State"] == "done"
    rule = ("--config", "devices=vendor=10de,product=1eb8", "--config", "devices=vendor=8086")
    assert cyborg("update-driver", "generic", *SECOND, *rule, *WAIT)[0]["State"] == "done"
    for change, wish in (("--disable", "disabled"), ("--enable", "enabled")):
        assert cyborg("update-driver", "generic", *SECOND, change, *WAIT)[0]["State"] == "done"
        (place,) = cyborg("driver-show", "generic")[0]["Hosts"]
        assert (place["wish"], place["applied"]) == (wish, True)
    begun, _ = cyborg("uninstall-driver", "generic", *SECOND, "--drain")
    assert set(begun) == {"UUID", "Kind", "State"}
    until("it is over", lambda: cyborg("job-show", begun["UUID"])[0]["State"] == "done")
    until("it is gone", lambda: statuses(cyborg, "generic") == {None: "INSTALLED"})
    kinds = [job["Kind"] for job in cyborg("job-list", "--subject", "generic", "--host", HOST)[0]]
    assert kinds == ["install", "install", "update", "update", "update", "uninstall"]


def test_one_that_fails_says_where_and_why(cyborg: Run, tmp_path: Path) -> None:
    bad = ("--config", "setup=fail", "--config", "num_devices=1")
    made, err = cyborg("install-driver", "fake", "--backend", "sick", *bad, *WAIT, code=1)
    (step,) = made["Steps"]
    assert (made["State"], step["state"]) == ("failed", "failed")
    assert f"{HOST} (sick) failed: {step['error']}" in err
    assert "sick" not in statuses(cyborg, "fake")


def test_a_device_is_released_and_adopted(cyborg: Run) -> None:
    def there() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = cyborg("hardware-list", "--driver", "fake")[0]
        return found

    (device,) = there()
    assert cyborg("hardware-release", device["UUID"], *WAIT)[0]["State"] == "done"
    until("it is left alone", lambda: there() == [])
    words = ("hardware-adopt", HOST, device["Address"], "--backend", "fake")
    assert cyborg(*words, *WAIT)[0]["State"] == "done"
    until("it is managed again", lambda: [d["Address"] for d in there()] == [device["Address"]])


@pytest.mark.parametrize(
    ("line", "said"),
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
def test_refusals(cyborg: Run, line: list[str], said: str) -> None:
    assert said in cyborg(*line, code=1)[1]


def test_no_name_is_anybody_elses() -> None:
    ours = {words(entry) for entry in entries("cyborg", OWN_GROUP)}
    for other in ("python-openstackclient", "python-cyborgclient"):
        assert ours & {words(entry) for entry in entries(other, GROUP)} == set()
    assert {name.split()[0] for name in ours} == {"accelerator"}


def test_openstack_accelerator(openstack: Run, cyborg: Run) -> None:
    form = ("-f", "json")
    rows, _ = openstack("driver", "list", *form)
    assert [row["Driver"] for row in rows] == ["fake", "generic"]
    told, same = openstack("driver", "show", "fake", *form)[0], cyborg("driver-show", "fake")[0]
    # Its agent says hello between the two.
    assert told | {"Hosts": []} == same | {"Hosts": []}
    made, err = openstack("driver", "install", "generic", *SECOND, *WAIT, *form)
    assert made["State"] == "done"
    assert f"{HOST} (second) done" in err
    assert openstack("job", "show", made["UUID"], *form)[0] == made
    assert made["UUID"] in [row["UUID"] for row in openstack("job", "list", *form)[0]]
    change = ("driver", "update", "generic", *SECOND, "--reload", *WAIT, *form)
    assert openstack(*change)[0]["State"] == "done"
    away = ("driver", "uninstall", "generic", *SECOND, *WAIT, *form)
    assert openstack(*away)[0]["State"] == "done"
    assert "(HTTP 404)" in openstack("driver", "uninstall", "generic", code=1)[1]


def test_openstack_accelerator_beside_the_others(openstack: Run) -> None:
    form = ("-f", "json")
    (device,) = openstack("hardware", "list", *form)[0]
    (same,) = openstack("device", "list", *form)[0]
    assert same["uuid"] == device["UUID"]
    found = openstack("service", "discover", "--wait", "--within", "60", *form)[0]
    assert [row["State"] for row in found] == ["DONE"]
    assert "cyborg-agent" in [row["Service"] for row in openstack("service", "list", *form)[0]]
    first, *_ = openstack("list", *form)[0]
    assert openstack("show", first["UUID"], *form)[0]["State"] == "free"
    assert "held by nobody" in openstack("set", first["UUID"], "--name", "x", code=1)[1]
    assert openstack("device", "profile", "list", *form)[0] == []
    nobody = "a0000000-0000-4000-8000-00000000ffff"
    assert "(HTTP 404)" in openstack("hardware", "release", nobody, code=1)[1]
    lost = ("hardware", "adopt", "elsewhere", "a", "--backend", "fake")
    assert "elsewhere" in openstack(*lost, code=1)[1]
