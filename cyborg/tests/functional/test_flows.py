# SPDX-License-Identifier: Apache-2.0
"""The request flows of the service match the diagrams of the documentation (G14)."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.rpc.contract import CONTRACTS
from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.clouds.cloud import Cloud, make_and_run_cloud
from cyborg.tests.fixtures.clouds.flows import FLOWS, PICTURES, ROUTINE, Hop, drawn_hops
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine.processes import run_forked, wait_until

HOST = "compute-1"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all flows on a service and return their hops by name."""
    results: dict[str, Any] = run_forked(
        "-m", "cyborg.tests.fixtures.clouds.flows", tmp_path_factory.mktemp("flows")
    )
    return results


def hops(recordings: dict[str, Any], flow: str) -> list[Hop]:
    """Return the recorded hops of a flow."""
    return [Hop(**hop) for hop in recordings[flow]["hops"]]


def placed(hop: tuple[str, str, str]) -> bool:
    """Return whether a hop belongs to the publisher, which is asynchronous."""
    return hop[1] == "Placement"


def without_retries(
    hops_seen: list[tuple[str, str, str]], picture: list[tuple[str, str, str]]
) -> list[tuple[str, str, str]]:
    """Return the hops without repetitions of hops of the diagram.

    A late message is sent again, which happens on a busy machine.
    """
    return [
        hop
        for n, hop in enumerate(hops_seen)
        if hop not in picture or hops_seen[:n].count(hop) < picture.count(hop)
    ]


@pytest.mark.parametrize("flow", FLOWS)
def test_flow_matches_its_diagram(recordings: dict[str, Any], flow: str) -> None:
    picture = drawn_hops(f"flow-{flow}")
    observed_hops = without_retries([hop.drawn for hop in hops(recordings, flow)], picture)
    assert [one for one in observed_hops if one[2] not in ROUTINE and not placed(one)] == [
        one for one in picture if one[2] not in ROUTINE and not placed(one)
    ]
    remaining = iter(observed_hops)
    missing = [one for one in picture if not placed(one) and one not in remaining]
    assert missing == [], "periodic calls of the diagram occur in order"


@pytest.mark.parametrize("flow", ["discover", "install"])
def test_placement_is_updated_after_the_report(recordings: dict[str, Any], flow: str) -> None:
    assert drawn_hops(f"flow-{flow}")[-1] == ("conductor", "Placement", "PUT inventories")
    steps = [hop.what for hop in hops(recordings, flow)]
    assert steps.index("report") < steps.index("PUT inventories")


@pytest.mark.parametrize("flow", FLOWS)
def test_each_api_request_is_one_rpc_call_with_its_request_id(
    recordings: dict[str, Any], flow: str
) -> None:
    request_ids = recordings[flow]["request_ids"]
    calls = [
        hop.request
        for hop in hops(recordings, flow)
        if (hop.sender, hop.receiver) == ("API", "conductor") and hop.what not in ROUTINE
    ]
    reads = flow == "bind"  # reads need no call
    assert calls == (request_ids[:-1] if reads else request_ids)
    assert len(set(request_ids)) == len(request_ids)


def test_discovery_call_to_agent_carries_the_request_id(recordings: dict[str, Any]) -> None:
    (request_id,) = recordings["discover"]["request_ids"]
    (hop,) = (hop for hop in hops(recordings, "discover") if hop.what == "discovery")
    assert hop.request == request_id


@pytest.mark.parametrize("flow", FLOWS)
def test_diagram_names_exist_in_the_code(flow: str) -> None:
    """The diagram shows messages of the contract, and the page includes the diagram."""
    on_bus = [hop for hop in drawn_hops(f"flow-{flow}") if hop[1] in CONTRACTS]
    assert on_bus
    assert [label for _, to, label in on_bus if label not in CONTRACTS[to].methods] == []
    page = (PICTURES / "flows.rst").read_text(encoding="utf-8")
    assert f".. image:: flow-{flow}.svg" in page
    texts = (PICTURES / f"flow-{flow}.svg").read_text(encoding="utf-8")
    for _, _, label in drawn_hops(f"flow-{flow}"):
        assert f'fill="#111">{label}' in texts, "the arrow's label is its title"


@pytest.fixture(scope="module")
def nova() -> Iterator[FakeNova]:
    with serve_nova(FakeNova()) as fake_nova:
        yield fake_nova


@pytest.fixture(scope="module")
def separate_cloud(
    tmp_path_factory: pytest.TempPathFactory, rabbit_url: str, nova: FakeNova
) -> Iterator[Cloud]:
    """Run every daemon as a process, with a fake Nova."""
    folder = tmp_path_factory.mktemp("apart")
    options: dict[str, dict[str, Any]] = {
        "nova": {"send_events": "true", "auth_type": "none", "endpoint_override": nova.url},
        "fake": {"prepare": "ok"},
        "oslo_messaging_notifications": {"driver": "log"},
    }
    with (
        fresh_database("postgresql", folder) as url,
        make_and_run_cloud(
            folder, url, rabbit_url, (HOST,), conductors=("conductor-1",), options=options
        ) as cloud,
    ):
        yield cloud


@pytest.mark.services
@pytest.mark.matrix  # over processes: the recorded flows show the request ids too
def test_request_id_is_the_same_from_api_to_event(separate_cloud: Cloud, nova: FakeNova) -> None:
    """Checked in the logs and notifications of an operator."""

    def ask(verb: str, path: str, body: Any, status: int) -> requests.Response:
        answer = requests.request(
            verb, f"{separate_cloud.endpoint}/v2/{path}", json=body, timeout=20
        )
        assert answer.status_code == status, answer.text
        return answer

    def card() -> Any:
        providers = separate_cloud.placement.get("/resource_providers?resources=FPGA:1").json()
        return providers.get("resource_providers")

    (provider,) = wait_until("the card is in Placement", card)
    ask("POST", "device_profiles", [{"name": "p", "groups": [{"resources:FPGA": "1"}]}], 201)
    creation = ask("POST", "accelerator_requests", {"device_profile_name": "p"}, 201)
    (arq,) = creation.json()["arqs"]
    instance = str(uuid.uuid4())
    values = {"hostname": HOST, "device_rp_uuid": provider["uuid"], "instance_uuid": instance}
    patch = [{"op": "add", "path": f"/{key}", "value": values[key]} for key in values]
    bound = ask("PATCH", "accelerator_requests", {arq["uuid"]: patch}, 202)
    request = bound.headers["X-Openstack-Request-Id"]
    wait_until("Nova has its event", lambda: nova.tags == [arq["uuid"]])
    (event,) = nova.calls[0]["events"]
    assert (event["server_uuid"], event["status"]) == (instance, "completed")

    (line,) = lines(separate_cloud, "conductor-1", f"instance={instance}] Preparing 1 ARQ(s)")
    assert request in line
    (notice,) = wait_until(
        "a listener is told",
        lambda: lines(separate_cloud, "conductor-1", "accelerator_request.bind.start"),
    )
    assert request in notice
    assert arq["uuid"] in notice
    # Host work is a job: from here on its uuid and the instance identify the log lines.
    (job,) = lines(separate_cloud, f"agent-{HOST}", "Job started: prepare, 1 items")
    name = job.partition("[job=")[2][:36]
    assert uuid.UUID(name)
    assert f" instance={instance}] " in job
    assert lines(separate_cloud, "conductor-1", f"[job={name} host={HOST} instance=")


def lines(separate_cloud: Cloud, daemon: str, text: str) -> list[str]:
    """Return the lines of a log that contain a text."""
    log = Path(separate_cloud.daemons[daemon].log).read_text(errors="replace")
    return [line for line in log.splitlines() if text in line]
