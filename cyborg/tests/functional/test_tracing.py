# SPDX-License-Identifier: Apache-2.0
"""Traces: one boot is one trace, over API, RPC, conductor, database, Placement, outbox, agent."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cyborg
from cyborg.tests.fixtures.machine.processes import run_forked
from cyborg.tests.fixtures.tracing.boot import CALLER, TRACE
from cyborg.tests.fixtures.tracing.picture import component_of, draw, drawn_spans, walk

PICTURE = Path(cyborg.__file__).parents[1] / "doc/source/admin/trace-boot.svg"
# The depth and the name of each span of a boot that prepares a device.
BOOT = [
    (0, "POST /v2/accelerator_requests"),
    (1, "rpc conductor.arq_create"),
    (2, "conductor.arq_create"),
    (3, "db.transaction"),
    (0, "PATCH /v2/accelerator_requests"),
    (1, "rpc conductor.arq_bind"),
    (2, "conductor.arq_bind"),
    (3, "bind.find_project"),
    (4, "placement GET"),
    (3, "bind.claim"),
    (4, "db.transaction"),
    (5, "job.dispatch"),
    (6, "rpc agent.job"),
    (7, "agent.job"),
    (8, "job.execute"),
    (6, "db.transaction"),
    (5, "job.complete"),
    (6, "db.transaction"),
    (7, "outbox.deliver nova-event"),
    (8, "nova POST"),
    (0, "GET /v2/accelerator_requests"),
    (1, "db.read"),
]


def record(folder: Path, *, enabled: bool) -> dict[str, Any]:
    """Boot two servers on a service of its own; return its spans."""
    words = ("-m", "cyborg.tests.fixtures.tracing.boot", folder, enabled)
    if enabled:
        traced: dict[str, Any] = run_forked(*words)
        return traced
    # A new process: a fork has the imports of its server.
    process = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, check=False, timeout=200
    )
    assert process.returncode == 0, process.stderr
    recorded: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return recorded


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return record(tmp_path_factory.mktemp("traced"), enabled=True)


@pytest.fixture(scope="module")
def spans(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the spans of the trace that the client started."""
    return [span for span in recorded["spans"] if span["trace"] == TRACE]


def unrepeated(rows: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return rows without those of further queries of the same job on a busy machine."""
    return list(dict.fromkeys(rows)) if len(rows) > len(BOOT) else rows


def test_boot_is_one_trace_with_each_span_below_its_cause(spans: list[dict[str, Any]]) -> None:
    rows = [(depth, span["name"]) for depth, span in walk(spans, CALLER)]
    assert len(rows) == len(spans), "each span has the caller as an ancestor"
    assert unrepeated(rows) == (BOOT if len(rows) == len(BOOT) else list(dict.fromkeys(BOOT)))
    assert {component_of(name)[0] for _, name in rows} == {
        *("API", "RPC client", "conductor", "agent", "outbox", "database", "Placement", "Nova")
    }
    assert {span["status"] for span in spans} == {"UNSET"}


def test_spans_name_the_objects_of_the_boot(
    recorded: dict[str, Any], spans: list[dict[str, Any]]
) -> None:
    instance = recorded["instances"][0]
    attributes = {span["name"]: span["attributes"] for span in spans}
    bind = attributes["conductor.arq_bind"]
    request = attributes["PATCH /v2/accelerator_requests"]
    assert request["http.route"] == "/v2/accelerator_requests"
    assert request["http.response.status_code"] == 202
    assert bind["cyborg.request_id"] == request["cyborg.request_id"]
    assert bind["cyborg.arq"] == attributes["conductor.arq_create"]["cyborg.arq"]
    assert (bind["cyborg.instance"], bind["cyborg.host"]) == (instance, "compute-1")
    assert attributes["GET /v2/accelerator_requests"]["cyborg.instance"] == instance
    work = attributes["job.execute"]
    assert work["cyborg.instance"] == instance
    assert work["cyborg.device"] == ["0000:0c:00.0"]
    assert work["cyborg.job"] == attributes["job.complete"]["cyborg.job"]
    assert "admin" not in json.dumps(spans), "no token"


def test_malformed_context_starts_traces_of_the_service(recorded: dict[str, Any]) -> None:
    """The second boot sent a malformed traceparent: each request is a trace of its own."""
    others = [span for span in recorded["spans"] if span["trace"] != TRACE]
    roots = [span for span in others if span["parent"] is None]
    assert sorted(span["name"] for span in roots if span["kind"] == "SERVER") == [
        "GET /v2/accelerator_requests",
        "PATCH /v2/accelerator_requests",
        "POST /v2/accelerator_requests",
        "POST /v2/device_profiles",
    ]
    assert len({span["trace"] for span in roots}) == len(roots)
    (bind,) = (span for span in roots if span["name"].startswith("PATCH"))
    (event,) = (span for span in others if span["name"] == "nova POST")
    assert event["trace"] == bind["trace"], "the host work and the event belong to the bind"


def test_publication_is_a_trace_of_its_host(recorded: dict[str, Any]) -> None:
    publication = next(span for span in recorded["spans"] if span["name"] == "placement.publish")
    assert publication["attributes"]["cyborg.host"] == "compute-1"
    calls = [span for span in recorded["spans"] if span["parent"] == publication["span"]]
    assert {span["name"] for span in calls} >= {"placement GET", "placement PUT"}


def test_periodic_work_records_no_span(recorded: dict[str, Any]) -> None:
    roots = {span["name"] for span in recorded["spans"] if span["parent"] is None}
    assert {name for name in roots if "/v2/" not in name} == {"placement.publish"}


def test_picture_shows_the_spans_of_a_boot(spans: list[dict[str, Any]]) -> None:
    """Draw it anew with CYBORG_TEST_WRITE_GOLDEN=1."""
    if os.environ.get("CYBORG_TEST_WRITE_GOLDEN"):
        PICTURE.write_text(draw(spans, CALLER), encoding="utf-8")
    assert drawn_spans(PICTURE) == BOOT


@pytest.mark.matrix
def test_disabled_service_boots_without_opentelemetry(tmp_path: Path) -> None:
    recorded = record(tmp_path, enabled=False)
    assert len(recorded["instances"]) == 2
    assert recorded["spans"] == []
    assert recorded["imported"] == ["cyborg.tracing"]
