# SPDX-License-Identifier: Apache-2.0
"""Contexts and single accelerators over REST and by commands, on a whole stand-alone service."""

import json
from collections.abc import Iterator

import pytest

from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.functional.test_attachment_commands import (
    FLAVOR,
    UNKNOWN,
    Service,
    boot_own,
    free_accelerators,
    run_service,
    state,
)

# The commands with a device profile, and for the host itself: test_attachment_commands.py.
pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with run_service(tmp_path_factory.mktemp("selectors")) as service:
        yield service


def create_context(service: Service) -> str:
    """Create a device context; return its uuid."""
    output, _ = service.cyborg.run(
        "device-context-create --resources FPGA:1 --requires FAKE_DEVICE"
    )
    return output.strip()


def check_list(service: Service, instance: str, selected: str) -> None:
    """Assert that the list shows what was selected, in one line of 80 columns."""
    command = f"attachment-list --instance {instance}"
    (row,) = json.loads(service.cyborg.run(f"{command} -f json")[0])
    assert row["Selected"] == selected
    table = service.cyborg.run(command)[0].splitlines()
    assert (len(table), max(map(len, table)) <= 80) == (5, True)
    kind, uuid = selected.split()
    assert f"| {kind} {uuid[:8]} |" in table[3]


def test_context_is_attached_and_detached_by_commands(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, context = boot_own(service), create_context(service)
    free = len(free_accelerators(service))
    cyborg = service.cyborg
    monkeypatch.setenv("COLUMNS", "80")
    uuid = cyborg.field(f"attach-instance {instance} --context {context[:13]} --wait")
    check_list(service, instance, f"context {context}")
    assert cyborg.field(f"attachment-show {uuid}", "Context") == context
    assert state(service, context) == ("bound", instance)
    assert (service.allocated(instance), len(service.arqs(instance))) == (2, 2)
    shown = service.call("GET", f"attachments/{uuid}").json()
    assert (shown["device_profile"], shown["accelerator"]) == (None, None)
    body = {"instance_uuid": instance, "device_context": context}
    assert service.call("POST", "attachments", body).json()["uuid"] == uuid
    _, error = cyborg.run(f"device-context-delete {context}", code=1)
    assert "detach it with detach-instance first" in error
    other = boot_own(service)
    _, error = cyborg.run(f"attach-instance {other} --context {context}", code=1)
    assert f"is bound, instance {instance}" in error
    cyborg.run(f"detach-instance {instance} --wait")
    assert state(service, context) == ("unbound", None)
    assert (service.allocated(instance), len(service.arqs(instance))) == (1, 1)
    assert len(free_accelerators(service)) == free - 1
    cyborg.run(f"device-context-delete {context}")


def test_accelerator_is_attached_and_detached_by_commands(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    instance, cyborg = boot_own(service), service.cyborg
    first, second = free_accelerators(service)[5:7]
    uuid = cyborg.field(f"attach-instance {instance} --accelerator {first} --wait")
    check_list(service, instance, f"accelerator {first}")
    cyborg.run(f"attach-instance {instance} --accelerator {second} --wait")
    assert cyborg.field(f"attachment-show {uuid}", "Accelerator") == first
    for accelerator in (first, second):
        owner = service.call("GET", f"accelerators/{accelerator}").json()
        assert (owner["state"], owner["instance_uuid"]) == ("bound", instance)
    assert service.allocated(instance) == 3
    names = [
        row["name"] for row in service.call("GET", "device_profiles").json()["device_profiles"]
    ]
    assert [name for name in names if name.startswith("acc-")] == []
    assert service.call("GET", f"device_profiles/acc-{uuid}").status_code == 404
    _, error = cyborg.run(f"attach-instance {boot_own(service)} --accelerator {first}", code=1)
    assert f"accelerator {first} is bound, only a free" in error
    _, error = cyborg.run(
        f"detach-instance {instance} --accelerator {first} --attachment {uuid}", code=1
    )
    assert "give either --attachment or --accelerator" in error
    for empty in ("--accelerator=", "--attachment="):
        _, error = cyborg.run(f"detach-instance {instance} {empty}", code=1)
        assert f"{empty[:-1]} is empty: give a uuid" in error
    states = service.call("GET", f"attachments?instance={instance}").json()["attachments"]
    assert [row["state"] for row in states] == ["attached", "attached"]
    cyborg.run(f"detach-instance {instance} --accelerator {first} --wait")
    listed = json.loads(cyborg.run(f"attachment-list --instance {instance} --long -f json")[0])
    assert [(row["Accelerator"], row["State"]) for row in listed] == [(second, "attached")]
    assert service.call("GET", f"accelerators/{first}").json()["state"] == "free"
    _, error = cyborg.run(f"detach-instance {instance} --accelerator {first}", code=1)
    assert f"no attachment of server {instance} holds accelerator {first}" in error
    cyborg.run(f"detach-instance {instance} --wait")
    assert service.allocated(instance) == 1


def test_accelerator_of_another_host_is_not_attached(service: Service) -> None:
    """Placement decides, not the names of the hosts, which may differ."""
    service.nova.add_server(UNKNOWN, "compute-9", tenant_id="p", locked=False, flavor=FLAVOR)
    try:
        body = {"instance_uuid": UNKNOWN, "accelerator": free_accelerators(service)[0]}
        uuid = service.call("POST", "attachments", body).json()["uuid"]
        path = f"attachments/{uuid}"
        wait_until("undone", lambda: service.call("GET", path).json()["state"] == "error")
        error = service.call("GET", path).json()["error"]
        assert error == "Placement has no resource provider compute-9 for the host of the server"
        assert service.call("DELETE", path).status_code == 202
    finally:
        del service.nova.servers[UNKNOWN]
    assert service.call("GET", f"attachments?instance={UNKNOWN}").json()["attachments"] == []


def test_deleted_server_leaves_the_context_to_the_next_one(service: Service) -> None:
    instance, context = boot_own(service), create_context(service)
    service.cyborg.run(f"attach-instance {instance} --context {context} --wait")
    gone = f"accelerator_requests?instance={instance}"
    assert service.call("DELETE", gone).status_code == 204
    wait_until("the context is free", lambda: state(service, context) == ("unbound", None))
    other = boot_own(service)
    service.cyborg.run(f"attach-instance {other} --context {context} --wait")
    assert state(service, context) == ("bound", other)
    service.cyborg.run(f"detach-instance {other} --wait")
