# SPDX-License-Identifier: Apache-2.0
"""CADF events of the API under gunicorn on RabbitMQ, as a consumer of notifications gets them."""

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import requests

import cyborg
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.tests.fixtures.bus.notification_listeners import run_listener
from cyborg.tests.fixtures.clouds.cloud import Cloud, make_and_run_cloud
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine.options import make_conf

pytestmark = [pytest.mark.services, pytest.mark.matrix]

MAP_FILE = Path(cyborg.__file__).parents[1] / "etc" / "cyborg" / "api_audit_map.conf"
TOKEN = "secret-token-of-this-client-0123456789"
TOPIC = f"test-audit-{uuid4().hex[:12]}"


@pytest.fixture(scope="module")
def events(rabbit_url: str) -> Iterator[Any]:
    """Yield the queue of the audit events that arrive on the topic."""
    received: queue.Queue[Any] = queue.Queue()

    class Endpoint:
        def info(self, ctxt: Any, publisher: str, event: str, payload: Any, more: Any) -> None:
            if event.startswith("audit."):
                received.put((publisher, event, payload))

    conf = make_conf()
    is_enabled(conf)
    conf.set_override("transport_url", rabbit_url)
    conf.set_override("control_exchange", TOPIC)
    with run_listener(conf, TOPIC, Endpoint()):
        yield received


@pytest.fixture(scope="module")
def cloud(
    tmp_path_factory: pytest.TempPathFactory, rabbit_url: str, events: Any
) -> Iterator[Cloud]:
    folder = tmp_path_factory.mktemp("audit")
    options: dict[str, dict[str, Any]] = {
        "DEFAULT": {"control_exchange": TOPIC},
        "api": {"audit_map_file": str(MAP_FILE)},
        GROUP: {"driver": "messagingv2", "topics": TOPIC},
    }
    with (
        fresh_database("mysql", folder) as url,
        make_and_run_cloud(
            folder, url, rabbit_url, (), conductors=("conductor-1",), options=options
        ) as running,
    ):
        yield running


def test_changes_have_events_with_initiator_target_and_outcome(cloud: Cloud, events: Any) -> None:
    def call(method: str, path: str, body: Any = None) -> requests.Response:
        headers = {"X-Auth-Token": TOKEN, "X-Project-Id": "project-1"}
        url = f"{cloud.endpoint}/v2/{path}"
        return requests.request(method, url, json=body, headers=headers, timeout=60)

    profile = [{"name": "p", "groups": [{"resources:FPGA": "1"}]}]
    created = call("POST", "device_profiles", profile)
    (arq,) = call("POST", "accelerator_requests", {"device_profile_name": "p"}).json()["arqs"]
    assert call("GET", "accelerator_requests").status_code == 200
    names = ("hostname", "device_rp_uuid", "instance_uuid")
    # There is no such provider: the bind is rejected.
    values = {"hostname": "compute-1", **dict.fromkeys(names[1:], str(uuid4()))}
    patch = [{"op": "add", "path": f"/{name}", "value": values[name]} for name in names]
    answers = [
        created,
        call("PATCH", "accelerator_requests", {arq["uuid"]: patch}),
        call("DELETE", f"accelerator_requests?arqs={arq['uuid']}"),
        call("DELETE", f"device_profiles/{uuid4()}"),
    ]
    received = [events.get(timeout=60) for _ in range(10)]
    assert {publisher for publisher, _, _ in received} == {"cyborg-api:controller"}
    assert TOKEN[:6] not in json.dumps(received)
    finished = {
        payload["initiator"]["request_id"]: payload
        for _, event, payload in received
        if event == "audit.http.response"
    }
    assert len(finished) == 5, "a GET has no event"
    shown = []
    for answer in answers:
        event = finished[answer.headers["X-Openstack-Request-Id"]]
        assert event["reason"]["reasonCode"] == str(answer.status_code)
        assert event["initiator"]["project_id"] == "project-1"
        assert event["initiator"]["host"]["address"] == "127.0.0.1"
        target = event["target"]["typeURI"]
        shown.append((event["action"], target, event["outcome"]))
    root = "service/accelerator"
    assert shown == [
        ("create", f"{root}/device_profiles", "success"),
        ("update", f"{root}/accelerator_requests", "failure"),
        ("delete", f"{root}/accelerator_requests", "success"),
        ("delete", f"{root}/device_profiles/device_profile", "failure"),
    ]
