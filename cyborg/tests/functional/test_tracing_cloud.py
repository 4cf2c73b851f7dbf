# SPDX-License-Identifier: Apache-2.0
"""Traces of services as processes, which fork: exported to a collector, or while none answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.clouds.cloud import Cloud, make_and_run_cloud
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine.processes import ends_within, free_port, wait_until
from cyborg.tests.fixtures.tracing.boot import CALLER, TRACE, Api, boot
from cyborg.tests.fixtures.tracing.collector import Collector, serve_collector
from cyborg.tests.fixtures.tracing.picture import walk

HOST = "compute-1"
pytestmark = [pytest.mark.services, pytest.mark.matrix]

SERVICES = {
    "POST /v2/accelerator_requests": "cyborg-api",
    "PATCH /v2/accelerator_requests": "cyborg-api",
    "GET /v2/accelerator_requests": "cyborg-api",
    "conductor.arq_create": "cyborg-conductor",
    "conductor.arq_bind": "cyborg-conductor",
    "placement GET": "cyborg-conductor",
    "agent.job": "cyborg-agent",
    "job.execute": "cyborg-agent",
    "job.complete": "cyborg-conductor",
    "nova POST": "cyborg-conductor",
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with serve_collector() as running:
        yield running


@pytest.fixture(scope="module")
def nova() -> Iterator[FakeNova]:
    with serve_nova(FakeNova()) as running:
        yield running


@pytest.fixture(scope="module")
def cloud(
    tmp_path_factory: pytest.TempPathFactory, rabbit_url: str, nova: FakeNova, collector: Collector
) -> Iterator[Cloud]:
    """Run API and conductor with two worker processes each, and an agent."""
    folder = tmp_path_factory.mktemp("traces")
    options: dict[str, dict[str, Any]] = {
        "nova": {"send_events": "true", "auth_type": "none", "endpoint_override": nova.url},
        "fake": {"prepare": "ok"},
        "conductor": {"workers": 2},
        "tracing": {"enabled": "true", "otlp_endpoint": collector.url},
    }
    with (
        fresh_database("mysql", folder) as url,
        make_and_run_cloud(
            folder, url, rabbit_url, (HOST,), conductors=("conductor-1",), options=options
        ) as running,
    ):
        yield running


def find_provider(cloud: Cloud) -> str:
    """Return the provider of the card when it is in Placement, and create the profile."""

    def provider() -> str | None:
        path = "/resource_providers?resources=FPGA:1"
        found = cloud.placement.get(path).json().get("resource_providers")
        return str(found[0]["uuid"]) if found else None

    device_rp = wait_until("the card is in Placement", provider)
    profile = [{"name": "p", "groups": [{"resources:FPGA": "1"}]}]
    Api(cloud.endpoint, None).call("POST", "device_profiles", 201, profile)
    return str(device_rp)


def test_boot_over_forked_processes_is_one_trace(
    cloud: Cloud, nova: FakeNova, collector: Collector
) -> None:
    boot(Api(cloud.endpoint), find_provider(cloud), lambda arq: arq in nova.tags)

    def complete() -> bool:
        return {span["name"] for span in collector.spans(TRACE)} >= SERVICES.keys()

    wait_until("all spans are exported", complete, 60)
    spans = collector.spans(TRACE)
    # A span is exported when it has ended: those of one process arrive before their parents.
    wait_until("all parents are exported", lambda: _is_connected(collector), 60)
    spans = collector.spans(TRACE)
    services = {span["name"]: span["service"] for span in spans}
    assert {name: services[name] for name in SERVICES} == SERVICES
    assert {span["host"] for span in spans} == {HOST, "conductor-1", "controller"}


def _is_connected(collector: Collector) -> bool:
    spans = collector.spans(TRACE)
    return len(list(walk(spans, CALLER))) == len(spans)


def test_absent_collector_delays_no_request(
    tmp_path: Path, rabbit_url: str, nova: FakeNova
) -> None:
    options: dict[str, dict[str, Any]] = {
        "nova": {"send_events": "true", "auth_type": "none", "endpoint_override": nova.url},
        "fake": {"prepare": "ok"},
        "tracing": {
            "enabled": "true",
            "otlp_endpoint": f"http://127.0.0.1:{free_port()}/v1/traces",
        },
    }
    with (
        fresh_database("mysql", tmp_path) as url,
        make_and_run_cloud(
            tmp_path, url, rabbit_url, (HOST,), conductors=("conductor-1",), options=options
        ) as cloud,
    ):
        provider = find_provider(cloud)
        with ends_within(10):
            for _ in range(3):
                boot(Api(cloud.endpoint), provider, lambda arq: arq in nova.tags)
        warning = "The collector of traces at http://127.0.0.1:"
        log = cloud.daemons["conductor-1"].log
        wait_until("the failure is logged", lambda: warning in log.read_text(), 60)
        with ends_within(15):
            codes = cloud.stop()
        assert {name: code for name, code in codes.items() if code not in (0, -15)} == {}
        text = log.read_text()
        assert text.count(warning) == 1, "once at the begin of the outage"
        assert "Traceback" not in text
