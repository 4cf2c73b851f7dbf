# SPDX-License-Identifier: Apache-2.0
"""Jobs in the API."""

import re
from pathlib import Path
from typing import Any

import pytest

import cyborg
from cyborg.core.drivers.rollout import Kind, StepState
from cyborg.core.errors import NotFound, WrongState
from cyborg.core.jobs.job import JobKind, JobState
from cyborg.db import schema
from cyborg.tests.fixtures.clouds.api import ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.unit.api.test_drivers import JOB, FakeConductor, fake_conductor

__all__ = ["fake_conductor"]

LATEST = {"OpenStack-API-Version": "accelerator latest"}
PATH = "/v2/jobs"


def add(api: ApiEnv, kind: str = "install", *steps: str, **job: Any) -> str:
    defaults = {"host": "", "subject": "generic", "arguments": {"config": {"a": "secret"}}}
    id_ = rows.insert(api.engine, schema.jobs, kind=kind, **defaults | job)
    for n, state in enumerate(steps):
        values = {"host": f"h{n}", "backend": "gen0", "state": state}
        rows.insert(api.engine, schema.job_steps, job_id=id_, error=None, **values)
    (row,) = rows.read(api.engine, schema.jobs, id=id_)
    return str(row["uuid"])


def test_job_with_steps_on_many_hosts(api: ApiEnv) -> None:
    uuid = add(api, "update", "done", "rolled_back", "skipped", state="failed", error="no h1")
    (listed,) = api.get(PATH)["jobs"]
    job = api.get(f"{PATH}/{uuid}")
    steps = job.pop("steps")
    assert job == listed
    assert {key: listed[key] for key in ("uuid", "kind", "host", "subject", "state", "error")} == {
        **{"uuid": uuid, "kind": "update", "host": None, "subject": "generic"},
        **{"state": "failed", "error": "no h1"},
    }
    assert listed["progress"] == {"done": 1, "rolled_back": 1, "skipped": 1}
    assert listed["links"][0]["href"].endswith(f"{PATH}/{uuid}")
    assert [(step["host"], step["state"]) for step in steps] == [
        ("h0", "done"),
        ("h1", "rolled_back"),
        ("h2", "skipped"),
    ]
    assert "secret" not in str([listed, job])


def test_steps_have_pages_of_hosts(api: ApiEnv) -> None:
    uuid = add(api, "update", "done", "failed", "done", "done")
    path, found = f"{PATH}/{uuid}?limit=2&step_state=done", []
    while path:
        page = api.get(path)
        assert page["progress"] == {"done": 3, "failed": 1}
        found.append([step["host"] for step in page["steps"]])
        links = page.get("steps_links", [])
        path = "".join(link["href"].removeprefix("http://localhost") for link in links)
    assert found == [["h0", "h2"], ["h3"]]
    assert api.get(f"{PATH}/{uuid}?step_state=skipped")["steps"] == []
    assert "late" in error_message(api.call("GET", f"{PATH}/{uuid}?step_state=late", None, LATEST))


@pytest.mark.parametrize("kind", [*Kind, *JobKind])
def test_find_filters_by_kind_and_state(api: ApiEnv, kind: str) -> None:
    for state in JobState:
        uuid = add(api, kind, state=state, host="compute-1")
        (job,) = api.get(f"{PATH}?kind={kind}&state={state}&host=compute-1")["jobs"]
        assert (job["uuid"], job["host"], job["progress"]) == (uuid, "compute-1", {})
    assert len(api.get(f"{PATH}?kind={kind}&subject=generic")["jobs"]) == len(JobState)


def test_activity_is_shown_from_2_5_on(api: ApiEnv) -> None:
    activity = {"step": "fetch image", "done": 4, "total": 10}
    uuid = add(api, "program", host="compute-1", activity=activity)
    for version, keys in (("2.4", set()), ("2.5", {"activity"})):
        headers = {"OpenStack-API-Version": f"accelerator {version}"}
        (listed,) = api.call("GET", PATH, None, headers).json["jobs"]
        shown = api.call("GET", f"{PATH}/{uuid}", None, headers).json
        for job in (listed, shown):
            assert job.keys() & {"activity"} == keys
            assert job.get("activity", activity) == activity


def test_find_pages_with_constant_query_count(api: ApiEnv) -> None:
    created = [add(api, "install", "done", "waiting") for _ in range(5)]
    path, uuids = f"{PATH}?limit=2&sort_key=created_at", []
    with count_statements(api.engine) as count:
        while path:
            body = api.get(path)
            uuids += [row["uuid"] for row in body["jobs"]]
            path = next((link["href"] for link in body.get("jobs_links", ())), "")
    assert uuids == created
    # Of three pages two have a marker.
    assert len(count) == 8, count.statements


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"{PATH}/a0000000-0000-4000-8000-00000000000a", 404),
        (f"{PATH}/x", 400),
        (f"{PATH}?kind=format", 400),
        (f"{PATH}?state=waiting", 400),
        (f"{PATH}?sort_key=arguments", 400),
        (f"{PATH}?marker=x", 400),
        (f"{PATH}?host=a%00", 400),
    ],
)
def test_invalid_request_is_rejected(api: ApiEnv, path: str, status: int) -> None:
    answer = api.call("GET", path, None, LATEST)
    assert answer.status_int == status
    assert error_message(answer)
    assert api.call("GET", PATH).status_int == 404
    assert api.call("POST", PATH, {}, LATEST).status_int == 405


def test_cancel(api: ApiEnv, fake_conductor: FakeConductor) -> None:
    path = f"{PATH}/{JOB.upper()}"
    assert api.call("DELETE", path, None, LATEST).status_int == 204
    assert fake_conductor.calls == [("job_cancel", {"uuid": JOB})]
    assert api.call("DELETE", path).status_int == 404
    assert api.call("DELETE", f"{PATH}/x", None, LATEST).status_int == 400
    for error, status in ((NotFound("no job"), 404), (WrongState("it is done"), 409)):
        fake_conductor.error = error
        refused = api.call("DELETE", path, None, LATEST)
        assert (refused.status_int, error_message(refused)) == (status, error.message)


@pytest.mark.static
@pytest.mark.parametrize("state", StepState)
def test_documentation_lists_all_step_states(state: StepState) -> None:
    page = Path(cyborg.__file__).parents[1] / "doc" / "source" / "api" / "index.rst"
    row = rf"^``{state}`` +{re.escape(state.description)}$"
    assert re.search(row, page.read_text(encoding="utf-8"), re.MULTILINE)
