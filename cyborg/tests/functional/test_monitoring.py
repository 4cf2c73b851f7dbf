# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus evaluates each expression of the dashboard and of the alerts, on a service."""

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import requests

from cyborg.conductor import metrics
from cyborg.core import naming
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.clouds.cloud import Cloud, make_and_run_cloud
from cyborg.tests.fixtures.clouds.standalone import HOST, running
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.databases.rows import GROUPS
from cyborg.tests.fixtures.machine.processes import free_port, wait_until
from cyborg.tests.fixtures.monitoring.prometheus import (
    Prometheus,
    list_alerts,
    list_expressions,
    running_prometheus,
)

pytestmark = [pytest.mark.requires("prometheus"), pytest.mark.matrix]

GOOD, SICK, BAD = "0000:0c:00.0", "0000:0d:00.0", "0000:20:00.0"
HOSTS = ("compute-1", "compute-2")
HEADERS = {"OpenStack-API-Version": "accelerator latest"}
PATH = "/v2/accelerator_requests"
PROFILE = "monitored"


class Load:
    """A client that boots and deletes servers like Nova, until it is stopped."""

    def __init__(self, endpoint: str, host: str = HOST, address: str = GOOD) -> None:
        self._endpoint = endpoint
        self._host = host
        self._provider = naming.provider_uuid(host, address)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.cycles = 0

    def call(self, method: str, path: str, body: Any = None) -> requests.Response:
        """Send a request."""
        return requests.request(
            method, f"{self._endpoint}{path}", json=body, headers=HEADERS, timeout=60
        )

    def make_profile(self) -> None:
        """Create the device profile of all requests."""
        body = [{"name": PROFILE, "groups": [dict(group) for group in GROUPS]}]
        assert self.call("POST", "/v2/device_profiles", body).status_code == 201

    def bind(self, provider: str) -> str:
        """Bind a new request for a new instance; return the instance."""
        instance = str(uuid4())
        (arq,) = self.call("POST", PATH, {"device_profile_name": PROFILE}).json()["arqs"]
        values = {"hostname": self._host, "device_rp_uuid": provider, "instance_uuid": instance}
        patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
        answer = self.call("PATCH", PATH, {arq["uuid"]: patch})
        assert answer.status_code == 202, answer.text
        return instance

    def wait_for_state(self, instance: str, state: str) -> None:
        """Wait until the request of an instance has a state."""

        def reached() -> bool:
            (arq,) = self.call("GET", f"{PATH}?instance={instance}").json()["arqs"]
            return bool(arq["state"] == state)

        wait_until(f"the request is {state}", reached, 60)

    def _run(self) -> None:
        while not self._stopped.is_set():
            instance = self.bind(self._provider)
            self.wait_for_state(instance, "Bound")
            assert self.call("DELETE", f"{PATH}?instance={instance}").status_code == 204
            # An RPC call that fails.
            assert self.call("DELETE", f"{PATH}?arqs={uuid4()}").status_code == 404
            self.cycles += 1
            self._stopped.wait(0.1)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Send requests until the end of the block, and check that the client has not failed."""
        self.make_profile()
        self._thread.start()
        try:
            yield
            assert self._thread.is_alive()
        finally:
            self._stopped.set()
            self._thread.join()


@contextlib.contextmanager
def standalone(folder: Path, nova: FakeNova) -> Iterator[tuple[Load, Prometheus, Path]]:
    """Run a stand-alone service with a device whose preparation fails, and Prometheus."""
    port, sick = free_port(), folder / "sick"
    sections: dict[str, Any] = {
        "conductor": {
            "metrics_port": port,
            "hello_interval": 0.5,
            "publish_interval": 0.5,
            "orphan_scan_interval": 2,
            "device_cordon_after": 1,
        },
        "nova": {"auth_type": "none", "endpoint_override": nova.url},
        "good": {"driver": "fake", "num_devices": 2, "prepare": "ok", "sick": sick},
        "bad": {"driver": "fake", "address": BAD, "prepare": "fail"},
    }
    agent = {
        "enabled_drivers": "",
        "enabled_backends": "good,bad",
        "health_interval": 0.5,
        "health_recovery_time": 0.5,
    }
    with (
        running(folder, 3, agent=agent, **sections) as stack,
        running_prometheus(folder / "prometheus", [port]) as prometheus,
    ):
        load = Load(stack.endpoint)
        with load.running():
            yield load, prometheus, sick


def check_data(prometheus: Prometheus, expressions: list[tuple[str, str]]) -> None:
    """Wait until each expression returns a number, without those that stand for no data."""
    missing = [(name, text.replace(" or vector(0)", "")) for name, text in expressions]

    def all_return_data() -> bool:
        missing[:] = [item for item in missing if not prometheus.query(item[1])]
        return not missing

    with contextlib.suppress(AssertionError):
        wait_until("each expression returns data", all_return_data, 40)
    assert not missing


def list_panels() -> list[tuple[str, str]]:
    """Return the expressions of the dashboard without those of events that the test lacks."""
    return [
        (name, text)
        for name, text in list_expressions()
        # The simulated cards are members of no device set.
        if name not in ("Notifications of Nova", "Device sets") and 'status=~"5.."' not in text
    ]


def list_measured() -> list[tuple[str, str]]:
    """Return the values that the alerts compare with their limits."""
    rare = (
        *("CyborgApiErrors", "CyborgDeviceSetsExhausted"),
        *("CyborgNotificationsDropped", "CyborgRpcErrors"),
    )
    return [
        (name, re.sub(r" (>|==) [0-9.]+$", "", rule["expr"]).replace("absent", "sum"))
        for name, rule in list_alerts().items()
        if name not in rare
    ]


def test_panels_have_data_and_alerts_of_devices_fire_and_end(
    tmp_path: Path, fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "CACHE_SECONDS", 0.5)
    with standalone(tmp_path, fake_nova) as (load, prometheus, sick):
        # No alert fires on a service that works; the instances have no allocations.
        wait_until("the first scrapes", lambda: prometheus.firing() <= {"CyborgOrphans"}, 60)
        sick.write_text(f"{SICK} too hot\n")
        failed = load.bind(naming.provider_uuid(HOST, BAD))
        load.wait_for_state(failed, "BindFailed")
        prometheus.wait_for("CyborgDeviceUnhealthy", fires=True)
        prometheus.wait_for("CyborgDeviceFailing", fires=True)
        assert load.call("POST", "/v2/audits", {}).status_code == 202
        check_data(prometheus, list_panels() + list_measured())
        sick.write_text("")
        devices = load.call("GET", "/v2/devices").json()["devices"]
        (closed,) = [device["uuid"] for device in devices if device["address"] == BAD]
        assert load.call("POST", f"/v2/devices/{closed}/enable").status_code == 204
        prometheus.wait_for("CyborgDeviceUnhealthy", fires=False)
        prometheus.wait_for("CyborgDeviceFailing", fires=False)


@pytest.mark.services
def test_alert_of_a_killed_agent_fires_and_ends(rabbit_url: str, tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    options = {
        "conductor": {
            "metrics_port": ports[0],
            "workers": 2,
            "hello_interval": 1,
            "down_heartbeats": 4,
            "broker_reconnect_grace": 1,
        },
        "api": {"metrics_port": ports[1]},
    }
    with (
        fresh_database("mysql", tmp_path) as database,
        make_and_run_cloud(tmp_path, database, rabbit_url, HOSTS, options=options) as cloud,
        running_prometheus(tmp_path / "prometheus", ports) as prometheus,
    ):
        load = Load(cloud.endpoint, HOSTS[0])
        wait_until("the cards are offered", lambda: _offered(cloud) == 2)
        with load.running():
            wait_until("no alert", lambda: not prometheus.firing(), 60)
            cloud.daemons[f"agent-{HOSTS[1]}"].kill()
            prometheus.wait_for("CyborgAgentDown", fires=True)
            prometheus.wait_for("CyborgHostsCordoned", fires=True)
            check_data(prometheus, [item for item in list_panels() if "cyborg_api" in item[1]])
            # Two workers of each conductor, which share a port, and two of the API.
            assert len(find_processes(prometheus, ports[0])) == 2 * len(cloud.conductors)
            assert len(find_processes(prometheus, ports[1])) == 2
            cloud.agent(HOSTS[1])
            prometheus.wait_for("CyborgAgentDown", fires=False)
            prometheus.wait_for("CyborgHostsCordoned", fires=False)


def find_processes(prometheus: Prometheus, port: int) -> set[str]:
    """Return the processes whose metrics a port serves."""
    query = f'process_cpu_seconds_total{{instance="127.0.0.1:{port}"}}'
    return {labels["pid"] for labels, _ in prometheus.query(query)}


def _offered(cloud: Cloud) -> int:
    answer = cloud.placement.get("/resource_providers?resources=FPGA:1")
    return len(answer.json()["resource_providers"])
