# SPDX-License-Identifier: Apache-2.0
"""The whole story on separate processes, told by the clients that operators have today.

A production WSGI server with two workers, two conductors, two agents on hosts of different names,
RabbitMQ, real Placement, and MariaDB or PostgreSQL; openstacksdk and python-cyborgclient ask.
"""

import json
import subprocess
import uuid
from collections.abc import Iterator
from typing import Any

import openstack
import pytest

from cyborg.fixtures.cloud import Cloud, cloud
from cyborg.fixtures.databases import fresh_database
from cyborg.fixtures.processes import BIN, until

HOSTS = ("compute-1", "compute-2")
HANDLES = 4

pytestmark = [
    pytest.mark.services,
    # openstacksdk warns of calls that it makes itself.
    pytest.mark.filterwarnings("ignore::openstack.warnings.RemovedInSDK50Warning"),
]


@pytest.fixture(scope="module", params=["mysql", "postgresql"])
def running(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    rabbit_url: str,
) -> Iterator[Cloud]:
    """A cloud on each of the two databases."""
    folder = tmp_path_factory.mktemp(f"cloud-{request.param}")
    with (
        fresh_database(request.param, folder) as url,
        cloud(folder, url, rabbit_url, HOSTS, HANDLES) as it,
    ):
        yield it


@pytest.fixture(scope="module")
def sdk(running: Cloud) -> Any:
    """An unmodified openstacksdk."""
    return openstack.connect(
        load_yaml_config=False,
        load_envvars=False,
        auth_type="none",
        endpoint=running.endpoint,
    ).accelerator


def client(running: Cloud, *words: str) -> Any:
    """Run an unmodified ``openstack accelerator ...`` and return what it printed as JSON."""
    connect = ("--os-auth-type", "none", "--os-endpoint", running.endpoint)
    done = subprocess.run(
        [BIN / "openstack", *connect, "accelerator", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if "json" in words else done.stdout


def inventories(running: Cloud) -> dict[str, Any]:
    """Return the inventories of every provider below the hosts' own that has one by now."""
    found = running.placement.get("/resource_providers").json()["resource_providers"]
    found = [p for p in found if p["name"] not in HOSTS]
    bodies = {
        p["name"]: running.placement.get(f"/resource_providers/{p['uuid']}/inventories").json()
        for p in found
    }
    return {name: body for name, body in bodies.items() if body["inventories"]}


def test_devices_of_both_hosts_reach_placement(running: Cloud, sdk: Any) -> None:
    devices = until("both agents reported", lambda: _two(list(sdk.devices())))
    assert {d.hostname for d in devices} == set(HOSTS)
    published = until("both cards are in Placement", lambda: _two(inventories(running)))
    for body in published.values():
        assert body["inventories"]["FPGA"]["total"] == HANDLES
    listed = client(running, "device", "list", "-f", "json")
    assert {row["uuid"] for row in listed} == {d.id for d in devices}


def test_services_are_up(running: Cloud, sdk: Any) -> None:
    def up() -> list[tuple[str, str]] | None:
        rows = sdk.get("/services", microversion="2.4").json()["services"]
        found = sorted((r["binary"], r["host"]) for r in rows if r["state"] == "up")
        return found if len(found) >= 5 else None

    assert until("every daemon said hello", up) == [
        ("cyborg-agent", "compute-1"),
        ("cyborg-agent", "compute-2"),
        ("cyborg-api", "controller"),
        ("cyborg-conductor", "conductor-1"),
        ("cyborg-conductor", "conductor-2"),
    ]


def test_bind_and_release(running: Cloud, sdk: Any) -> None:
    until("both cards are in Placement", lambda: _two(inventories(running)))
    name = f"story-{uuid.uuid4().hex[:8]}"
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
    shown = running.placement.get(f"/resource_providers/{provider}").json()
    host = shown["name"].split("_")[0]
    instance = str(uuid.uuid4())

    made = sdk.post("/accelerator_requests", json={"device_profile_name": name})
    assert made.status_code == 201, made.text
    arqs = [a["uuid"] for a in made.json()["arqs"]]
    assert len(arqs) == 2
    wishes = [
        {"op": "add", "path": "/hostname", "value": host},
        {"op": "add", "path": "/device_rp_uuid", "value": provider},
        {"op": "add", "path": "/instance_uuid", "value": instance},
    ]
    bound = sdk.patch("/accelerator_requests", json=dict.fromkeys(arqs, wishes))
    assert bound.status_code == 202, bound.text

    found = [a for a in sdk.accelerator_requests() if a.instance_uuid == instance]
    assert {a.id for a in found} == set(arqs)
    assert {a.state for a in found} == {"Bound"}
    assert {a.attach_handle_type for a in found} == {"TEST_PCI"}
    assert len({json.dumps(a.attach_handle_info, sort_keys=True) for a in found}) == 2

    refused = sdk.delete(f"/device_profiles/{name}")
    assert refused.status_code == 409, refused.text
    client(running, "arq", "unbind", arqs[0])
    assert sdk.get_accelerator_request(arqs[0]).state == "Unbound"
    assert sdk.delete(f"/accelerator_requests?instance={instance}").status_code == 204
    sdk.delete_accelerator_request(arqs[0], ignore_missing=False)
    assert [a for a in sdk.accelerator_requests() if a.id in arqs] == []
    sdk.delete_device_profile(profile, ignore_missing=False)
    assert client(running, "device", "profile", "list", "-f", "json") == []


def test_a_conductor_may_die(running: Cloud, sdk: Any) -> None:
    running.daemons["conductor-2"].kill()
    for number in range(4):
        body = [{"name": f"after-{number}", "groups": [{"resources:FPGA": "1"}]}]
        made = sdk.post("/device_profiles", json=body)
        assert made.status_code == 201, made.text
        sdk.delete_device_profile(made.json()["uuid"], ignore_missing=False)
    running.daemons["conductor-2"].start()


def test_everything_stops_when_told(running: Cloud) -> None:
    codes = running.stop()
    assert {name: code for name, code in codes.items() if code not in (0, -15)} == {}


def _two(found: Any) -> Any:
    return found if len(found) == 2 else None
