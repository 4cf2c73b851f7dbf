# SPDX-License-Identifier: Apache-2.0
"""A host in a guest, and the cloud around it.

The agent runs in the guest; conductor, API, Placement, MariaDB and RabbitMQ run outside. Python is
about twenty times slower in the guest than on hardware.
"""

import contextlib
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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

HOST = "labguest"
NVME = "CUSTOM_NVME"
DRIVE = "0000:01:00.0"


class Lab:
    """A host in a guest, and the cloud around it."""

    def __init__(
        self,
        running: Cloud,
        engine: sa.Engine,
        live: LiveGuest,
        resource_class: str,
        setup: str,
        agent: str,
    ) -> None:
        self.cloud, self.engine, self.guest = running, engine, live
        self.resource_class = resource_class
        self._setup = setup
        self._agent = agent

    def start_agent(self) -> None:
        """Start the agent in a guest that has booted."""
        self.guest.run(self._setup)
        self.guest.run(f"{self._agent} --config-file /io/cyborg.conf >>/io/agent.log 2>&1 &")

    def cycle_power(self) -> None:
        """Cut the power of the host, boot it again, and start its agent."""
        self.guest.cycle_power()
        self.start_agent()

    def until(self, event: str, condition: Callable[[], Any], seconds: float = 600.0) -> float:
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
        """Return the total and the reserved number of functions of a provider."""
        answer = self.cloud.placement.get(f"/resource_providers/{provider}/inventories")
        body = answer.json()["inventories"][self.resource_class]
        return body["total"], body["reserved"]

    def handles(self) -> dict[str, bool]:
        """Return the handles of the drive, and whether each is draining."""
        records = rows.read(self.engine, schema.attach_handles)
        return {
            row["address"]: bool(row["draining"]) for row in records if "01:00." in row["address"]
        }

    def bind(
        self,
        provider: str,
        profile: str = "drive",
        expected: str = "Bound",
        resource_class: str | None = None,
        instance: str | None = None,
    ) -> tuple[str, str]:
        """Boot a server with one function as Nova does; return the ARQ and the server.

        ``instance`` is the server, by default a new one.

        Wait until the ARQ has the ``expected`` state.
        """
        instance = instance or str(uuid.uuid4())
        allocation = make_allocation(provider, resource_class or self.resource_class)
        response = self.cloud.placement.put(f"/allocations/{instance}", json=allocation)
        assert response.status_code == 204, response.text
        request = self.start_bind(provider, profile, instance)
        self.until(f"it is {expected}", lambda: self.state(request) == expected)
        return request, instance

    def start_bind(self, provider: str, profile: str, instance: str) -> str:
        """Create an ARQ and bind it to a server; return it. Fail if the bind is refused."""
        creation = self.call(
            "POST", "/v2/accelerator_requests", json={"device_profile_name": profile}
        )
        request = str(creation["arqs"][0]["uuid"])
        values = {"hostname": HOST, "device_rp_uuid": provider, "instance_uuid": instance}
        patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
        self.call("PATCH", "/v2/accelerator_requests", json={request: patch})
        return request

    def add_profile(self, name: str, resource_class: str) -> None:
        """Create a device profile that asks for a function of a resource class."""
        profile = {"name": name, "groups": [{f"resources:{resource_class}": "1"}]}
        self.call("POST", "/v2/device_profiles", json=[profile])

    def plug(self, port: str, driver: str, **properties: Any) -> None:
        """Insert a device into an empty port."""
        device = f"{port}-card"
        self.guest.monitor.execute("device_add", driver=driver, bus=port, id=device, **properties)

    def unplug(self, port: str) -> None:
        """Remove the device of a port, and wait until the guest has released it."""
        self.guest.monitor.execute("device_del", id=f"{port}-card")
        self.guest.monitor.wait_for("DEVICE_DELETED", device=f"{port}-card")

    def release(self, instance: str) -> None:
        """Delete a server as Nova does."""
        self.call("DELETE", f"/v2/accelerator_requests?instance={instance}")
        assert self.cloud.placement.delete(f"/allocations/{instance}").status_code == 204

    def state(self, request: str) -> str:
        return str(self.call("GET", f"/v2/accelerator_requests/{request}")["state"])

    def holds(self, request: str) -> str:
        info = self.call("GET", f"/v2/accelerator_requests/{request}")["attach_handle_info"]
        return f"{info['domain']}:{info['bus']}:{info['device']}.{info['function']}"


@contextlib.contextmanager
def running_lab(
    folder: Path,
    rabbit_url: str,
    devices: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    setup: str,
    resource_class: str = NVME,
    *,
    agent: str = f"{BIN}/cyborg-agent",
    memory: str = "1G",
) -> Iterator[Lab]:
    """Run a guest with these devices and its cloud until the block ends.

    ``setup`` are commands for the guest before its agent starts, by the command ``agent``. A device
    profile ``drive`` asks for a function of ``resource_class``.
    """
    with (
        fresh_database("mysql", folder) as url,
        engine_of(url) as engine,
        live_guest.running(devices, memory) as live,
    ):
        running = Cloud(
            folder,
            url,
            rabbit_url,
            (),
            other_hosts=(HOST,),
            conductors=("conductor-1",),
            # A heartbeat of the guest costs as much as twenty on hardware.
            options={**options, "conductor": {"hello_interval": 2, **options.get("conductor", {})}},
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
        new_lab = Lab(running, engine, live, resource_class, setup, agent)
        new_lab.start_agent()
        try:
            running.start()
            new_lab.add_profile("drive", resource_class)
            new_lab.until("it is in Placement", lambda: new_lab.offered(resource_class))
            yield new_lab
        finally:
            running.stop()
