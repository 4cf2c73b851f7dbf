# SPDX-License-Identifier: Apache-2.0
"""A maintenance window over REST and from the command line, on a stand-alone service."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import requests

from cyborg.standalone.stack import StandaloneStack
from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.clouds.filled_service import Client
from cyborg.tests.fixtures.clouds.standalone import HOST, running
from cyborg.tests.fixtures.machine.processes import wait_until


class Service:
    """A stand-alone service with two cards, its fake Nova, and its clients."""

    def __init__(self, stack: StandaloneStack, nova: FakeNova) -> None:
        self.stack, self.nova = stack, nova
        self.cyborg = Client(stack)

    def call(self, method: str, path: str, body: Any = None) -> requests.Response:
        """Send a request to the API."""
        headers = {"OpenStack-API-Version": "accelerator 2.6"}
        url = f"{self.stack.endpoint}/v2/{path}"
        return requests.request(method, url, json=body, headers=headers, timeout=60)

    def boot(self, context: dict[str, Any], provider: str) -> str:
        """Add a server with a context, as Nova does; return its uuid."""
        uuid, profile = str(uuid4()), context["hidden_profile"]
        flavor = {"extra_specs": {"accel:device_profile": profile}}
        project = context["project_id"]
        self.nova.add_server(uuid, HOST, tenant_id=project, locked=False, flavor=flavor)
        body = {"device_profile_name": profile}
        (arq,) = self.call("POST", "accelerator_requests", body).json()["arqs"]
        allocation = {
            "allocations": {provider: {"resources": {"FPGA": 1}}},
            "project_id": project,
            "user_id": "u",
            "consumer_generation": None,
            "consumer_type": "INSTANCE",
        }
        answer = self.stack.placement.put(f"/allocations/{uuid}", json=allocation)
        assert answer.status_code == 204, answer.text
        values = {"hostname": HOST, "device_rp_uuid": provider, "instance_uuid": uuid}
        patch = [{"op": "add", "path": f"/{name}", "value": v} for name, v in values.items()]
        answer = self.call("PATCH", "accelerator_requests", {arq["uuid"]: patch})
        assert answer.status_code == 202, answer.text
        return uuid

    def providers(self, instance: str) -> list[str]:
        """Return the providers of the ARQs that Nova finds."""
        found = self.call("GET", f"accelerator_requests?instance={instance}&bind_state=resolved")
        return [arq["device_rp_uuid"] for arq in found.json()["arqs"]]

    def allocated(self, instance: str) -> dict[str, int]:
        """Return the allocated accelerators of a server, by provider."""
        found = self.stack.placement.get(f"/allocations/{instance}").json()["allocations"]
        return {uuid: item["resources"]["FPGA"] for uuid, item in found.items()}

    def reserved(self, provider: str) -> int:
        """Return the reserved units of a provider in Placement."""
        found = self.stack.placement.get(f"/resource_providers/{provider}/inventories").json()
        return int(found["inventories"]["FPGA"]["reserved"])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with (
        serve_nova(FakeNova()) as nova,
        running(
            tmp_path_factory.mktemp("maintenance"),
            devices=2,
            handles=4,
            nova={"auth_type": "none", "endpoint_override": nova.url},
        ) as stack,
    ):
        yield Service(stack, nova)


@pytest.mark.matrix
def test_maintain_moves_a_context_and_ends(service: Service) -> None:
    cyborg = service.cyborg
    first, other = service.call("GET", "deployables").json()["deployables"]
    context = service.call("POST", "device_contexts", {"resources": {"FPGA": 1}}).json()
    instance = service.boot(context, first["rp_uuid"])
    device, path = first["device_id"], f"device_contexts/{context['uuid']}"
    assert cyborg.run(f"device-maintain {device[:8]} --until +2h --successor auto") == ("", "")

    def successor() -> str | None:
        found = service.call("GET", path).json()["successor"]
        return None if found is None else str(found["state"])

    wait_until("exchanged", lambda: successor() == "awaiting_restart")
    assert service.providers(instance) == [other["rp_uuid"]]
    assert service.allocated(instance) == {first["rp_uuid"]: 1, other["rp_uuid"]: 1}
    # A repeated bind answers what GET shows.
    bind = {"hostname": HOST, "instance_uuid": instance}
    answer = service.call("POST", f"{path}/bind", bind)
    assert (answer.status_code, answer.json()["successor"]["state"]) == (202, "awaiting_restart")
    former = bind | {"mappings": {"0": [first["rp_uuid"]]}}
    assert service.call("POST", f"{path}/bind", former).status_code == 409
    wait_until("closed", lambda: service.reserved(first["rp_uuid"]) == 4)
    window = json.loads(cyborg.run(f"device-show {device} -f json")[0])["Maintenance"]
    assert (window["owned"], window["successor"]) == (1, "auto")
    (owner,) = window["owners"]
    assert (owner["device_context"], owner["instance_uuid"]) == (context["uuid"], instance)
    (row,) = [
        row for row in json.loads(cyborg.run("device-list -f json")[0]) if row["UUID"] == device
    ]
    assert row["Schedulable"].startswith("no: maintaining until ")
    assert row["Schedulable"].endswith(", 1 handle in use")

    service.nova.servers[instance]["status"] = "SHUTOFF"
    wait_until("released", lambda: successor() is None)
    assert service.providers(instance) == [other["rp_uuid"]]
    assert service.allocated(instance) == {other["rp_uuid"]: 1}
    assert service.call("GET", path).json()["state"] == "bound"
    (row,) = [
        row for row in json.loads(cyborg.run("device-list -f json")[0]) if row["UUID"] == device
    ]
    assert row["Schedulable"].endswith(", drained")

    # The window ends by itself.
    until = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    assert cyborg.run(f"device-maintain {device} --until {until}") == ("", "")
    wait_until(
        "enabled", lambda: service.call("GET", f"devices/{device}").json()["state"] == "ready"
    )
    assert service.call("GET", f"devices/{device}").json()["maintenance"] is None
    wait_until("open", lambda: service.reserved(first["rp_uuid"]) == 0)


def test_end_and_bad_windows(service: Service) -> None:
    cyborg = service.cyborg
    device = service.call("GET", "devices").json()["devices"][0]["uuid"]
    cyborg.run(f"device-maintain {device} --until +90m")
    assert cyborg.field(f"device-show {device}", "Status") == "maintaining"

    def mode() -> str | None:
        found = service.call("GET", f"devices/{device}").json()["maintenance"]["successor"]
        return None if found is None else str(found)

    modes = [mode()]
    for option in ("--successor auto", "", "--successor none", ""):
        cyborg.run(f"device-maintain {device} --until 80m {option}")
        modes.append(mode())
    assert modes == [None, "auto", "auto", None, None]
    cyborg.run(f"device-maintain {device} --end")
    assert cyborg.field(f"device-show {device}", "Status") == "enabled"
    for arguments, message in (
        (f"{device} --end", "no maintenance window"),
        (device, "give either --until or --end"),
        (f"{device} --until +1h --end", "give either --until or --end"),
        (f"{device} --end --successor auto", "--successor needs --until"),
        (f"{device} --until 2020-01-01", "in the past"),
        (f"{device} --until +40d", "max_maintenance"),
        (f"{uuid4()} --until +1h", "no device"),
        ("nothing --until +1h", "none of the devices is 'nothing'"),
    ):
        _, error = cyborg.run(f"device-maintain {arguments}", code=1)
        assert message in error, (arguments, error)
    with pytest.raises(SystemExit):  # as argparse ends a command with a malformed option
        cyborg.run(f"device-maintain {device} --until soon")
    assert cyborg.field(f"device-show {device}", "Status") == "enabled"
