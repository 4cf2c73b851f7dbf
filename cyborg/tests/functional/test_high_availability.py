# SPDX-License-Identifier: Apache-2.0
"""A conductor and an API process are killed during binds; a load balancer repeats the requests.

Several processes of each kind, MariaDB, Placement, and RabbitMQ with the queues of the page about
high availability.
"""

import threading
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import kombu
import pytest
import requests
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.tests.fixtures.clouds.cloud import Cloud, run_cloud
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine.processes import BIN, free_port, wait_until
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.fixtures.pages.page_cloud import DOC, read_configuration

pytestmark = [pytest.mark.services, pytest.mark.matrix]

HOST = "compute-1"
SERVERS = 24
CLIENTS = 4
GROUP = {"resources:FPGA": "1"}
HEADERS = {"X-Service-Token": "any", "OpenStack-API-Version": "accelerator latest"}
CLASSIC: Mapping[str, str] = MappingProxyType({"amqp_auto_delete": "true"})


def page_queues() -> dict[str, str]:
    """Return the options of the page for queues that are replicated."""
    text = (DOC / "admin/high_availability.rst").read_text()
    # The test's own broker has the queues of many runs: they expire soon.
    more = {"amqp_auto_delete": "false", "rabbit_transient_queues_ttl": "60"}
    return {**read_configuration(text)["oslo_messaging_rabbit"], **more}


class AvailableCloud(Cloud):
    """A cloud with a second API process, and a client that tries one after the other."""

    def start(self) -> None:
        """Start all daemons."""
        super().start()
        port = free_port()
        self.endpoints = [self.endpoint, f"http://127.0.0.1:{port}"]
        config = self.config("api-2", host="controller-2")
        command = [BIN / "gunicorn", "--threads", "4", "--bind", f"127.0.0.1:{port}"]
        application = "cyborg.wsgi.api:application"
        self.add("api-2", [*command, application], OS_CYBORG_CONFIG_FILES=str(config))
        for endpoint in self.endpoints:
            wait_until("it is healthy", lambda url=endpoint: self._answers(f"{url}/healthcheck"))  # type: ignore[misc]

    def call(self, method: str, path: str, body: Any = None) -> requests.Response:
        """Send a request to the first API process that answers it without a server error."""

        def answer() -> requests.Response | None:
            for endpoint in self.endpoints:
                url = f"{endpoint}/v2/{path}"
                try:
                    got = requests.request(method, url, json=body, headers=HEADERS, timeout=30)
                except requests.ConnectionError:
                    continue
                if got.status_code < 500:
                    return got
            return None

        found: requests.Response = wait_until(f"{method} {path} is answered", answer)
        return found

    def bind(self, provider: str) -> str:
        """Build a server as Nova does, which repeats failed calls; return the state of its ARQ."""
        created = self.call("POST", "accelerator_requests", {"device_profile_name": "p"})
        assert created.status_code == 201, created.text
        arq = created.json()["arqs"][0]["uuid"]
        values = {
            "hostname": HOST,
            "device_rp_uuid": provider,
            "instance_uuid": str(uuid.uuid4()),
        }
        patch = [{"op": "add", "path": f"/{key}", "value": values[key]} for key in values]
        bound = self.call("PATCH", "accelerator_requests", {arq: patch})
        assert bound.status_code == 202, bound.text
        return str(self.call("GET", f"accelerator_requests/{arq}").json()["state"])


def check_quorum(broker: str, names: list[str]) -> None:
    """Check that these queues are quorum queues; the broker refuses another type.

    Delete them: the broker keeps them after their last consumer.
    """
    arguments = {"x-queue-type": "quorum"}
    with kombu.Connection(broker.replace("rabbit://", "amqp://", 1)) as connection:
        for name in names:
            queue = kombu.Queue(name, durable=True, queue_arguments=arguments)(connection)
            queue.queue_declare(passive=True)  # it exists
            queue.queue_declare()
            queue.delete()


@pytest.fixture(params=sample(["quorum", "classic"], "quorum"))
def env(
    request: pytest.FixtureRequest, tmp_path: Path, rabbit_url: str
) -> Iterator[tuple[AvailableCloud, sa.Engine]]:
    queues = page_queues() if request.param == "quorum" else CLASSIC
    with fresh_database("mysql", tmp_path) as database, engine_of(database) as engine:
        options = {"oslo_messaging_rabbit": queues, "rpc": {"timeout": 5}}
        cloud = AvailableCloud(tmp_path, database, rabbit_url, (HOST,), SERVERS, options=options)
        with run_cloud(cloud):
            yield cloud, engine
        if request.param == "quorum":
            names = ["conductor", *(f"conductor.{name}" for name in cloud.conductors)]
            names += ["agent", f"agent.{HOST}"]
            check_quorum(rabbit_url, [f"{cloud.topic}.{name}" for name in names])


def test_killed_conductor_and_api_lose_no_bind(env: tuple[AvailableCloud, sa.Engine]) -> None:
    cloud, engine = env
    wait_until("the handles are there", lambda: rows.read(engine, schema.attach_handles))
    profile = cloud.call("POST", "device_profiles", [{"name": "p", "groups": [GROUP]}])
    assert profile.status_code == 201, profile.text
    (part,) = rows.read(engine, schema.deployables)
    done = threading.Semaphore(0)

    def build(number: int) -> str:
        state = cloud.bind(part["rp_uuid"])
        done.release()
        return state

    with ThreadPoolExecutor(CLIENTS) as pool:
        states = [pool.submit(build, number) for number in range(SERVERS)]
        for name in ("conductor-1", "api"):
            for _ in range(SERVERS // 4):
                done.acquire()
            cloud.daemons[name].kill()
        assert {state.result() for state in states} == {"Bound"}
    handles = rows.read(engine, schema.attach_handles)
    owners = [handle["arq_id"] for handle in handles if handle["arq_id"] is not None]
    bound = [row["id"] for row in rows.read(engine, schema.arqs) if row["state"] == "Bound"]
    assert sorted(owners) == sorted(bound)
    assert len(bound) == SERVERS
