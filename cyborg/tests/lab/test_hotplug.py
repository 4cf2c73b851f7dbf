# SPDX-License-Identifier: Apache-2.0
"""Devices that come and go on a real kernel, and how soon Placement knows.

The agent runs in the guest and hears its kernel; conductor, API, Placement, MariaDB and RabbitMQ
run outside. No poll helps: the agent discovers by itself every ten minutes only. Python is some
twenty times slower in the guest than on hardware, and the two seconds hold all the same.
"""

import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.fixtures import guest, live_guest, rows
from cyborg.fixtures.cloud import Cloud
from cyborg.fixtures.databases import engine_of, fresh_database
from cyborg.fixtures.live_guest import LiveGuest
from cyborg.fixtures.processes import BIN, until

pytestmark = [pytest.mark.lab, pytest.mark.services]

HOST = "labguest"
EDU, NVME = "CUSTOM_EDU", "CUSTOM_NVME"
WHOLE = "0000:01:00.0"  # the drive itself
SOON = 2.0  # seconds from the uevent until Placement knows
SLOW = 1.0  # seconds for which the kernel itself waits when it switches SR-IOV off
EMPTY_PORT = ("-device", "pcie-root-port,id=rp1,chassis=2,slot=2")
OPTIONS = {
    "agent": {"enabled_drivers": "", "enabled_backends": "cards", "discovery_interval": 600},
    "cards": {
        "driver": "generic",
        "devices": [f"class=0108,resource_class={NVME}", f"vendor=1234,resource_class={EDU}"],
    },
    # As they are by default: no shorter interval helps either.
    "conductor": {"hello_interval": 10, "publish_interval": 5},
}


class Lab:
    """A host in a guest, and the cloud around it."""

    def __init__(self, running: Cloud, engine: sa.Engine, live: LiveGuest) -> None:
        self.cloud, self.engine, self.guest = running, engine, live

    def until(self, what: str, done: Callable[[], Any], seconds: float = 30.0) -> float:
        """Wait for something; return the seconds that it took. Shows all logs if it fails."""
        begin = time.monotonic()
        try:
            until(what, done, seconds)
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
        """Return the providers that Placement would give one unit of."""
        answer = self.cloud.placement.get(f"/resource_providers?resources={resource_class}:1")
        if answer.status_code == 400:  # the class is not known yet
            return []
        return [found["uuid"] for found in answer.json()["resource_providers"]]

    def inventory(self, provider: str) -> tuple[int, int]:
        """Return how many NVMe functions a provider has, and how many of them are reserved."""
        answer = self.cloud.placement.get(f"/resource_providers/{provider}/inventories")
        found = answer.json()["inventories"][NVME]
        return found["total"], found["reserved"]

    def handles(self) -> dict[str, bool]:
        """Return the handles of the drive, and whether each is drained."""
        found = rows.read(self.engine, schema.attach_handles)
        return {
            row["address"]: bool(row["draining"]) for row in found if "01:00." in row["address"]
        }

    def bind(self, provider: str) -> tuple[str, str]:
        """Do what Nova does for a server with one drive; return its request and the server."""
        made = self.call("POST", "/v2/accelerator_requests", json={"device_profile_name": "drive"})
        request, instance = made["arqs"][0]["uuid"], str(uuid.uuid4())
        allocation = {
            "allocations": {provider: {"resources": {NVME: 1}}},
            "project_id": "p",
            "user_id": "u",
            "consumer_generation": None,
            "consumer_type": "INSTANCE",
        }
        put = self.cloud.placement.put(f"/allocations/{instance}", json=allocation)
        assert put.status_code == 204, put.text
        values = {"hostname": HOST, "device_rp_uuid": provider, "instance_uuid": instance}
        patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
        self.call("PATCH", "/v2/accelerator_requests", json={request: patch})
        self.until("it is bound", lambda: self.state(request) == "Bound")
        return request, instance

    def release(self, instance: str) -> None:
        """Do what Nova does when the server is deleted."""
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
            elsewhere=(HOST,),
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
        # Nobody's driver takes the VFs that the kernel makes.
        live.tell("modprobe nvme; drive=$(dirname /sys/bus/pci/devices/*/sriov_totalvfs)")
        live.tell("echo 0 >$drive/sriov_drivers_autoprobe")
        live.tell(f"{BIN}/cyborg-agent --config-file /io/cyborg.conf >/io/agent.log 2>&1 &")
        try:
            running.start()
            it = Lab(running, engine, live)
            profile = {"name": "drive", "groups": [{f"resources:{NVME}": "1"}]}
            it.call("POST", "/v2/device_profiles", json=[profile])
            it.until("the drive is in Placement", lambda: it.offered(NVME), 90)
            yield it
        finally:
            running.stop()


def test_a_device_is_offered_when_it_is_plugged_in_and_no_longer_when_it_is_not(
    lab: Lab, record_property: Any
) -> None:
    assert lab.offered(EDU) == []
    lab.guest.monitor.execute("device_add", driver="edu", bus="rp1", id="card")
    came = lab.until("the card is offered", lambda: lab.offered(EDU))
    lab.guest.monitor.execute("device_del", id="card")
    lab.guest.monitor.wait_for("DEVICE_DELETED", device="card")
    went = lab.until("the card is not offered", lambda: not lab.offered(EDU))
    record_property("told", f"hot-plug: in Placement after {came:.2f} s, out after {went:.2f} s")
    assert came < SOON
    assert went < SOON


def test_virtual_functions_are_handles_and_a_bound_one_that_goes_is_drained(
    lab: Lab, record_property: Any
) -> None:
    (provider,) = lab.offered(NVME)
    assert lab.inventory(provider) == (1, 0)

    lab.guest.tell("echo 2 >$drive/sriov_numvfs")
    made = lab.until("two functions are offered", lambda: lab.inventory(provider) == (2, 0))
    first, second = "0000:01:00.1", "0000:01:00.2"
    assert lab.handles() == {first: False, second: False}

    bound = dict(lab.bind(provider) for _ in range(2))
    holders = {lab.holds(request): request for request in bound}
    assert set(holders) == {first, second}

    # The kernel cannot take one away: all go, and one of them comes back.
    begin = time.monotonic()
    lab.guest.tell("echo 0 >$drive/sriov_numvfs")
    lab.until(
        "the two are drained and the drive is whole",
        lambda: lab.handles() == {first: True, second: True, WHOLE: False},
    )
    gone = time.monotonic() - begin
    lab.guest.tell("echo 1 >$drive/sriov_numvfs")
    lab.until("the first is back", lambda: lab.handles() == {first: False, second: True})
    assert {request: lab.state(request) for request in bound} == dict.fromkeys(bound, "Bound")
    lab.until("none is offered: each is held", lambda: not lab.offered(NVME))

    # The others keep working.
    lab.release(bound.pop(holders[first]))
    lab.until("what is left is offered", lambda: lab.offered(NVME) == [provider])
    again, instance = lab.bind(provider)
    assert lab.holds(again) == first
    lab.until("none is offered any more", lambda: not lab.offered(NVME))
    assert lab.state(holders[second]) == "Bound"

    lab.release(bound[holders[second]])
    lab.until("the second is forgotten", lambda: lab.handles() == {first: False})
    lab.until("there is one", lambda: lab.inventory(provider) == (1, 0))
    lab.release(instance)

    lab.guest.tell("echo 0 >$drive/sriov_numvfs")
    lab.until("the drive is whole again", lambda: lab.handles() == {WHOLE: False})
    record_property("told", f"VFs: in Placement after {made:.2f} s, drained after {gone:.2f} s")
    assert made < SOON
    assert gone < SOON + SLOW
