# SPDX-License-Identifier: Apache-2.0
"""Layouts of devices in the whole service: REST and commands, agent, fake driver, Placement."""

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from cyborg.core import naming
from cyborg.core.inventory.device import Layout
from cyborg.standalone.stack import DATABASE, StandaloneStack
from cyborg.tests.fixtures.clouds.filled_service import Client
from cyborg.tests.fixtures.clouds.standalone import HOST, running
from cyborg.tests.fixtures.databases.placement import Node
from cyborg.tests.fixtures.device_sets.families import H100_FOUR
from cyborg.tests.fixtures.device_sets.host import SetHost
from cyborg.tests.fixtures.machine.processes import wait_until

CARDS = ("0000:0c:00.0", "0000:0d:00.0")
VERSION = {"OpenStack-API-Version": "accelerator 2.5"}


class Env:
    """A stack with two cards of at most four handles each."""

    def __init__(self, stack: StandaloneStack) -> None:
        self.stack = stack
        self.client = Client(stack)

    def call(self, method: str, path: str, **more: Any) -> requests.Response:
        headers = VERSION | {"X-Service-Token": "any"}
        url = f"{self.stack.endpoint}/v2/{path}"
        return requests.request(method, url, headers=headers, timeout=60, **more)

    def device(self, card: str = CARDS[0]) -> dict[str, Any]:
        (device,) = self.call("GET", f"devices?address={card}").json()["devices"]
        return dict(device)

    def total(self, card: str = CARDS[0]) -> int | None:
        """Return the number of handles of a card in Placement, 0 if they are all reserved."""
        provider = naming.provider_uuid(HOST, card)
        answer = self.stack.placement.get(f"/resource_providers/{provider}/inventories").json()
        body = answer.get("inventories", {}).get("FPGA")
        return None if body is None else int(body["total"] - body["reserved"])

    def run(self, line: str, code: int = 0) -> Any:
        out, err = self.client.run(f"{line} -f json", code)
        return json.loads(out) if out else err


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    folder: Path = tmp_path_factory.mktemp("layouts")
    options = {"divided": folder / "divided"}
    conductor = {"hello_interval": 0.5, "publish_interval": 0.5, "jobs_interval": 0.5}
    with running(folder, devices=2, handles=4, fake=options, conductor=conductor) as stack:
        yield Env(stack)


def test_layout_changes_what_placement_offers(env: Env) -> None:
    device = env.device()
    assert (device["layout"], device["layouts"]) == ("4", ["1", "2", "4"])
    path = f"devices/{device['uuid']}/layout"
    answer = env.call("PUT", path, json={"layout": "2"})
    assert answer.status_code == 202
    job = answer.json()
    assert (job["kind"], job["state"]) == ("partition", "pending")
    assert answer.headers["Location"].endswith(f"/v2/jobs/{job['uuid']}")
    wait_until("the job has ended", lambda: _state(env, job["uuid"]) == "done")
    wait_until("Placement has two handles", lambda: env.total() == 2)
    found = env.call("GET", path).json()
    assert found["layout"] == "2"
    assert found["layouts"][1] == {"name": "2", "offers": {"FPGA": 2}, "traits": []}
    assert env.total(CARDS[1]) == 4


def test_dry_run_shows_what_a_device_would_offer(env: Env) -> None:
    device = env.device()["uuid"]
    layout = env.call("GET", f"devices/{device}/layout").json()["layout"]
    expected = {"1": f"FPGA {layout} -> 1", layout: "offers the same"}
    expected["9"] = "refused, expected one of 1, 2, 4"
    for name, text in expected.items():
        (change,) = env.run(f"device-layout-set {name} {device} --dry-run")
        assert change["details"].endswith(f": {text}")
    assert env.call("GET", f"devices/{device}/layout").json()["layout"] == layout


def test_dry_run_names_the_device_sets_that_are_closed_and_offered(env: Env) -> None:
    engine = sa.create_engine(f"sqlite:///{env.stack.state / DATABASE}")
    host = SetHost(engine, Node(env.stack.placement), H100_FOUR)
    layouts = (Layout("whole", {"PGPU": 1}), Layout("2xvgpu", {"VGPU": 2}))
    host.gpus["01"] = replace(host.gpus["01"], layouts=layouts, layout="whole")
    host.report()
    select = f"--host {host.node.name} --dry-run"
    (change,) = env.run(f"device-layout-set 2xvgpu {select}")
    # Of the four GPUs, those without the first one are a pair and a single one.
    offered = {row["address"]: row["size"] for row in change["device_sets"] if not row["reason"]}
    assert sorted(offered.values()) == [1, 2]
    closed = {row["address"] for row in change["device_sets"]} - offered.keys()
    assert closed == {f"hgx:{name}" for name, units in H100_FOUR.items() if "01" in units}
    text, _ = env.client.run(f"device-layout-set 2xvgpu {select}")
    assert ": PGPU 1 -> 0, VGPU 0 -> 2, " in text
    assert "closes set hgx:1 (4, offered)" in text
    assert all(f"offers set {name} ({size})" in text for name, size in offered.items())
    (change,) = env.run(f"device-layout-set whole {select}")
    assert change["device_sets"] == []
    assert change["details"].endswith(": offers the same")
    engine.dispose()


def bind_card(env: Env) -> str:
    """Bind a request to the second card; return its uuid."""
    profile = {"name": "layouts", "groups": [{"resources:FPGA": "1"}]}
    env.call("POST", "device_profiles", json=[profile])
    created = env.call("POST", "accelerator_requests", json={"device_profile_name": "layouts"})
    arq = created.json()["arqs"][0]["uuid"]
    values = {
        "hostname": HOST,
        "device_rp_uuid": naming.provider_uuid(HOST, CARDS[1]),
        "instance_uuid": str(uuid.uuid4()),
    }
    patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
    assert env.call("PATCH", "accelerator_requests", json={arq: patch}).status_code == 202
    return str(arq)


@pytest.mark.matrix
def test_layout_of_a_device_in_use_is_refused_or_waits(env: Env) -> None:
    device = env.device(CARDS[1])
    arq = bind_card(env)
    refused = env.call("PUT", f"devices/{device['uuid']}/layout", json={"layout": "1"})
    assert refused.status_code == 409
    assert arq in refused.text
    (row,) = env.run(f"device-layout-set 2 {device['uuid']} --drain")
    wait_until("Placement offers nothing", lambda: env.total(CARDS[1]) == 0)
    assert env.device(CARDS[1])["state"] == "disabled"
    wait_until("the job names the request", lambda: arq in str(_job(env, row["Job"])["error"]))
    env.client.run(f"job-cancel {row['Job']}")
    wait_until("Placement offers the others", lambda: env.total(CARDS[1]) == 4)
    change = {"layout": "2", "drain": True}
    job = env.call("PUT", f"devices/{device['uuid']}/layout", json=change).json()["uuid"]
    assert env.call("DELETE", f"accelerator_requests?arqs={arq}").status_code == 204
    wait_until("the job has ended", lambda: _state(env, job) == "done")
    wait_until("Placement has two handles", lambda: env.total(CARDS[1]) == 2)


def test_wrong_layouts_are_refused(env: Env) -> None:
    path = f"devices/{env.device()['uuid']}/layout"
    for body, status in (({"layout": "9"}, 400), ({}, 400), ({"layout": 2}, 400)):
        assert env.call("PUT", path, json=body).status_code == status
    unknown = env.call("PUT", f"devices/{uuid.uuid4()}/layout", json={"layout": "1"})
    assert unknown.status_code == 404
    older = {"OpenStack-API-Version": "accelerator 2.4"}
    url = f"{env.stack.endpoint}/v2/{path}"
    assert requests.get(url, headers=older, timeout=60).status_code == 404
    assert "layout" not in requests.get(url.rpartition("/")[0], headers=older, timeout=60).json()


@pytest.mark.matrix
def test_commands_list_and_set_layouts(env: Env) -> None:
    uuids = [env.device(card)["uuid"] for card in CARDS]
    rows = env.run(f"device-layout-list {uuids[0]}")
    assert [row["Name"] for row in rows] == ["1", "2", "4"]
    done = env.run("device-layout-set 1 --all --wait")
    assert [(row["Device"], row["State"], row["Error"]) for row in done] == [
        (uuid, "done", None) for uuid in uuids
    ]
    for card in CARDS:
        wait_until("Placement has one handle", lambda card=card: env.total(card) == 1)  # type: ignore[misc]
    (row,) = env.run(f"device-layout-set 9 {uuids[0]}", 1)
    assert "expected one of 1, 2, 4" in row["Error"]
    for line in ("device-layout-set 1", f"device-layout-set 1 {uuids[0]} --all"):
        assert "give either devices" in env.client.run(line, 1)[1]
    assert "no matching device" in env.client.run("device-layout-set 7 --all", 1)[1]


def _job(env: Env, job: str) -> dict[str, Any]:
    return dict(env.call("GET", f"jobs/{job}").json())


def _state(env: Env, job: str) -> str:
    return str(_job(env, job)["state"])
