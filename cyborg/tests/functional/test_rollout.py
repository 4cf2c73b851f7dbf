# SPDX-License-Identifier: Apache-2.0
"""Changes of drivers on real agents: several backends of one host, and rollouts.

Four agents, two conductors, MariaDB, RabbitMQ, Placement, and the command ``cyborg``.
"""

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.cli import app
from cyborg.tests.fixtures.clouds.cloud import Cloud, make_and_run_cloud
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine.processes import wait_until

HOSTS = ("compute-1", "compute-2", "compute-3", "compute-4")
THIRD = "compute-3"
MEASURED = "agent-compute-1"  # a forked process shares its memory
WAIT = ("--wait", "--within", "300")

pytestmark = [pytest.mark.services, pytest.mark.matrix]

Run = Callable[..., tuple[Any, str]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Cloud]:
    folder = tmp_path_factory.mktemp("rollout")
    options: dict[str, dict[str, Any]] = {
        "agent": {
            "enabled_drivers": "",
            "allow_reference_drivers": True,
            "discovery_interval": 2,
            "discovery_timeout": 4,
        },
        "conductor": {
            "hello_interval": 1,
            "down_heartbeats": 8,
            "lease_timeout": 3,
            "driver_timeout": 40,
        },
        # Hanging calls continue where the gate file exists.
        "rolled": {"driver": "fake", "gate": f"{folder}/${{host}}.gate"},
        "prepared": {"driver": "fake", "journal": f"{folder}/journal"},
    }
    with (
        fresh_database("mysql", folder) as url,
        make_and_run_cloud(
            folder, url, rabbit_url, HOSTS, options=options, unforked=[MEASURED]
        ) as cloud,
    ):
        wait_until("all agents are known", lambda: len(hosts_of(cloud, "fake")) == len(HOSTS))
        yield cloud


@pytest.fixture
def cyborg(running: Cloud, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*line: str, code: int = 0) -> tuple[Any, str]:
        connection = ["--os-auth-type", "none", "--os-endpoint", running.endpoint]
        assert app.main([*connection, *line, "-f", "json"]) == code, capsys.readouterr()
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return json.loads(output.out) if output.out else None, output.err

    return run


def hosts_of(cloud: Cloud, driver: str) -> list[dict[str, Any]]:
    """Return the hosts of a driver from the API."""
    headers = {"OpenStack-API-Version": "accelerator latest"}
    answer = requests.get(f"{cloud.endpoint}/v2/drivers/{driver}", headers=headers, timeout=60)
    places: list[dict[str, Any]] = answer.json()["hosts"] if answer.status_code == 200 else []
    return places


def places(cyborg: Run, driver: str, backend: str) -> dict[str, dict[str, Any]]:
    """Return the entries of ``driver-show`` for a backend, by host."""
    hosts = cyborg("driver-show", driver)[0]["Hosts"]
    return {place["host"]: place for place in hosts if place["backend"] == backend}


def cards(cyborg: Run, host: str, backend: str) -> int:
    """Return the number of devices of a backend."""
    rows = cyborg("hardware-list", "--host", host, "--long")[0]
    return len([row for row in rows if row["Backend"] == backend])


def has_cards(cyborg: Run, host: str, backend: str, count: int) -> bool:
    return cards(cyborg, host, backend) == count


def open_gates(cloud: Cloud, *hosts: str) -> None:
    for host in HOSTS:
        gate = Path(cloud.folder, f"{host}.gate")
        gate.touch() if host in hosts else gate.unlink(missing_ok=True)


def test_rollout_installs_five_backends_of_two_drivers(cyborg: Run, running: Cloud) -> None:
    host = ("--host", "compute-1")
    for number, count in enumerate((2, 3)):
        more = ("--config", f"num_devices={count}", "--config", f"address=0000:{number + 1}0:00.0")
        creation, _ = cyborg(
            "install-driver", "fake", "--backend", f"f{number}", *host, *more, *WAIT
        )
        assert creation["State"] == "done"
    rules = ("vendor=10de,class=03", "vendor=8086,class=12", "class=0108,resource_class=CUSTOM_X")
    for number, rule in enumerate(rules):
        config = ("--config", f"devices={rule}")
        creation, _ = cyborg(
            "install-driver", "generic", "--backend", f"g{number}", *host, *config, *WAIT
        )
        assert creation["State"] == "done"
    for backend, count in (("f0", 2), ("f1", 3)):
        wait_until("they are there", partial(has_cards, cyborg, "compute-1", backend, count))
    for backend in ("g0", "g1", "g2"):
        assert places(cyborg, "generic", backend)["compute-1"]["status"] == "READY"
    for backend in ("f0", "f1"):
        assert places(cyborg, "fake", backend)["compute-1"]["status"] == "READY"
    assert_idle(running, MEASURED)
    for driver in ("fake", "generic"):
        assert cyborg("uninstall-driver", driver, *host, *WAIT)[0]["State"] == "done"
    wait_until("they are gone", lambda: not cyborg("hardware-list", "--host", "compute-1")[0])


def assert_idle(cloud: Cloud, name: str) -> None:
    """Check that an idle agent uses little memory, and repeats no report."""
    agent = cloud.daemons[name]
    before = agent.log.read_text()
    # Wait for several discoveries and heartbeats, in which nothing may happen.
    time.sleep(5)
    assert agent.log.read_text() == before
    status = Path(f"/proc/{agent.pid}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match is not None
    assert int(match[1]) < 80 * 1024


@pytest.fixture
def rolled(running: Cloud, cyborg: Run) -> Iterator[Cloud]:
    """Return the cloud with the backend on all hosts, two cards on each."""
    open_gates(running, *HOSTS)
    creation, _ = cyborg(
        "install-driver", "fake", "--backend", "rolled", "--config", "num_devices=2", *WAIT
    )
    assert (creation["State"], creation["Progress"]) == ("done", {"done": 4})
    for host in HOSTS:
        wait_until("they are there", partial(has_cards, cyborg, host, "rolled", 2))
    yield running
    open_gates(running, *HOSTS)
    creation, _ = cyborg("uninstall-driver", "fake", "--backend", "rolled", *WAIT)
    assert creation["State"] == "done"
    wait_until("it is gone", lambda: not places(cyborg, "fake", "rolled"))
    wait_until("nothing is left", lambda: not cyborg("hardware-list")[0])


CHANGE = ("--backend", "rolled", "--config", "num_devices=3", "--config", "setup=hang")
ENDS = ["done", "done", "rolled_back", "skipped"]


def check(cyborg: Run, job: str) -> None:
    """Check that two hosts are updated, the third is rolled back, the fourth skipped."""
    detail, _ = cyborg("job-show", job)
    steps = {step["host"]: step for step in detail["Steps"]}
    assert [steps[host]["state"] for host in HOSTS] == ENDS
    assert detail["State"] == "failed"
    assert detail["Progress"] == {"done": 2, "rolled_back": 1, "skipped": 1}
    assert "setup takes longer than 4 s" in steps[THIRD]["error"]
    assert THIRD in detail["Error"]
    for host, count in zip(HOSTS, (3, 3, 2, 2), strict=True):
        wait_until("they are there", partial(has_cards, cyborg, host, "rolled", count))
    wait_until(
        "all hosts have what is wanted of them",
        lambda: all(place["applied"] for place in places(cyborg, "fake", "rolled").values()),
    )
    backends = places(cyborg, "fake", "rolled")
    assert [backends[host]["status"] for host in HOSTS] == ["READY"] * 4
    assert {place["desired_status"] for place in backends.values()} == {"enabled"}
    listed = {row["Driver"]: row["Hosts"] for row in cyborg("driver-list")[0]}["fake"]
    assert listed == {"READY": len(HOSTS)}


def test_rollout_stops_when_the_third_of_four_hosts_fails(cyborg: Run, rolled: Cloud) -> None:
    open_gates(rolled, "compute-1", "compute-2", "compute-4")
    creation, err = cyborg("update-driver", "fake", *CHANGE, *WAIT, code=1)
    assert f"{THIRD} (rolled) rolled_back: " in err
    check(cyborg, creation["UUID"])


@pytest.mark.long
def test_rollout_continues_after_conductor_is_killed(cyborg: Run, rolled: Cloud) -> None:
    open_gates(rolled, "compute-1", "compute-4")
    begun, _ = cyborg("update-driver", "fake", *CHANGE)
    wait_until(
        "the second has its turn",
        lambda: state(cyborg, begun["UUID"], "compute-2") == "in_progress",
    )
    # Either conductor may process the job; the other one continues.
    rolled.daemons["conductor-1"].kill()
    Path(rolled.folder, "compute-2.gate").touch()
    wait_until("it is over", lambda: cyborg("job-show", begun["UUID"])[0]["State"] != "pending")
    check(cyborg, begun["UUID"])
    rolled.conductor("conductor-1")


@pytest.mark.long
def test_rollout_continues_after_agent_is_killed(cyborg: Run, rolled: Cloud) -> None:
    open_gates(rolled, "compute-1", "compute-4")
    begun, _ = cyborg("update-driver", "fake", *CHANGE)
    wait_until(
        "the second has its turn",
        lambda: state(cyborg, begun["UUID"], "compute-2") == "in_progress",
    )
    for _ in range(2):
        rolled.daemons["agent-compute-2"].kill()
        rolled.agent("compute-2")
    Path(rolled.folder, "compute-2.gate").touch()
    wait_until("it is over", lambda: cyborg("job-show", begun["UUID"])[0]["State"] != "pending")
    check(cyborg, begun["UUID"])


def state(cyborg: Run, job: str, host: str) -> str:
    """Return the state of the step of a host."""
    steps = cyborg("job-show", job)[0]["Steps"]
    return str(next(step["state"] for step in steps if step["host"] == host))


def test_forced_uninstall_releases_bound_handles(cyborg: Run, running: Cloud) -> None:
    host, journal = ("--host", "compute-4", "--backend", "prepared"), running.folder / "journal"
    config = ("--config", "prepare=ok")
    assert cyborg("install-driver", "fake", *host, *config, *WAIT)[0]["State"] == "done"
    wait_until("it is there", lambda: cards(cyborg, "compute-4", "prepared") == 1)
    provider = cyborg("accelerator-list", "--long")[0][0]["Provider"]
    profile = {"name": "forced", "groups": [{"resources:FPGA": "1"}]}
    assert call(running, "POST", "device_profiles", [profile]).status_code == 201
    creation = call(running, "POST", "accelerator_requests", {"device_profile_name": "forced"})
    request, instance = creation.json()["arqs"][0]["uuid"], str(uuid.uuid4())
    bind = {"hostname": "compute-4", "device_rp_uuid": provider, "instance_uuid": instance}
    patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in bind.items()]
    assert call(running, "PATCH", "accelerator_requests", {request: patch}).status_code == 202
    wait_until("it is bound", lambda: bound(running, request))
    assert cyborg("uninstall-driver", "fake", *host, "--force", *WAIT)[0]["State"] == "done"
    assert cyborg("accelerator-list")[0], "it is kept for its instance"
    deletion = call(running, "DELETE", f"accelerator_requests?instance={instance}")
    assert deletion.status_code == 204
    wait_until("it is taken back", lambda: not cyborg("accelerator-list")[0])
    acts = [json.loads(line)["act"] for line in journal.read_text().splitlines()]
    assert acts == ["prepare", "release"]


def call(cloud: Cloud, method: str, path: str, body: Any = None) -> requests.Response:
    """Call the API as Nova does."""
    headers = {"X-Service-Token": "any", "OpenStack-API-Version": "accelerator latest"}
    url = f"{cloud.endpoint}/v2/{path}"
    return requests.request(method, url, headers=headers, json=body, timeout=60)


def bound(cloud: Cloud, request: str) -> bool:
    """Return whether an ARQ is bound."""
    answer = call(cloud, "GET", f"accelerator_requests/{request}").json()
    return bool(answer["state"] == "Bound")
