# SPDX-License-Identifier: Apache-2.0
"""Drivers that are changed on real agents: several backends of one host, and rolled updates.

Four agents, two conductors, MariaDB, RabbitMQ, Placement, and ``cyborg`` at the keyboard.
"""

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.cli import app
from cyborg.fixtures.cloud import Cloud, cloud
from cyborg.fixtures.databases import fresh_database
from cyborg.fixtures.processes import until

HOSTS = ("compute-1", "compute-2", "compute-3", "compute-4")
THIRD = "compute-3"
WAIT = ("--wait", "--within", "90")

pytestmark = pytest.mark.services

Run = Callable[..., tuple[Any, str]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Cloud]:
    folder = tmp_path_factory.mktemp("rollout")
    options: dict[str, dict[str, Any]] = {
        "agent": {"enabled_drivers": "", "discovery_interval": 2, "discovery_timeout": 4},
        "conductor": {"hello_interval": 1, "down_after": 8, "lease": 3, "driver_timeout": 40},
        # What hangs goes on where the gate is open.
        "rolled": {"driver": "fake", "gate": f"{folder}/${{host}}.gate"},
    }
    with (
        fresh_database("mysql", folder) as url,
        cloud(folder, url, rabbit_url, HOSTS, options=options) as it,
    ):
        until("all agents are known", lambda: len(hosts_of(it, "fake")) == len(HOSTS))
        yield it


@pytest.fixture
def cyborg(running: Cloud, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*line: str, code: int = 0) -> tuple[Any, str]:
        way = ["--os-auth-type", "none", "--os-endpoint", running.endpoint]
        assert app.main([*way, *line, "-f", "json"]) == code, capsys.readouterr()
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return json.loads(shown.out) if shown.out else None, shown.err

    return run


def hosts_of(it: Cloud, driver: str) -> list[dict[str, Any]]:
    """Return where a driver is, as the API has it."""
    headers = {"OpenStack-API-Version": "accelerator latest"}
    answer = requests.get(f"{it.endpoint}/v2/drivers/{driver}", headers=headers, timeout=30)
    places: list[dict[str, Any]] = answer.json()["hosts"] if answer.status_code == 200 else []
    return places


def places(cyborg: Run, driver: str, backend: str) -> dict[str, dict[str, Any]]:
    """Return what ``driver-show`` says of a backend, by host."""
    shown = cyborg("driver-show", driver)[0]["Hosts"]
    return {place["host"]: place for place in shown if place["backend"] == backend}


def cards(cyborg: Run, host: str, backend: str) -> int:
    """Return how many devices of a backend the service knows."""
    rows = cyborg("hardware-list", "--host", host, "--long")[0]
    return len([row for row in rows if row["Backend"] == backend])


def open_gates(it: Cloud, *hosts: str) -> None:
    for host in HOSTS:
        gate = Path(it.folder, f"{host}.gate")
        gate.touch() if host in hosts else gate.unlink(missing_ok=True)


def test_five_backends_of_two_drivers_on_one_host(cyborg: Run, running: Cloud) -> None:
    host = ("--host", "compute-1")
    for number, count in enumerate((2, 3)):
        more = ("--config", f"num_devices={count}", "--config", f"address=0000:{number + 1}0:00.0")
        made, _ = cyborg("install-driver", "fake", "--backend", f"f{number}", *host, *more, *WAIT)
        assert made["State"] == "done"
    rules = ("vendor=10de,class=03", "vendor=8086,class=12", "class=0108,resource_class=CUSTOM_X")
    for number, rule in enumerate(rules):
        more = ("--config", f"devices={rule}")
        made, _ = cyborg(
            "install-driver", "generic", "--backend", f"g{number}", *host, *more, *WAIT
        )
        assert made["State"] == "done"
    for backend, count in (("f0", 2), ("f1", 3)):
        until("they are there", lambda b=backend, n=count: cards(cyborg, "compute-1", b) == n)
    for backend in ("g0", "g1", "g2"):
        assert places(cyborg, "generic", backend)["compute-1"]["status"] == "READY"
    for backend in ("f0", "f1"):
        assert places(cyborg, "fake", backend)["compute-1"]["status"] == "READY"
    idles(running, "agent-compute-1")
    for driver in ("fake", "generic"):
        assert cyborg("uninstall-driver", driver, *host, *WAIT)[0]["State"] == "done"
    until("they are gone", lambda: not cyborg("hardware-list", "--host", "compute-1")[0])


def idles(it: Cloud, name: str) -> None:
    """See that an agent that has nothing to do is small, and tells nothing twice."""
    agent = it.daemons[name]
    before = agent.log.read_text()
    # Several discoveries and hellos: that nothing happens meanwhile cannot be waited for.
    time.sleep(5)
    assert agent.log.read_text() == before
    status = Path(f"/proc/{agent.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    assert int(found[1]) < 80 * 1024


@pytest.fixture
def rolled(running: Cloud, cyborg: Run) -> Iterator[Cloud]:
    """The cloud with the backend on all hosts, two cards on each."""
    open_gates(running, *HOSTS)
    made, _ = cyborg(
        "install-driver", "fake", "--backend", "rolled", "--config", "num_devices=2", *WAIT
    )
    assert (made["State"], made["Progress"]) == ("done", {"done": 4})
    for host in HOSTS:
        until("they are there", lambda h=host: cards(cyborg, h, "rolled") == 2)
    yield running
    open_gates(running, *HOSTS)
    made, _ = cyborg("uninstall-driver", "fake", "--backend", "rolled", *WAIT)
    assert made["State"] == "done"
    until("it is gone", lambda: not places(cyborg, "fake", "rolled"))
    until("nothing is left", lambda: not cyborg("hardware-list")[0])


CHANGE = ("--backend", "rolled", "--config", "num_devices=3", "--config", "setup=hang")
ENDS = ["done", "done", "rolled_back", "untouched"]


def check(cyborg: Run, job: str) -> None:
    """See that two hosts are new, the third is as it was, the fourth untouched; and is told so."""
    shown, _ = cyborg("job-show", job)
    steps = {step["host"]: step for step in shown["Steps"]}
    assert [steps[host]["state"] for host in HOSTS] == ENDS
    assert shown["State"] == "failed"
    assert shown["Progress"] == {"done": 2, "rolled_back": 1, "untouched": 1}
    assert "setup takes longer than 4 s" in steps[THIRD]["error"]
    assert THIRD in shown["Error"]
    for host, count in zip(HOSTS, (3, 3, 2, 2), strict=True):
        until("they are there", lambda h=host, n=count: cards(cyborg, h, "rolled") == n)
    until(
        "all hosts have what is wanted of them",
        lambda: all(place["applied"] for place in places(cyborg, "fake", "rolled").values()),
    )
    told = places(cyborg, "fake", "rolled")
    assert [told[host]["status"] for host in HOSTS] == ["READY"] * 4
    assert {place["wish"] for place in told.values()} == {"enabled"}
    listed = {row["Driver"]: row["Hosts"] for row in cyborg("driver-list")[0]}["fake"]
    assert {p["host"]: p["status"] for p in listed} == dict.fromkeys(HOSTS, "READY")


def test_the_third_of_four_fails(cyborg: Run, rolled: Cloud) -> None:
    open_gates(rolled, "compute-1", "compute-2", "compute-4")
    made, err = cyborg("update-driver", "fake", *CHANGE, *WAIT, code=1)
    assert f"{THIRD} (rolled) rolled_back: " in err
    check(cyborg, made["UUID"])


def test_a_conductor_is_killed_in_the_midst(cyborg: Run, rolled: Cloud) -> None:
    open_gates(rolled, "compute-1", "compute-4")
    begun, _ = cyborg("update-driver", "fake", *CHANGE)
    until("the second has its turn", lambda: state(cyborg, begun["UUID"], "compute-2") == "rolling")
    # Whichever of the two it is that looks after the job, the other one goes on.
    rolled.daemons["conductor-1"].kill()
    Path(rolled.folder, "compute-2.gate").touch()
    until("it is over", lambda: cyborg("job-show", begun["UUID"])[0]["State"] != "pending")
    check(cyborg, begun["UUID"])
    rolled.conductor("conductor-1")


def test_an_agent_is_killed_in_the_midst(cyborg: Run, rolled: Cloud) -> None:
    open_gates(rolled, "compute-1", "compute-4")
    begun, _ = cyborg("update-driver", "fake", *CHANGE)
    until("the second has its turn", lambda: state(cyborg, begun["UUID"], "compute-2") == "rolling")
    for _ in range(2):
        rolled.daemons["agent-compute-2"].kill()
        rolled.agent("compute-2")
    Path(rolled.folder, "compute-2.gate").touch()
    until("it is over", lambda: cyborg("job-show", begun["UUID"])[0]["State"] != "pending")
    check(cyborg, begun["UUID"])


def state(cyborg: Run, job: str, host: str) -> str:
    """Return how far a job is on a host."""
    steps = cyborg("job-show", job)[0]["Steps"]
    return str(next(step["state"] for step in steps if step["host"] == host))


def test_what_is_bound_is_taken_back_after_a_forced_uninstallation(
    cyborg: Run, running: Cloud
) -> None:
    host, journal = ("--host", "compute-4", "--backend", "prepared"), running.folder / "journal"
    config = ("--config", "prepare=ok", "--config", f"journal={journal}")
    assert cyborg("install-driver", "fake", *host, *config, *WAIT)[0]["State"] == "done"
    until("it is there", lambda: cards(cyborg, "compute-4", "prepared") == 1)
    provider = cyborg("accelerator-list", "--long")[0][0]["Provider"]
    profile = {"name": "forced", "groups": [{"resources:FPGA": "1"}]}
    assert call(running, "POST", "device_profiles", [profile]).status_code == 201
    made = call(running, "POST", "accelerator_requests", {"device_profile_name": "forced"})
    request, instance = made.json()["arqs"][0]["uuid"], str(uuid.uuid4())
    bind = {"hostname": "compute-4", "device_rp_uuid": provider, "instance_uuid": instance}
    patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in bind.items()]
    assert call(running, "PATCH", "accelerator_requests", {request: patch}).status_code == 202
    until("it is bound", lambda: bound(running, request))
    assert cyborg("uninstall-driver", "fake", *host, "--force", *WAIT)[0]["State"] == "done"
    assert cyborg("accelerator-list")[0], "it is kept for its instance"
    gone = call(running, "DELETE", f"accelerator_requests?instance={instance}")
    assert gone.status_code == 204
    until("it is taken back", lambda: not cyborg("accelerator-list")[0])
    acts = [json.loads(line)["act"] for line in journal.read_text().splitlines()]
    assert acts == ["prepare", "release"]


def call(it: Cloud, method: str, path: str, body: Any = None) -> requests.Response:
    """Ask the API, as Nova does."""
    headers = {"X-Service-Token": "any", "OpenStack-API-Version": "accelerator latest"}
    url = f"{it.endpoint}/v2/{path}"
    return requests.request(method, url, headers=headers, json=body, timeout=30)


def bound(it: Cloud, request: str) -> bool:
    """Tell whether a request is bound."""
    answer = call(it, "GET", f"accelerator_requests/{request}").json()
    return bool(answer["state"] == "Bound")
