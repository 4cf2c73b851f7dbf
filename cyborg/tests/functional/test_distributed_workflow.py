# SPDX-License-Identifier: Apache-2.0
"""The complete workflow on separate processes, with third-party clients.

A production WSGI server with two workers, two conductors, two agents on hosts of different names,
RabbitMQ, real Placement, and MariaDB or PostgreSQL; openstacksdk and python-cyborgclient ask.
"""

import json
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import openstack
import pytest

from cyborg.tests.fixtures.clouds import osc
from cyborg.tests.fixtures.clouds.cloud import Cloud, make_and_run_cloud
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine.processes import BIN, start_fork_server, wait_until
from cyborg.tests.fixtures.machine.tiers import sample

HOSTS = ("compute-1", "compute-2")
HANDLES = 4
# On PostgreSQL, one process of each kind runs its console script. On MariaDB, in the default tier,
# the fork server runs all: the imports of the scripts take seconds of CPU time.
SCRIPTS = ("dbsync", "conductor-1", "agent-compute-1", "api")

pytestmark = [
    pytest.mark.services,
    # openstacksdk emits warnings about its own calls.
    pytest.mark.filterwarnings("ignore::openstack.warnings.RemovedInSDK50Warning"),
]


@pytest.fixture(
    scope="module", params=sample(["mysql", "postgresql"], "mysql", mark=pytest.mark.long)
)
def running(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    rabbit_url: str,
) -> Iterator[Cloud]:
    """Run a cloud on each of the two databases."""
    folder = tmp_path_factory.mktemp(f"cloud-{request.param}")
    with (
        fresh_database(request.param, folder) as url,
        make_and_run_cloud(
            folder,
            url,
            rabbit_url,
            HOSTS,
            HANDLES,
            unforked=SCRIPTS if request.param == "postgresql" else (),
            options={"rpc": {"timeout": 60}},
        ) as cloud,
    ):
        yield cloud


@pytest.fixture(scope="module")
def sdk(running: Cloud) -> Any:
    """Return a connection of an unmodified openstacksdk."""
    return openstack.connect(
        load_yaml_config=False,
        load_envvars=False,
        auth_type="none",
        endpoint=running.endpoint,
    ).accelerator


def client(running: Cloud, *words: str) -> Any:
    """Run an unmodified ``openstack accelerator ...`` and return its JSON output."""
    connect = ("--os-auth-type", "none", "--os-endpoint", running.endpoint)
    command = [str(BIN / "openstack"), *connect, "accelerator", *words]
    process = start_fork_server().run(command, os.environ, osc.IMPORTED)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout) if "json" in words else process.stdout


def inventories(running: Cloud) -> dict[str, Any]:
    """Return the current inventories of all providers below the compute nodes."""
    providers = running.placement.get("/resource_providers").json()["resource_providers"]
    providers = [p for p in providers if p["name"] not in HOSTS]
    bodies = {
        p["name"]: running.placement.get(f"/resource_providers/{p['uuid']}/inventories").json()
        for p in providers
    }
    return {name: body for name, body in bodies.items() if body["inventories"]}


def test_discovered_devices_of_both_hosts_reach_placement(running: Cloud, sdk: Any) -> None:
    devices = wait_until("both agents reported", lambda: _two(list(sdk.devices())))
    assert {d.hostname for d in devices} == set(HOSTS)
    published = wait_until("both cards are in Placement", lambda: _two(inventories(running)))
    for body in published.values():
        assert body["inventories"]["FPGA"]["total"] == HANDLES
    listed = client(running, "device", "list", "-f", "json")
    assert {row["uuid"] for row in listed} == {d.id for d in devices}


def test_all_services_are_up(running: Cloud, sdk: Any) -> None:
    def up() -> list[tuple[str, str]] | None:
        rows = sdk.get("/services", microversion="2.4").json()["services"]
        services = sorted((r["binary"], r["host"]) for r in rows if r["state"] == "up")
        return services if len(services) >= 5 else None

    assert wait_until("every daemon said hello", up) == [
        ("cyborg-agent", "compute-1"),
        ("cyborg-agent", "compute-2"),
        ("cyborg-api", "controller"),
        ("cyborg-conductor", "conductor-1"),
        ("cyborg-conductor", "conductor-2"),
    ]


def test_arq_is_bound_and_released(running: Cloud, sdk: Any) -> None:
    wait_until("both cards are in Placement", lambda: _two(inventories(running)))
    name = f"workflow-{uuid.uuid4().hex[:8]}"
    groups = [{"resources:FPGA": "2", "trait:CUSTOM_FAKE_DEVICE": "required"}]
    group = ",".join(f"{key}={value}" for key, value in groups[0].items())
    client(running, "device", "profile", "create", name, "--group", group)
    profile = sdk.get_device_profile(name)
    assert profile.name == name
    assert profile.groups == groups

    answer = running.placement.get(
        "/allocation_candidates?resources1=FPGA:2&required1=CUSTOM_FAKE_DEVICE&group_policy=none"
    ).json()
    assert len(answer["allocation_requests"]) == 2
    provider = next(iter(answer["allocation_requests"][0]["allocations"]))
    provider_body = running.placement.get(f"/resource_providers/{provider}").json()
    host = provider_body["name"].split("_")[0]
    instance = str(uuid.uuid4())

    creation = sdk.post("/accelerator_requests", json={"device_profile_name": name})
    assert creation.status_code == 201, creation.text
    arqs = [a["uuid"] for a in creation.json()["arqs"]]
    assert len(arqs) == 2
    patch = [
        {"op": "add", "path": "/hostname", "value": host},
        {"op": "add", "path": "/device_rp_uuid", "value": provider},
        {"op": "add", "path": "/instance_uuid", "value": instance},
    ]
    bound = sdk.patch("/accelerator_requests", json=dict.fromkeys(arqs, patch))
    assert bound.status_code == 202, bound.text

    bound_arqs = [a for a in sdk.accelerator_requests() if a.instance_uuid == instance]
    assert {a.id for a in bound_arqs} == set(arqs)
    assert {a.state for a in bound_arqs} == {"Bound"}
    assert {a.attach_handle_type for a in bound_arqs} == {"TEST_PCI"}
    assert len({json.dumps(a.attach_handle_info, sort_keys=True) for a in bound_arqs}) == 2

    rejection = sdk.delete(f"/device_profiles/{name}")
    assert rejection.status_code == 409, rejection.text
    client(running, "arq", "unbind", arqs[0])
    assert sdk.get_accelerator_request(arqs[0]).state == "Unbound"
    assert sdk.delete(f"/accelerator_requests?instance={instance}").status_code == 204
    sdk.delete_accelerator_request(arqs[0], ignore_missing=False)
    assert [a for a in sdk.accelerator_requests() if a.id in arqs] == []
    sdk.delete_device_profile(profile, ignore_missing=False)
    assert list(sdk.device_profiles()) == []


def test_conductor_killed_does_not_stop_the_service(running: Cloud, sdk: Any) -> None:
    running.daemons["conductor-2"].kill()
    for number in range(4):
        body = [{"name": f"after-{number}", "groups": [{"resources:FPGA": "1"}]}]
        creation = sdk.post("/device_profiles", json=body)
        assert creation.status_code == 201, creation.text
        sdk.delete_device_profile(creation.json()["uuid"], ignore_missing=False)
    running.daemons["conductor-2"].start()


@pytest.mark.matrix
def test_calls_wait_until_killed_conductors_are_started_again(running: Cloud, sdk: Any) -> None:
    """As a service manager does it; meanwhile nothing listens for more than four seconds."""
    for name in ("conductor-1", "conductor-2"):
        running.daemons[name].kill()

    def create(number: int) -> int:
        body = [{"name": f"waits-{number}", "groups": [{"resources:FPGA": "1"}]}]
        return int(sdk.post("/device_profiles", json=body).status_code)

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(create, number) for number in range(4)]
        done, _ = wait(answers, timeout=5)
        assert not done
        running.daemons["conductor-1"].start()
        assert [answer.result() for answer in answers] == [201] * 4
    running.daemons["conductor-2"].start()


def test_all_daemons_stop_on_sigterm(running: Cloud) -> None:
    codes = running.stop()
    assert {name: code for name, code in codes.items() if code not in (0, -15)} == {}


def _two(items: Any) -> Any:
    return items if len(items) == 2 else None
