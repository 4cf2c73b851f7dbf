# SPDX-License-Identifier: Apache-2.0
"""Requests flow through the service as the pictures of the guide draw it (G14)."""

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.fixtures.cloud import Cloud, cloud
from cyborg.fixtures.databases import fresh_database
from cyborg.fixtures.flows import FLOWS, PICTURES, ROUTINE, Hop, drawn
from cyborg.fixtures.nova import FakeNova, serving
from cyborg.fixtures.processes import until
from cyborg.rpc.contract import CONTRACTS

HOST = "compute-1"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each flow came to on a service, by its name."""
    done = subprocess.run(
        [sys.executable, "-m", "cyborg.fixtures.flows", tmp_path_factory.mktemp("flows")],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def hops(told: dict[str, Any], flow: str) -> list[Hop]:
    """Return what was seen of a flow."""
    return [Hop(**hop) for hop in told[flow]["hops"]]


def placed(hop: tuple[str, str, str]) -> bool:
    """Tell whether it is the publisher's, which goes its own pace beside the others."""
    return hop[1] == "Placement"


@pytest.mark.parametrize("flow", FLOWS)
def test_a_request_flows_as_it_is_drawn(told: dict[str, Any], flow: str) -> None:
    picture = drawn(f"flow-{flow}")
    seen = [hop.drawn for hop in hops(told, flow)]
    assert [one for one in seen if one[2] not in ROUTINE and not placed(one)] == [
        one for one in picture if one[2] not in ROUTINE and not placed(one)
    ]
    rest = iter(seen)
    missing = [one for one in picture if not placed(one) and one not in rest]
    assert missing == [], "what comes of its own accord, too, has its place among the others"


@pytest.mark.parametrize("flow", ["discover", "install"])
def test_placement_hears_of_it_after_the_report(told: dict[str, Any], flow: str) -> None:
    assert drawn(f"flow-{flow}")[-1] == ("conductor", "Placement", "PUT inventories")
    seen = [hop.what for hop in hops(told, flow)]
    assert seen.index("report") < seen.index("PUT inventories")


@pytest.mark.parametrize("flow", FLOWS)
def test_each_request_is_one_call_of_the_conductor_under_its_id(
    told: dict[str, Any], flow: str
) -> None:
    asked = told[flow]["asked"]
    called = [
        hop.request
        for hop in hops(told, flow)
        if (hop.sender, hop.receiver) == ("API", "conductor") and hop.what not in ROUTINE
    ]
    reads = flow == "bind"  # what is read takes no call
    assert called == (asked[:-1] if reads else asked)
    assert len(set(asked)) == len(asked)


def test_a_discovery_reaches_the_agent_under_the_id_of_its_request(told: dict[str, Any]) -> None:
    (asked,) = told["discover"]["asked"]
    (hop,) = (hop for hop in hops(told, "discover") if hop.what == "discovery")
    assert hop.request == asked


@pytest.mark.parametrize("flow", FLOWS)
def test_the_pictures_speak_of_what_there_is(flow: str) -> None:
    """Messages of the contract, in a page that shows the picture."""
    on_bus = [hop for hop in drawn(f"flow-{flow}") if hop[1] in CONTRACTS]
    assert on_bus
    assert [what for _, to, what in on_bus if what not in CONTRACTS[to].methods] == []
    page = (PICTURES / "flows.rst").read_text(encoding="utf-8")
    assert f".. image:: flow-{flow}.svg" in page
    texts = (PICTURES / f"flow-{flow}.svg").read_text(encoding="utf-8")
    for _, _, what in drawn(f"flow-{flow}"):
        assert f'fill="#111">{what}' in texts, "the arrow's label is its title"


@pytest.fixture(scope="module")
def nova() -> Iterator[FakeNova]:
    with serving(FakeNova()) as it:
        yield it


@pytest.fixture(scope="module")
def apart(
    tmp_path_factory: pytest.TempPathFactory, rabbit_url: str, nova: FakeNova
) -> Iterator[Cloud]:
    """Every daemon a process, with a Nova that is told."""
    folder = tmp_path_factory.mktemp("apart")
    options: dict[str, dict[str, Any]] = {
        "nova": {"notify": "true", "auth_type": "none", "endpoint_override": nova.url},
        "fake": {"prepare": "ok"},
        "oslo_messaging_notifications": {"driver": "log"},
    }
    with (
        fresh_database("postgresql", folder) as url,
        cloud(folder, url, rabbit_url, (HOST,), conductors=("conductor-1",), options=options) as it,
    ):
        yield it


@pytest.mark.services
def test_one_request_id_from_the_api_to_the_event(apart: Cloud, nova: FakeNova) -> None:
    """By the logs and notifications that an operator has."""

    def ask(verb: str, path: str, body: Any, status: int) -> requests.Response:
        answer = requests.request(verb, f"{apart.endpoint}/v2/{path}", json=body, timeout=20)
        assert answer.status_code == status, answer.text
        return answer

    def card() -> Any:
        found = apart.placement.get("/resource_providers?resources=FPGA:1").json()
        return found.get("resource_providers")

    (provider,) = until("the card is in Placement", card)
    ask("POST", "device_profiles", [{"name": "p", "groups": [{"resources:FPGA": "1"}]}], 201)
    made = ask("POST", "accelerator_requests", {"device_profile_name": "p"}, 201)
    (arq,) = made.json()["arqs"]
    instance = str(uuid.uuid4())
    wishes = {"hostname": HOST, "device_rp_uuid": provider["uuid"], "instance_uuid": instance}
    patch = [{"op": "add", "path": f"/{key}", "value": wishes[key]} for key in wishes]
    bound = ask("PATCH", "accelerator_requests", {arq["uuid"]: patch}, 202)
    request = bound.headers["X-Openstack-Request-Id"]
    until("Nova has its event", lambda: nova.tags == [arq["uuid"]])
    (event,) = nova.calls[0]["events"]
    assert (event["server_uuid"], event["status"]) == (instance, "completed")

    (said,) = lines(apart, "conductor-1", f"for instance {instance}")
    assert request in said
    (notice,) = until(
        "a listener is told", lambda: lines(apart, "conductor-1", "accelerator_request.bind.start")
    )
    assert request in notice
    assert arq["uuid"] in notice
    # Host work is a job: from here on its uuid and the instance tell what belongs together.
    (job,) = lines(apart, f"agent-{HOST}", ": prepare, 1 items")
    name = job.partition(" Job ")[2][:36]
    assert uuid.UUID(name)
    assert lines(apart, "conductor-1", f"Job {name} (prepare) on {HOST}: ok")


def lines(apart: Cloud, daemon: str, text: str) -> list[str]:
    """Return the lines of a log that have a text."""
    log = Path(apart.daemons[daemon].log).read_text(errors="replace")
    return [line for line in log.splitlines() if text in line]
