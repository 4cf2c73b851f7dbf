# SPDX-License-Identifier: Apache-2.0
"""kill -9 of a conductor at each step of a bind, and of an agent that prepares a device.

Real processes, MariaDB, RabbitMQ, Placement; a fake Nova receives the events over HTTP. Whichever
process is killed, at the end the ARQ is Bound with its event, or undone with its event, and no
handle leaks.
"""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.clouds.cloud import Cloud, make_and_run_cloud
from cyborg.tests.fixtures.clouds.crash_points import POINTS
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample

HOST = "compute-1"
HANDLES = 4
PREPARE_TIMEOUT = 15

pytestmark = pytest.mark.services


class Env:
    """A cloud with one host, its database and a fake Nova."""

    def __init__(self, running: Cloud, engine: sa.Engine, nova: FakeNova, gate: Path) -> None:
        self.cloud, self.engine, self.nova, self.gate = running, engine, nova, gate
        creation = self.call("POST", "/v2/device_profiles", json=[{"name": "p", "groups": [GROUP]}])
        assert creation.status_code == 201, creation.text

    def call(self, method: str, path: str, **more: Any) -> requests.Response:
        headers = {"X-Service-Token": "any", "OpenStack-API-Version": "accelerator latest"}
        url = f"{self.cloud.endpoint}{path}"
        return requests.request(method, url, headers=headers, timeout=60, **more)

    def make(self) -> str:
        return str(wait_until("a request is made", self._create_arq))

    def _create_arq(self) -> str | None:
        body = {"device_profile_name": "p"}
        answer = self.call("POST", "/v2/accelerator_requests", json=body)
        return answer.json()["arqs"][0]["uuid"] if answer.status_code == 201 else None

    def bind(self, request: str, instance: str) -> int:
        (part,) = rows.read(self.engine, schema.deployables)
        values = {
            "hostname": HOST,
            "device_rp_uuid": part["rp_uuid"],
            "instance_uuid": instance,
        }
        patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
        answer = self.call("PATCH", "/v2/accelerator_requests", json={request: patch})
        return answer.status_code

    def state(self, request: str) -> str:
        (row,) = rows.read(self.engine, schema.arqs, uuid=request)
        return str(row["state"])

    def event_statuses(self, request: str) -> set[str]:
        events = [event for call in self.nova.calls for event in call["events"]]
        return {event["status"] for event in events if event["tag"] == request}

    def free(self) -> int:
        handles = rows.read(self.engine, schema.attach_handles)
        return len([h for h in handles if h["arq_id"] is None and not h["needs_cleaning"]])

    def release(self, instance: str) -> None:
        """Delete the ARQs of an instance and wait until every handle is clean."""
        answer = wait_until("the delete is answered", lambda: self._deleted(instance))
        assert answer == 204
        wait_until("every handle is free", lambda: self.free() == HANDLES)
        # Pending work would be the first action of the next conductor and kill it.
        wait_until("nothing waits", lambda: not rows.read(self.engine, schema.outbox))
        assert rows.read(self.engine, schema.arqs) == []

    def _deleted(self, instance: str) -> int | None:
        code = self.call("DELETE", f"/v2/accelerator_requests?instance={instance}").status_code
        return code if code < 500 else None


GROUP = {"resources:FPGA": "1"}
# Whether another conductor takes over, instead of a restart of the same: both after a kill at each
# point with --extended, in turn after a kill at every second point with --all.
TAKEOVERS = [(point, number % 4 == 0) for number, point in enumerate(POINTS) if number % 2 == 0]
OTHERS = [(point, second) for second in (True, False) for point in POINTS]
CASES = [
    *sample(TAKEOVERS, ("agent-queried", True)),
    *sample([case for case in OTHERS if case not in TAKEOVERS], mark=pytest.mark.long),
]


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Env]:
    folder = tmp_path_factory.mktemp("kill")
    gate = folder / "gate"
    gate.touch()
    with (
        serve_nova(FakeNova()) as nova,
        fresh_database("mysql", folder) as url,
        engine_of(url) as engine,
        make_and_run_cloud(
            folder,
            url,
            rabbit_url,
            (HOST,),
            HANDLES,
            conductors=("conductor-1",),
            options={
                "rpc": {"timeout": 3},
                "nova": {
                    "send_events": "true",
                    "auth_type": "none",
                    "endpoint_override": nova.url,
                    "request_timeout": 1,
                },
                "conductor": {
                    "lease_timeout": 2,
                    "hello_interval": 1,
                    "jobs_interval": 0.5,
                    "outbox_interval": 0.5,
                    "prepare_timeout": PREPARE_TIMEOUT,
                },
                # A hanging call continues while the gate file exists.
                "fake": {"prepare": "hang", "gate": str(gate)},
            },
        ) as running,
    ):
        wait_until("the device is there", lambda: len(rows.read(engine, schema.attach_handles)))
        yield Env(running, engine, nova, gate)


@pytest.mark.parametrize(("point", "second"), CASES)
def test_conductor_killed_at_each_point_loses_no_work(env: Env, point: str, second: bool) -> None:
    request, instance = env.make(), str(uuid.uuid4())
    env.cloud.daemons["conductor-1"].stop()
    dying = env.cloud.conductor("conductor-1", crash_point=point)
    _listens(env)
    # Retried, because the first call may be rejected before the agent's heartbeat.
    wait_until(
        "the conductor is dead", lambda: not dying.alive() or not env.bind(request, instance)
    )
    env.cloud.conductor("conductor-2" if second else "conductor-1")
    # An uncommitted bind had no effect: Nova's retry, or this one, binds it.
    wait_until("the bind is answered", lambda: env.bind(request, instance) == 202)
    wait_until("the request is Bound", lambda: env.state(request) == "Bound")
    wait_until("nova-event-sent", lambda: env.event_statuses(request))
    assert env.event_statuses(request) == {"completed"}
    assert env.free() == HANDLES - 1
    if second:
        env.cloud.conductor("conductor-1")
        env.cloud.daemons["conductor-2"].stop()
        del env.cloud.daemons["conductor-2"]
    env.release(instance)


def test_agent_killed_during_prepare_resumes_the_job(env: Env) -> None:
    request, instance = env.make(), str(uuid.uuid4())
    env.gate.unlink()
    assert env.bind(request, instance) == 202
    wait_until("the agent has begun", lambda: _started(env))
    assert env.state(request) == "BindStarted"
    env.cloud.daemons[f"agent-{HOST}"].kill()
    env.gate.touch()
    env.cloud.agent(HOST)
    wait_until("the request is Bound", lambda: env.state(request) == "Bound")
    wait_until("nova-event-sent", lambda: env.event_statuses(request) == {"completed"})
    env.release(instance)


@pytest.mark.matrix
def test_agent_killed_during_prepare_fails_the_bind(env: Env) -> None:
    request, instance = env.make(), str(uuid.uuid4())
    env.gate.unlink()
    assert env.bind(request, instance) == 202
    wait_until("the agent has begun", lambda: _started(env))
    env.cloud.daemons[f"agent-{HOST}"].kill()
    wait_until("the bind is undone", lambda: env.state(request) == "BindFailed")
    wait_until("nova-event-sent", lambda: env.event_statuses(request) == {"failed"})
    assert env.free() == HANDLES - 1, "what may be half prepared must not be given out"
    env.gate.touch()
    env.cloud.agent(HOST)
    wait_until("the handle is clean", lambda: env.free() == HANDLES)
    env.release(instance)


def _started(env: Env) -> bool:
    return any(
        '"started"' in path.read_text() for path in env.cloud.folder.glob("agent/jobs-*.json")
    )


def _listens(env: Env) -> None:
    """Wait until the conductor answers on the bus."""
    body = {"name": "listens", "groups": [GROUP]}
    wait_until(
        "the conductor answers",
        lambda: env.call("POST", "/v2/device_profiles", json=[body]).status_code in (201, 409),
    )
