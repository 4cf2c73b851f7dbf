# SPDX-License-Identifier: Apache-2.0
"""kill -9 of a conductor at each step of a bind, and of an agent that prepares a device.

Real processes, MariaDB, RabbitMQ, Placement; Nova's side takes the events over HTTP. Whatever
dies, in the end the request is Bound with its event, or undone with its event, and no handle is
lost.
"""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.cloud import Cloud, cloud
from cyborg.fixtures.databases import engine_of, fresh_database
from cyborg.fixtures.dying import POINTS
from cyborg.fixtures.nova import FakeNova, serving
from cyborg.fixtures.processes import until

HOST = "compute-1"
HANDLES = 4
PREPARE_TIMEOUT = 15

pytestmark = pytest.mark.services


class Bed:
    """A cloud of one host, its database and its Nova."""

    def __init__(self, running: Cloud, engine: sa.Engine, nova: FakeNova, gate: Path) -> None:
        self.cloud, self.engine, self.nova, self.gate = running, engine, nova, gate
        made = self.call("POST", "/v2/device_profiles", json=[{"name": "p", "groups": [GROUP]}])
        assert made.status_code == 201, made.text

    def call(self, method: str, path: str, **more: Any) -> requests.Response:
        headers = {"X-Service-Token": "any", "OpenStack-API-Version": "accelerator latest"}
        url = f"{self.cloud.endpoint}{path}"
        return requests.request(method, url, headers=headers, timeout=60, **more)

    def make(self) -> str:
        return str(until("a request is made", self._made))

    def _made(self) -> str | None:
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
        (row,) = rows.read(self.engine, schema.requests, uuid=request)
        return str(row["state"])

    def told(self, request: str) -> set[str]:
        events = [event for call in self.nova.calls for event in call["events"]]
        return {event["status"] for event in events if event["tag"] == request}

    def free(self) -> int:
        handles = rows.read(self.engine, schema.attach_handles)
        return len([h for h in handles if h["request_id"] is None and not h["prepared"]])

    def release(self, instance: str) -> None:
        """Delete what an instance has, and wait until every handle is clean."""
        answer = until("the delete is answered", lambda: self._deleted(instance))
        assert answer == 204
        until("every handle is free", lambda: self.free() == HANDLES)
        # What waits would be the first thing that the next conductor does, and dies of.
        until("nothing waits", lambda: not rows.read(self.engine, schema.outbox))
        assert rows.read(self.engine, schema.requests) == []

    def _deleted(self, instance: str) -> int | None:
        code = self.call("DELETE", f"/v2/accelerator_requests?instance={instance}").status_code
        return code if code < 500 else None


GROUP = {"resources:FPGA": "1"}


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Bed]:
    folder = tmp_path_factory.mktemp("kill")
    gate = folder / "gate"
    gate.touch()
    with (
        serving(FakeNova()) as nova,
        fresh_database("mysql", folder) as url,
        engine_of(url) as engine,
        cloud(
            folder,
            url,
            rabbit_url,
            (HOST,),
            HANDLES,
            conductors=("conductor-1",),
            options={
                "rpc": {"timeout": 3},
                "nova": {
                    "notify": "true",
                    "auth_type": "none",
                    "endpoint_override": nova.url,
                    "request_timeout": 1,
                },
                "conductor": {
                    "lease": 2,
                    "hello_interval": 1,
                    "jobs_interval": 0.5,
                    "outbox_interval": 0.5,
                    "prepare_timeout": PREPARE_TIMEOUT,
                },
                # What hangs goes on while the gate is there.
                "fake": {"prepare": "hang", "gate": str(gate)},
            },
        ) as running,
    ):
        until("the device is there", lambda: len(rows.read(engine, schema.attach_handles)))
        yield Bed(running, engine, nova, gate)


@pytest.mark.parametrize("second", [False, True], ids=["restarted", "taken over"])
@pytest.mark.parametrize("point", POINTS)
def test_a_conductor_dies(bed: Bed, point: str, second: bool) -> None:
    request, instance = bed.make(), str(uuid.uuid4())
    bed.cloud.daemons["conductor-1"].stop()
    dying = bed.cloud.conductor("conductor-1", dies_at=point)
    _listens(bed)
    # Asked again, as it may have been refused: the agent's hello is younger than this conductor.
    until("the conductor is dead", lambda: not dying.alive() or not bed.bind(request, instance))
    bed.cloud.conductor("conductor-2" if second else "conductor-1")
    # What was not committed did not happen: Nova's own retry, or ours here, binds it.
    until("the bind is answered", lambda: bed.bind(request, instance) == 202)
    until("the request is Bound", lambda: bed.state(request) == "Bound")
    until("Nova was told", lambda: bed.told(request))
    assert bed.told(request) == {"completed"}
    assert bed.free() == HANDLES - 1
    if second:
        bed.cloud.conductor("conductor-1")
        bed.cloud.daemons["conductor-2"].stop()
        del bed.cloud.daemons["conductor-2"]
    bed.release(instance)


def test_an_agent_dies_while_it_prepares_and_returns(bed: Bed) -> None:
    request, instance = bed.make(), str(uuid.uuid4())
    bed.gate.unlink()
    assert bed.bind(request, instance) == 202
    until("the agent has begun", lambda: _started(bed))
    assert bed.state(request) == "BindStarted"
    bed.cloud.daemons[f"agent-{HOST}"].kill()
    bed.gate.touch()
    bed.cloud.agent(HOST)
    until("the request is Bound", lambda: bed.state(request) == "Bound")
    until("Nova was told", lambda: bed.told(request) == {"completed"})
    bed.release(instance)


def test_an_agent_dies_while_it_prepares_and_stays_away(bed: Bed) -> None:
    request, instance = bed.make(), str(uuid.uuid4())
    bed.gate.unlink()
    assert bed.bind(request, instance) == 202
    until("the agent has begun", lambda: _started(bed))
    bed.cloud.daemons[f"agent-{HOST}"].kill()
    until("the bind is undone", lambda: bed.state(request) == "BindFailed")
    until("Nova was told", lambda: bed.told(request) == {"failed"})
    assert bed.free() == HANDLES - 1, "what may be half prepared must not be given out"
    bed.gate.touch()
    bed.cloud.agent(HOST)
    until("the handle is clean", lambda: bed.free() == HANDLES)
    bed.release(instance)


def _started(bed: Bed) -> bool:
    return any(
        '"started"' in path.read_text() for path in bed.cloud.folder.glob("agent/jobs-*.json")
    )


def _listens(bed: Bed) -> None:
    """Wait until the one conductor answers on the bus."""
    body = {"name": "listens", "groups": [GROUP]}
    until(
        "the conductor answers",
        lambda: bed.call("POST", "/v2/device_profiles", json=[body]).status_code in (201, 409),
    )
