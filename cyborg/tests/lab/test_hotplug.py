# SPDX-License-Identifier: Apache-2.0
"""Hot-plug on a real kernel, and the time until Placement is updated.

The agent runs in the guest and receives uevents; conductor, API, Placement, MariaDB and RabbitMQ
run outside. Periodic discovery has no effect: its interval is ten minutes. Python is about twenty
times slower in the guest than on hardware; the limit of two seconds applies nevertheless.
"""

import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.tests.fixtures.clouds.cloud import Cloud
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.databases.placement import make_allocation
from cyborg.tests.fixtures.machine import guest, live_guest
from cyborg.tests.fixtures.machine.live_guest import LiveGuest
from cyborg.tests.fixtures.machine.processes import BIN, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.services]

HOST = "labguest"
EDU, NVME = "CUSTOM_EDU", "CUSTOM_NVME"
WHOLE = "0000:01:00.0"  # the drive itself
SOON = 2.0  # seconds from the uevent until Placement is updated
SLOW = 1.0  # seconds that the kernel waits when it disables SR-IOV
EMPTY_PORT = ("-device", "pcie-root-port,id=rp1,chassis=2,slot=2")
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "agent": {"enabled_drivers": "", "enabled_backends": "cards", "discovery_interval": 600},
    "cards": {
        "driver": "generic",
        "devices": [f"class=0108,resource_class={NVME}", f"vendor=1234,resource_class={EDU}"],
    },
    # The defaults: a shorter interval would hide missing uevents.
    "conductor": {"hello_interval": 10, "publish_interval": 5},
}


class Lab:
    """A host in a guest, and the cloud around it."""

    def __init__(self, running: Cloud, engine: sa.Engine, live: LiveGuest) -> None:
        self.cloud, self.engine, self.guest = running, engine, live

    def until(self, event: str, condition: Callable[[], Any], seconds: float = 30.0) -> float:
        """Wait for a condition; return the seconds it took. Show all logs on failure."""
        begin = time.monotonic()
        try:
            wait_until(event, condition, seconds)
        except AssertionError:
            log = (self.guest.share / "agent.log").read_text(errors="replace")
            sys.stderr.write(f"{self.cloud.logs()}\n--- agent\n{log[-6000:]}")
            raise
        return time.monotonic() - begin

    def call(self, method: str, path: str, **more: Any) -> Any:
        headers = {"X-Service-Token": "any", "OpenStack-API-Version": "accelerator latest"}
        url = f"{self.cloud.endpoint}{path}"
        answer = requests.request(method, url, headers=headers, timeout=60, **more)
        assert answer.status_code < 300, (method, path, answer.text)
        return answer.json() if answer.content else None

    def offered(self, resource_class: str) -> list[str]:
        """Return the providers with at least one free unit in Placement."""
        answer = self.cloud.placement.get(f"/resource_providers?resources={resource_class}:1")
        if answer.status_code == 400:  # the class does not exist yet
            return []
        return [provider["uuid"] for provider in answer.json()["resource_providers"]]

    def inventory(self, provider: str) -> tuple[int, int]:
        """Return the total and the reserved number of NVMe functions of a provider."""
        answer = self.cloud.placement.get(f"/resource_providers/{provider}/inventories")
        body = answer.json()["inventories"][NVME]
        return body["total"], body["reserved"]

    def handles(self) -> dict[str, bool]:
        """Return the handles of the drive, and whether each is draining."""
        records = rows.read(self.engine, schema.attach_handles)
        return {
            row["address"]: bool(row["draining"]) for row in records if "01:00." in row["address"]
        }

    def bind(self, provider: str) -> tuple[str, str]:
        """Boot a server with one drive as Nova does; return the ARQ and the server."""
        creation = self.call(
            "POST", "/v2/accelerator_requests", json={"device_profile_name": "drive"}
        )
        request, instance = creation["arqs"][0]["uuid"], str(uuid.uuid4())
        allocation = make_allocation(provider, NVME)
        response = self.cloud.placement.put(f"/allocations/{instance}", json=allocation)
        assert response.status_code == 204, response.text
        values = {"hostname": HOST, "device_rp_uuid": provider, "instance_uuid": instance}
        patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
        self.call("PATCH", "/v2/accelerator_requests", json={request: patch})
        self.until("it is bound", lambda: self.state(request) == "Bound")
        return request, instance

    def release(self, instance: str) -> None:
        """Delete a server as Nova does."""
        self.call("DELETE", f"/v2/accelerator_requests?instance={instance}")
        assert self.cloud.placement.delete(f"/allocations/{instance}").status_code == 204

    def state(self, request: str) -> str:
        return str(self.call("GET", f"/v2/accelerator_requests/{request}")["state"])

    def holds(self, request: str) -> str:
        info = self.call("GET", f"/v2/accelerator_requests/{request}")["attach_handle_info"]
        return f"{info['domain']}:{info['bus']}:{info['device']}.{info['function']}"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("hotplug")
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME, *EMPTY_PORT]
    with (
        fresh_database("mysql", folder) as url,
        engine_of(url) as engine,
        live_guest.running(devices) as live,
    ):
        running = Cloud(
            folder,
            url,
            rabbit_url,
            (),
            other_hosts=(HOST,),
            conductors=("conductor-1",),
            options=OPTIONS,
        )
        config = running.config(
            "agent",
            host=HOST,
            transport_url=guest.as_seen_inside(rabbit_url),
            state_path="/run/cyborg",
            debug="true",
        )
        (live.share / "cyborg.conf").write_text(config.read_text())
        live.wait_ready()
        # No kernel driver binds the created VFs.
        live.run("modprobe nvme; drive=$(dirname /sys/bus/pci/devices/*/sriov_totalvfs)")
        live.run("echo 0 >$drive/sriov_drivers_autoprobe")
        live.run(f"{BIN}/cyborg-agent --config-file /io/cyborg.conf >/io/agent.log 2>&1 &")
        try:
            running.start()
            new_lab = Lab(running, engine, live)
            profile = {"name": "drive", "groups": [{f"resources:{NVME}": "1"}]}
            new_lab.call("POST", "/v2/device_profiles", json=[profile])
            new_lab.until("the drive is in Placement", lambda: new_lab.offered(NVME), 90)
            yield new_lab
        finally:
            running.stop()


def test_hot_plugged_device_is_offered_until_it_is_unplugged(
    lab: Lab, record_property: Any
) -> None:
    assert lab.offered(EDU) == []
    lab.guest.monitor.execute("device_add", driver="edu", bus="rp1", id="card")
    appearance = lab.until("the card is offered", lambda: lab.offered(EDU))
    lab.guest.monitor.execute("device_del", id="card")
    lab.guest.monitor.wait_for("DEVICE_DELETED", device="card")
    disappearance = lab.until("the card is not offered", lambda: not lab.offered(EDU))
    record_property(
        "summary",
        f"hot-plug: in Placement after {appearance:.2f} s, out after {disappearance:.2f} s",
    )
    assert appearance < SOON
    assert disappearance < SOON


def test_removed_bound_virtual_function_is_drained(lab: Lab, record_property: Any) -> None:
    (provider,) = lab.offered(NVME)
    assert lab.inventory(provider) == (1, 0)

    lab.guest.run("echo 2 >$drive/sriov_numvfs")
    offer_time = lab.until("two functions are offered", lambda: lab.inventory(provider) == (2, 0))
    first, second = "0000:01:00.1", "0000:01:00.2"
    assert lab.handles() == {first: False, second: False}

    bound = dict(lab.bind(provider) for _ in range(2))
    holders = {lab.holds(request): request for request in bound}
    assert set(holders) == {first, second}

    # The kernel cannot remove a single VF: all are removed, and one is recreated.
    begin = time.monotonic()
    lab.guest.run("echo 0 >$drive/sriov_numvfs")
    lab.until(
        "the two are drained and the drive is whole",
        lambda: lab.handles() == {first: True, second: True, WHOLE: False},
    )
    seconds_to_drain = time.monotonic() - begin
    lab.guest.run("echo 1 >$drive/sriov_numvfs")
    lab.until("the first is back", lambda: lab.handles() == {first: False, second: True})
    assert {request: lab.state(request) for request in bound} == dict.fromkeys(bound, "Bound")
    lab.until("none is offered: each is held", lambda: not lab.offered(NVME))

    # The others keep working.
    lab.release(bound.pop(holders[first]))
    lab.until("what is left is offered", lambda: lab.offered(NVME) == [provider])
    new_arq, instance = lab.bind(provider)
    assert lab.holds(new_arq) == first
    lab.until("none is offered any more", lambda: not lab.offered(NVME))
    assert lab.state(holders[second]) == "Bound"

    lab.release(bound[holders[second]])
    lab.until("the second is forgotten", lambda: lab.handles() == {first: False})
    lab.until("there is one", lambda: lab.inventory(provider) == (1, 0))
    lab.release(instance)

    lab.guest.run("echo 0 >$drive/sriov_numvfs")
    lab.until("the drive is whole again", lambda: lab.handles() == {WHOLE: False})
    record_property(
        "summary",
        f"VFs: in Placement after {offer_time:.2f} s, drained after {seconds_to_drain:.2f} s",
    )
    assert offer_time < SOON
    assert seconds_to_drain < SOON + SLOW
