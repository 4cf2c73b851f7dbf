# SPDX-License-Identifier: Apache-2.0
"""Attachments over REST and from the command line, on a stand-alone service with a fake Nova."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import requests

from cyborg.standalone.stack import StandaloneStack
from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.clouds.filled_service import Client
from cyborg.tests.fixtures.clouds.standalone import HOST, running
from cyborg.tests.fixtures.machine.processes import wait_until

GROUPS = [{"resources:FPGA": "1", "trait:CUSTOM_FAKE_DEVICE": "required"}]
FLAVOR = {"extra_specs": {"accel:device_profile": "one-fpga"}}
UNKNOWN = "6f4fa6e9-3c5c-4a8b-9a35-3f4b0c3e1a11"


class Service:
    """A stand-alone service, its fake Nova, and its clients."""

    def __init__(self, stack: StandaloneStack, nova: FakeNova) -> None:
        self.stack, self.nova = stack, nova
        self.cyborg = Client(stack)

    def call(
        self, method: str, path: str, body: Any = None, version: str = "2.6"
    ) -> requests.Response:
        """Send a request to the API."""
        headers = {"OpenStack-API-Version": f"accelerator {version}"}
        url = f"{self.stack.endpoint}/v2/{path}"
        return requests.request(method, url, json=body, headers=headers, timeout=60)

    def boot(self) -> str:
        """Add a server with one accelerator, as Nova does; return its uuid."""
        uuid = str(uuid4())
        self.nova.add_server(uuid, HOST, tenant_id="p", locked=False, flavor=FLAVOR)
        (arq,) = self.call(
            "POST", "accelerator_requests", {"device_profile_name": "one-fpga"}
        ).json()["arqs"]
        (card,) = self.call("GET", "deployables").json()["deployables"]
        body = {
            "allocations": {card["rp_uuid"]: {"resources": {"FPGA": 1}}},
            "project_id": "p",
            "user_id": "u",
            "consumer_generation": None,
            "consumer_type": "INSTANCE",
        }
        answer = self.stack.placement.put(f"/allocations/{uuid}", json=body)
        assert answer.status_code == 204, answer.text
        values = {"hostname": HOST, "device_rp_uuid": card["rp_uuid"], "instance_uuid": uuid}
        patch = [{"op": "add", "path": f"/{name}", "value": v} for name, v in values.items()]
        answer = self.call("PATCH", "accelerator_requests", {arq["uuid"]: patch})
        assert answer.status_code == 202, answer.text
        return uuid

    def arqs(self, instance: str) -> list[str]:
        """Return the ARQs that Nova finds."""
        found = self.call("GET", f"accelerator_requests?instance={instance}&bind_state=resolved")
        assert found.status_code == 200, found.text
        return [arq["uuid"] for arq in found.json()["arqs"]]

    def allocated(self, instance: str) -> int:
        """Return the accelerators in the allocation of a server."""
        (item,) = (
            self.stack.placement.get(f"/allocations/{instance}").json()["allocations"].values()
        )
        return int(item["resources"]["FPGA"])


def boot_own(service: Service) -> str:
    """Add a server of the project of the caller."""
    instance = service.boot()
    service.nova.servers[instance]["tenant_id"] = "noauth"
    return instance


def state(service: Service, context: str) -> tuple[str, str | None]:
    """Return the state and the server of a context."""
    found = service.call("GET", f"device_contexts/{context}").json()
    return found["state"], found["instance_uuid"]


def free_accelerators(service: Service) -> list[str]:
    """Return the uuids of the free accelerators."""
    found = service.call("GET", "accelerators?state=free&limit=1000").json()["accelerators"]
    return [row["uuid"] for row in found]


@contextmanager
def run_service(folder: Path) -> Iterator[Service]:
    """Run a service with a fake Nova and one device profile."""
    with (
        serve_nova(FakeNova()) as nova,
        running(
            folder, handles=64, nova={"auth_type": "none", "endpoint_override": nova.url}
        ) as stack,
    ):
        service = Service(stack, nova)
        answer = service.call("POST", "device_profiles", {"name": "one-fpga", "groups": GROUPS})
        assert answer.status_code == 201, answer.text
        yield service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with run_service(tmp_path_factory.mktemp("attachments")) as service:
        yield service


def test_attach_and_detach_over_rest(service: Service) -> None:
    instance = service.boot()
    before = service.arqs(instance)
    body = {"instance_uuid": instance, "device_profile": "one-fpga", "reboot": True}
    answer = service.call("POST", "attachments", body)
    assert answer.status_code == 202, answer.text
    created = answer.json()
    assert answer.headers["Location"].endswith(f"/v2/attachments/{created['uuid']}")
    assert (created["state"], created["mode"]) == ("attaching", "next-boot")
    again = service.call("POST", "attachments", body).json()
    assert again["uuid"] == created["uuid"]
    path = f"attachments/{created['uuid']}"
    wait_until("attached", lambda: service.call("GET", path).json()["state"] == "attached")
    shown = service.call("GET", path).json()
    assert (shown["device_profile"], shown["device_context"], shown["accelerator"]) == (
        "one-fpga",
        None,
        None,
    )
    assert service.arqs(instance) == [*before, *shown["arqs"]]
    assert (service.allocated(instance), len(shown["arqs"])) == (2, 1)
    assert service.nova.reboots == [(instance, "HARD")]
    refused = service.call("DELETE", path)
    assert refused.status_code == 409
    assert "stop it, or detach with a reboot" in refused.text
    # Without keystone, the service cannot recognize its own reboots.
    service.nova.servers[instance]["status"] = "SHUTOFF"
    assert service.call("DELETE", f"{path}?reboot=true").status_code == 202
    wait_until("detached", lambda: service.call("GET", path).status_code == 404)
    assert (service.arqs(instance), service.allocated(instance)) == (before, 1)
    assert len(service.nova.reboots) == 1
    missing = service.call("DELETE", f"attachments?instance={instance}")
    assert missing.status_code == 404
    assert instance in missing.text


def test_commands(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cyborg, instance = service.cyborg, service.boot()
    uuid = cyborg.field(f"attach-instance {instance} --profile one-fpga --wait")
    listed = json.loads(cyborg.run(f"attachment-list --instance {instance} -f json")[0])
    assert [(row["UUID"], row["State"], row["Selected"]) for row in listed] == [
        (uuid, "attached", "one-fpga")
    ]
    table = cyborg.run(f"attachment-list --instance {instance[:8]} --state attached")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert len(table.splitlines()) == 5
    assert cyborg.field(f"attachment-show {uuid[:8]}", "Mode") == "next-boot"
    assert service.allocated(instance) == 2
    other = service.boot()
    _, error = cyborg.run(f"detach-instance {other} --attachment {uuid}", code=1)
    assert f"belongs to server {instance}, not to {other}" in error
    assert cyborg.field(f"attachment-show {uuid}", "State") == "attached"
    cyborg.run(f"detach-instance {instance} --wait")
    assert cyborg.run(f"attachment-list --instance {instance}") == ("", "no attachments\n")
    assert service.allocated(instance) == 1
    _, error = cyborg.run(f"detach-instance {instance}", code=1)
    assert "has no attachment" in error


@pytest.mark.matrix
def test_attach_in_progress_is_cancelled_by_commands(service: Service) -> None:
    instance = service.boot()
    service.nova.reboot_status = 409
    try:
        uuid = service.cyborg.field(f"attach-instance {instance} --profile one-fpga --reboot")
        wait_until(
            "the attach waits for Nova",
            lambda: service.cyborg.field(f"attachment-show {uuid}", "Step") == "reboot",
        )
        service.cyborg.run(f"detach-instance {instance} --attachment {uuid} --wait")
    finally:
        service.nova.reboot_status = 202
    assert service.call("GET", f"attachments/{uuid}").status_code == 404
    assert service.allocated(instance) == 1


def test_failed_attach_sets_the_exit_status(service: Service) -> None:
    instance = service.boot()
    groups = [{"resources:FPGA": "200"}]
    name = f"large-{instance}"
    service.call("POST", "device_profiles", {"name": name, "groups": groups})
    _, error = service.cyborg.run(f"attach-instance {instance} --profile {name} --wait", code=1)
    assert f"no free device for profile {name}" in error
    (row,) = service.call("GET", f"attachments?instance={instance}&state=error").json()[
        "attachments"
    ]
    assert service.allocated(instance) == 1
    service.cyborg.run(f"detach-instance {instance} --attachment {row['uuid']}")
    assert service.call("GET", f"attachments/{row['uuid']}").status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "device_profile"),
        ({"device_profile": "one-fpga"}, 400, "instance_uuid"),
        ({"instance_uuid": "x", "device_profile": "one-fpga"}, 400, "instance_uuid"),
        ({"instance_uuid": UNKNOWN}, 400, "device_profile"),
        ({"instance_uuid": UNKNOWN, "device_profile": ""}, 400, "device_profile"),
        (
            {"instance_uuid": UNKNOWN, "device_profile": "p", "accelerator": UNKNOWN},
            400,
            "accelerator",
        ),
        ({"instance_uuid": UNKNOWN, "accelerator": UNKNOWN}, 404, "instance_uuid"),
        ({"instance_uuid": UNKNOWN, "accelerator": "x"}, 400, "accelerator"),
        ({"instance_uuid": UNKNOWN, "accelerator": 7}, 400, "accelerator"),
        ({"instance_uuid": UNKNOWN, "device_context": UNKNOWN}, 404, "instance_uuid"),
        ({"instance_uuid": UNKNOWN, "device_context": "x"}, 400, "device_context"),
        ({"instance_uuid": UNKNOWN, "device_profile": "p", "mode": "now"}, 400, "mode"),
        (
            {
                "instance_uuid": UNKNOWN,
                "device_profile": "p",
                "mode": "live",
                "reboot": True,
            },
            400,
            "reboot",
        ),
        ({"instance_uuid": UNKNOWN, "device_profile": "p", "reboot": "yes"}, 400, "reboot"),
        ({"instance_uuid": UNKNOWN, "device_profile": "p", "other": 1}, 400, "other"),
        ({"instance_uuid": UNKNOWN, "device_profile": "one-fpga"}, 404, "instance_uuid"),
    ],
)
def test_bad_body_is_a_client_error_that_names_the_field(
    service: Service, body: dict[str, Any], status: int, field: str
) -> None:
    answer = service.call("POST", "attachments", body)
    assert (answer.status_code, field in answer.text) == (status, True), answer.text
    assert service.call("GET", f"attachments?instance={UNKNOWN}").json() == {"attachments": []}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("attachments", 400),
        ("attachments?instance=x", 400),
        (f"attachments?instance={UNKNOWN}&reboot=1", 400),
        (f"attachments?instance={UNKNOWN}", 404),
        (f"attachments?instance={UNKNOWN}&accelerator={UNKNOWN}", 404),
        (f"attachments?instance={UNKNOWN}&accelerator=x", 400),
        (f"attachments?accelerator={UNKNOWN}", 400),
        (f"attachments/{UNKNOWN}", 404),
        ("attachments/x", 400),
    ],
)
def test_bad_delete_is_a_client_error(service: Service, path: str, status: int) -> None:
    assert service.call("DELETE", path).status_code == status


def test_live_is_refused_by_a_host_that_does_not_enable_it(service: Service) -> None:
    instance = service.boot()
    body = {"instance_uuid": instance, "device_profile": "one-fpga", "mode": "live"}
    answer = service.call("POST", "attachments", body)
    assert answer.status_code == 409
    assert f"live attach is not enabled on host {HOST}" in answer.text
    _, error = service.cyborg.run(
        f"attach-instance {instance} --profile one-fpga --mode live", code=1
    )
    assert "[libvirt] live_attach = true" in error


def test_nova_away_is_503_and_writes_nothing(service: Service) -> None:
    instance = service.boot()
    service.nova.status = 503
    try:
        body = {"instance_uuid": instance, "device_profile": "one-fpga"}
        assert service.call("POST", "attachments", body).status_code == 503
    finally:
        service.nova.status = 200
    assert service.call("GET", f"attachments?instance={instance}").json()["attachments"] == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("POST", ""), ("DELETE", f"?instance={UNKNOWN}"), ("GET", f"/{UNKNOWN}")],
)
def test_older_version_has_no_attachments(service: Service, method: str, path: str) -> None:
    answer = service.call(method, f"attachments{path}", version="2.5")
    assert answer.status_code == 404
    assert "requires microversion 2.6" in answer.text


def test_host_itself_gets_a_context_and_returns_it_by_commands(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cyborg, free = service.cyborg, len(free_accelerators(service))
    create = "device-context-create --resources FPGA:1 --config-data attach_target:host"
    context = cyborg.run(create)[0].strip()
    _, error = cyborg.run(f"attach-host no-such-host --context {context}", code=1)
    assert "no agent has reported from host no-such-host" in error
    _, error = cyborg.run(f"attach-instance {boot_own(service)} --context {context}", code=1)
    assert "is for the host itself" in error
    uuid = cyborg.field(f"attach-host {HOST} --context {context} --wait")
    assert state(service, context) == ("bound", None)
    assert service.allocated(uuid) == 1
    shown = service.call("GET", f"attachments/{uuid}").json()
    assert (shown["mode"], shown["hostname"], shown["instance_uuid"]) == ("host", HOST, None)
    (arq,) = shown["arqs"]
    request = service.call("GET", f"accelerator_requests/{arq}").json()
    assert (request["state"], request["hostname"], request["instance_uuid"]) == (
        "Bound",
        HOST,
        None,
    )
    assert request["attach_handle_info"]
    table = cyborg.run(f"attachment-list --host {HOST} --state attached")[0].splitlines()
    assert (len(table), max(map(len, table)) <= 80) == (5, True)
    assert f"| host {HOST}" in table[3]
    listed = json.loads(cyborg.run(f"attachment-list --host {HOST} --long -f json")[0])
    assert [(row["Instance"], row["Host"]) for row in listed] == [(None, HOST)]
    _, error = cyborg.run(f"detach-host other --attachment {uuid}", code=1)
    assert f"belongs to host {HOST}, not to other" in error
    cyborg.run(f"detach-host {HOST} --attachment {uuid} --wait")
    assert state(service, context) == ("unbound", None)
    assert service.stack.placement.get(f"/allocations/{uuid}").json()["allocations"] == {}
    _, error = cyborg.run(f"detach-host {HOST}", code=1)
    assert f"host {HOST} has no attachment" in error
    assert len(free_accelerators(service)) == free - 1
    cyborg.run(f"device-context-delete {context}")


SELECTORS: list[tuple[dict[str, Any], int, str]] = [
    ({"accelerator": UNKNOWN}, 404, "accelerator"),
    ({"device_context": UNKNOWN}, 404, "device_context"),
    ({"device_profile": "none"}, 404, "device_profile"),
    ({"device_profile": f"acc-{UNKNOWN}"}, 400, "device_profile"),
    ({"device_context": UNKNOWN, "accelerator": UNKNOWN}, 400, "accelerator"),
]


def test_unknown_selector_is_a_client_error_and_writes_nothing(service: Service) -> None:
    instance = boot_own(service)
    for selector, status, field in SELECTORS:
        answer = service.call("POST", "attachments", {"instance_uuid": instance, **selector})
        assert (answer.status_code, field in answer.text) == (status, True), answer.text
        assert service.call("GET", f"attachments?instance={instance}").json() == {"attachments": []}
    assert service.allocated(instance) == 1
