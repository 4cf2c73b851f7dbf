# SPDX-License-Identifier: Apache-2.0
"""Jobs as the API shows them."""

import re
from pathlib import Path
from typing import Any

import pytest

import cyborg
from cyborg.core.errors import NotFound, WrongState
from cyborg.core.job import JobKind, JobState
from cyborg.core.rollout import SENTENCES, Kind
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.fixtures import rows
from cyborg.fixtures.api import ApiBed, fault
from cyborg.tests.unit.api.test_drivers import JOB, Heard, heard

__all__ = ["heard"]

LATEST = {"OpenStack-API-Version": "accelerator latest"}
PATH = "/v2/jobs"


def add(api: ApiBed, kind: str = "install", *steps: str, **job: Any) -> str:
    known = {"host": "", "subject": "generic", "arguments": {"config": {"a": "secret"}}}
    id_ = rows.insert(api.engine, schema.jobs, kind=kind, **known | job)
    for n, state in enumerate(steps):
        its = {"host": f"h{n}", "backend": "gen0", "state": state}
        rows.insert(api.engine, schema.job_steps, job_id=id_, error=None, **its)
    (row,) = rows.read(api.engine, schema.jobs, id=id_)
    return str(row["uuid"])


def test_a_job_of_many_hosts(api: ApiBed) -> None:
    uuid = add(api, "update", "done", "rolled_back", "untouched", state="failed", error="no h1")
    (listed,) = api.get(PATH)["jobs"]
    shown = api.get(f"{PATH}/{uuid}")
    steps = shown.pop("steps")
    assert shown == listed
    assert {key: listed[key] for key in ("uuid", "kind", "host", "subject", "state", "error")} == {
        **{"uuid": uuid, "kind": "update", "host": None, "subject": "generic"},
        **{"state": "failed", "error": "no h1"},
    }
    assert listed["progress"] == {"done": 1, "rolled_back": 1, "untouched": 1}
    assert listed["links"][0]["href"].endswith(f"{PATH}/{uuid}")
    assert [(step["host"], step["state"]) for step in steps] == [
        ("h0", "done"),
        ("h1", "rolled_back"),
        ("h2", "untouched"),
    ]
    assert "secret" not in str([listed, shown])


@pytest.mark.parametrize("kind", [*Kind, *JobKind])
def test_every_kind_and_state_can_be_asked_for(api: ApiBed, kind: str) -> None:
    for state in JobState:
        uuid = add(api, kind, state=state, host="compute-1")
        (found,) = api.get(f"{PATH}?kind={kind}&state={state}&host=compute-1")["jobs"]
        assert (found["uuid"], found["host"], found["progress"]) == (uuid, "compute-1", {})
    assert len(api.get(f"{PATH}?kind={kind}&subject=generic")["jobs"]) == len(JobState)


def test_pages_and_what_they_cost(api: ApiBed) -> None:
    made = [add(api, "install", "done", "waiting") for _ in range(5)]
    path, seen = f"{PATH}?limit=2&sort_key=kind", []
    with counting(api.engine) as count:
        while path:
            body = api.get(path)
            seen += [row["uuid"] for row in body["jobs"]]
            path = next((link["href"] for link in body.get("jobs_links", ())), "")
    assert seen == made
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
def test_what_there_is_not(api: ApiBed, path: str, status: int) -> None:
    answer = api.call("GET", path, None, LATEST)
    assert answer.status_int == status
    assert fault(answer)
    assert api.call("GET", PATH).status_int == 404
    assert api.call("POST", PATH, {}, LATEST).status_int == 405


def test_cancelling(api: ApiBed, heard: Heard) -> None:
    path = f"{PATH}/{JOB.upper()}"
    assert api.call("DELETE", path, None, LATEST).status_int == 204
    assert heard.calls == [("job_cancel", {"uuid": JOB})]
    assert api.call("DELETE", path).status_int == 404
    assert api.call("DELETE", f"{PATH}/x", None, LATEST).status_int == 400
    for error, status in ((NotFound("no job"), 404), (WrongState("it is done"), 409)):
        heard.refusal = error
        refused = api.call("DELETE", path, None, LATEST)
        assert (refused.status_int, fault(refused)) == (status, error.message)


@pytest.mark.parametrize("state", SENTENCES)
def test_the_manual_has_every_state_with_its_sentence(state: str) -> None:
    page = Path(cyborg.__file__).parents[1] / "doc" / "source" / "api" / "index.rst"
    row = rf"^``{state}`` +{re.escape(SENTENCES[state])}$"
    assert re.search(row, page.read_text(encoding="utf-8"), re.MULTILINE)
