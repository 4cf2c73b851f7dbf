# SPDX-License-Identifier: Apache-2.0
"""``cyborg host-forget`` for hosts whose agents were killed, with and without bound requests.

Real processes, MariaDB, RabbitMQ and Placement.
"""

import contextlib
import io
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from cyborg.cli import app
from cyborg.core import naming
from cyborg.core.hosts import AGENT
from cyborg.db import schema
from cyborg.tests.fixtures.clouds.cloud import Cloud, make_and_run_cloud
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine.processes import wait_until

EMPTY, USED, OTHER = "compute-1.example.org", "compute-2.example.org", "compute-3.example.org"
HOSTS = (EMPTY, USED, OTHER)
HEADERS = {"OpenStack-API-Version": "accelerator latest"}

pytestmark = [pytest.mark.services, pytest.mark.matrix]


class Env:
    """A cloud with three hosts, its database and its command line client."""

    def __init__(self, running: Cloud, engine: sa.Engine) -> None:
        self.cloud, self.engine = running, engine

    def run(self, line: str, code: int = 0) -> tuple[str, str]:
        """Run a command; return standard output and standard error."""
        out, err = io.StringIO(), io.StringIO()
        connection = ["--os-auth-type", "none", "--os-endpoint", self.cloud.endpoint]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert app.main([*connection, *line.split()]) == code, err.getvalue()
        return out.getvalue(), err.getvalue()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request to the API and return the JSON value of the response."""
        url = f"{self.cloud.endpoint}/v2{path}"
        answer = requests.request(method, url, json=body, headers=HEADERS, timeout=60)
        assert answer.ok, answer.text
        return answer.json() if answer.content else None

    def provider(self, host: str) -> dict[str, Any] | None:
        """Return the resource provider of the host's card in Placement."""
        name = naming.provider_name(host, "0000:0c:00.0")
        found = self.cloud.placement.get(f"/resource_providers?name={name}").json()
        return next(iter(found["resource_providers"]), None)

    def root(self, host: str) -> dict[str, Any]:
        """Return the resource provider of the compute node."""
        found = self.cloud.placement.get(f"/resource_providers?name={host}").json()
        return dict(found["resource_providers"][0])

    def is_offered(self, host: str) -> bool:
        """Return whether the host's card can be allocated."""
        found = self.provider(host)
        if found is None:
            return False
        inventories = self.cloud.placement.get(
            f"/resource_providers/{found['uuid']}/inventories"
        ).json()["inventories"]
        return "FPGA" in inventories and inventories["FPGA"]["reserved"] == 0

    def state(self, host: str) -> str:
        """Return the state of the host's agent, empty if it has none."""
        path = f"/services?binary=cyborg-agent&kind=daemon&host={host}"
        return next((row["state"] for row in self.call("GET", path)["services"]), "")

    def kill_agent(self, host: str) -> None:
        """Kill the agent of a host, and wait until it is marked down."""
        self.cloud.daemons[f"agent-{host}"].kill()
        where = {"binary": AGENT, "host": host}
        wait_until(
            "the agent is marked down",
            lambda: rows.read(self.engine, schema.services, **where)[0]["down_since"],
        )

    def bind(self, host: str, instance: str) -> str:
        """Bind an accelerator of a host to an instance with an allocation; return the ARQ."""
        found = self.provider(host)
        assert found is not None
        root = self.root(host)
        vcpu = {"VCPU": {"total": 8, "max_unit": 8}}
        body = {"resource_provider_generation": root["generation"], "inventories": vcpu}
        answer = self.cloud.placement.put(
            f"/resource_providers/{root['uuid']}/inventories", json=body
        )
        assert answer.status_code == 200, answer.text
        allocation = {
            "allocations": {
                root["uuid"]: {"resources": {"VCPU": 2}},
                found["uuid"]: {"resources": {"FPGA": 1}},
            },
            "project_id": "p",
            "user_id": "u",
            "consumer_generation": None,
            "consumer_type": "INSTANCE",
        }
        answer = self.cloud.placement.put(f"/allocations/{instance}", json=allocation)
        assert answer.status_code == 204, answer.text
        (arq,) = self.call("POST", "/accelerator_requests", {"device_profile_name": "one-fpga"})[
            "arqs"
        ]
        values = {
            "hostname": host,
            "device_rp_uuid": found["uuid"],
            "instance_uuid": instance,
        }
        patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
        self.call("PATCH", "/accelerator_requests", {arq["uuid"]: patch})
        path = f"/accelerator_requests/{arq['uuid']}"
        wait_until("the request is bound", lambda: self.call("GET", path)["state"] == "Bound")
        return str(arq["uuid"])


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Env]:
    folder: Path = tmp_path_factory.mktemp("removal")
    with (
        fresh_database("mysql", folder) as database,
        engine_of(database) as engine,
        make_and_run_cloud(
            folder,
            database,
            rabbit_url,
            HOSTS,
            options={"conductor": {"broker_reconnect_grace": 1}},
        ) as running,
    ):
        new_env = Env(running, engine)
        wait_until("the cards are offered", lambda: all(map(new_env.is_offered, HOSTS)))
        new_env.run("device-profile-create one-fpga --group resources:FPGA=1")
        yield new_env


def test_host_that_is_up_is_not_removed(env: Env) -> None:
    for option in ("", "--force"):
        _, err = env.run(f"host-forget {OTHER} {option}", code=1)
        assert f"cyborg-agent of host {OTHER} is not down" in err
    _, err = env.run("host-forget none-such", code=1)
    assert "nothing is stored of host none-such" in err
    assert env.is_offered(OTHER)


def test_host_without_requests_is_removed(env: Env) -> None:
    env.kill_agent(EMPTY)
    out, _ = env.run(f"host-forget {EMPTY} -f json")
    assert json.loads(out) == {
        "Host": EMPTY,
        "Services": 1,
        "Devices": 1,
        "Accelerator requests": 0,
        "Tombstones": 1,
        "Resource providers": 1,
    }
    wait_until("the provider is deleted", lambda: env.provider(EMPTY) is None)
    wait_until(
        "nothing is left to do", lambda: not rows.read(env.engine, schema.providers, host=EMPTY)
    )
    assert env.run("device-list -f json -c Host")[0].count(EMPTY) == 0
    assert json.loads(env.run("audit -f json")[0]) == []


def test_host_with_requests_is_removed_only_with_force(env: Env) -> None:
    instance, other = str(uuid.uuid4()), str(uuid.uuid4())
    arq, kept = env.bind(USED, instance), env.bind(OTHER, other)
    env.kill_agent(USED)
    _, err = env.run(f"host-forget {USED}", code=1)
    assert f"1 requests hold devices of this host, such as {arq}" in err
    assert env.call("GET", f"/accelerator_requests/{arq}")["state"] == "Bound"

    out, _ = env.run(f"host-forget {USED} --force -f json")
    assert json.loads(out)["Accelerator requests"] == 1
    path = f"/accelerator_requests?instance={instance}"
    assert env.call("GET", path)["arqs"] == []
    wait_until("the provider is deleted", lambda: env.provider(USED) is None)
    # What Nova has allocated of its own resources is Nova's to remove.
    allocations = env.cloud.placement.get(f"/allocations/{instance}").json()["allocations"]
    assert {key: value["resources"] for key, value in allocations.items()} == {
        env.root(USED)["uuid"]: {"VCPU": 2}
    }
    assert env.call("GET", f"/accelerator_requests/{kept}")["state"] == "Bound"
    assert len(env.cloud.placement.get(f"/allocations/{other}").json()["allocations"]) == 2
    wait_until(
        "nothing is left to do", lambda: not rows.read(env.engine, schema.providers, host=USED)
    )
    assert json.loads(env.run("audit -f json")[0]) == []


def test_host_that_returns_is_a_new_host(env: Env) -> None:
    """A device that was not cleaned before the removal is cleaned before its next use."""
    env.cloud.agent(USED)
    wait_until("the card is offered", lambda: env.is_offered(USED))
    assert env.state(USED) == "up"
    instance = str(uuid.uuid4())
    env.bind(USED, instance)
    assert json.loads(env.run("audit -f json")[0]) == []
