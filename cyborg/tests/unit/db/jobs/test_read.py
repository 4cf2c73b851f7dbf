# SPDX-License-Identifier: Apache-2.0
"""Tests of reading jobs, on every database."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Invalid
from cyborg.db import schema
from cyborg.db.jobs import read as jobs
from cyborg.db.paging import Page
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements


def add(engine: sa.Engine, kind: str, subject: str, *steps: tuple[str, str], **job: Any) -> str:
    """Insert a job with steps (host, state) and return its uuid."""
    defaults = {"host": "", "arguments": {"config": {"password": "secret"}}}
    id_ = rows.insert(engine, schema.jobs, kind=kind, subject=subject, **defaults | job)
    for n, (host, state) in enumerate(steps):
        error = "no" if state == "failed" else None
        values = {"backend": f"gen{n}", "state": state, "error": error}
        rows.insert(engine, schema.job_steps, job_id=id_, host=host, **values)
    (row,) = rows.read(engine, schema.jobs, id=id_)
    return str(row["uuid"])


@pytest.fixture
def job_uuids(engine: sa.Engine) -> list[str]:
    return [
        add(engine, "install", "generic", ("b", "done"), ("a", "failed"), ("a", "done")),
        add(engine, "prepare", "instance-1", host="a", attempts=2),
        add(engine, "update", "generic", ("c", "waiting"), state="done"),
    ]


STEPS = [
    {"host": "a", "backend": "gen1", "state": "failed", "error": "no"},
    {"host": "a", "backend": "gen2", "state": "done", "error": None},
    {"host": "b", "backend": "gen0", "state": "done", "error": None},
]


def test_job_has_its_progress_and_steps(engine: sa.Engine, job_uuids: list[str]) -> None:
    with engine.connect() as connection:
        first, second, third = jobs.find(connection)
        assert jobs.get(connection, job_uuids[0]) == first
        assert jobs.get(connection, job_uuids[1]) == second
        assert jobs.get(connection, "none-such") is None
        hosts = jobs.find_hosts(connection, job_uuids[0])
        assert jobs.find_steps(connection, job_uuids[0], hosts) == STEPS
        assert jobs.find_hosts(connection, job_uuids[1]) == []
        assert jobs.find_steps(connection, job_uuids[1], []) == []
    assert [row["uuid"] for row in (first, second, third)] == job_uuids
    assert first["progress"] == {"done": 2, "failed": 1}
    assert (first["host"], first["state"], first["attempts"]) == (None, "pending", 0)
    assert (second["host"], second["attempts"], second["progress"]) == ("a", 2, {})
    assert "secret" not in str([first, second, third])


@pytest.mark.parametrize(
    ("state", "direction", "expected"),
    [
        (None, "asc", [STEPS[:2], STEPS[2:]]),
        (None, "desc", [STEPS[2:], STEPS[:2]]),
        ("done", "asc", [STEPS[1:2], STEPS[2:]]),
        ("failed", "asc", [STEPS[:1]]),
        ("waiting", "asc", []),
    ],
)
def test_steps_have_pages_of_hosts(
    engine: sa.Engine,
    job_uuids: list[str],
    state: str | None,
    direction: str,
    expected: list[list[dict[str, Any]]],
) -> None:
    found, page = [], Page(1, None, "host", direction)
    with engine.connect() as connection:
        while hosts := jobs.find_hosts(connection, job_uuids[0], page=page, state=state):
            found.append(jobs.find_steps(connection, job_uuids[0], hosts, state))
            page = Page(1, hosts[-1]["uuid"], None, direction)
    assert found == expected


def test_step_that_enters_the_state_between_the_statements_is_on_no_page(engine: sa.Engine) -> None:
    uuid = add(engine, "update", "generic", ("a", "failed"), ("b", "done"), ("c", "failed"))
    with engine.connect() as connection:
        hosts = jobs.find_hosts(connection, uuid, state="failed")
    (step,) = rows.read(engine, schema.job_steps, host="b")
    rows.update(engine, schema.job_steps, step["id"], state="failed")
    with engine.connect() as connection:
        found = jobs.find_steps(connection, uuid, hosts, "failed")
    assert [row["host"] for row in found] == ["a", "c"]


def test_activity_is_shown_until_the_job_has_ended(engine: sa.Engine) -> None:
    activity = {"step": "fetch image", "done": 4, "total": 10}
    for state in ("pending", "failed"):
        add(engine, "program", "part", host="a", activity=activity, state=state)
    with engine.connect() as connection:
        assert [row["activity"] for row in jobs.find(connection)] == [activity, None]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"kind": "install"}, [0]),
        ({"state": "pending"}, [0, 1]),
        ({"subject": "generic"}, [0, 2]),
        ({"host": "a"}, [0, 1]),
        ({"host": "b"}, [0]),
        ({"host": "c", "state": "done"}, [2]),
        ({"host": ""}, []),
        ({"host": "nowhere"}, []),
    ],
)
def test_filters(
    engine: sa.Engine, job_uuids: list[str], filters: dict[str, Any], expected: list[int]
) -> None:
    with engine.connect() as connection:
        listed = [row["uuid"] for row in jobs.find(connection, **filters)]
    assert listed == [job_uuids[n] for n in expected]


def test_filter_by_uuid(engine: sa.Engine, job_uuids: list[str]) -> None:
    with engine.connect() as connection:
        (found,) = jobs.find(connection, uuid=job_uuids[0])
        assert not jobs.find(connection, uuid=job_uuids[0], kind="update")
    assert (found["uuid"], found["progress"]) == (job_uuids[0], {"done": 2, "failed": 1})


def test_pages(engine: sa.Engine, job_uuids: list[str]) -> None:
    with engine.connect() as connection:
        (first,) = jobs.find(connection, page=Page(1))
        next_page = jobs.find(connection, page=Page(5, first["uuid"]))
        last = jobs.find(connection, page=Page(2, None, "host", "desc"))
        with pytest.raises(Invalid):
            jobs.find(connection, page=Page(sort_key="arguments"))
    assert [row["uuid"] for row in (first, *next_page)] == job_uuids
    assert first["progress"] == {"done": 2, "failed": 1}
    assert last[0]["uuid"] == job_uuids[1]


def test_find_needs_a_constant_number_of_statements(sqlite_engine: sa.Engine) -> None:
    for number in (1, 20):
        for n in range(number):
            add(sqlite_engine, "install", f"{number}-{n}", *((f"h{m}", "done") for m in range(3)))
        with sqlite_engine.connect() as connection:
            with count_statements(sqlite_engine) as count:
                assert {row["progress"]["done"] for row in jobs.find(connection)} == {3}
            assert len(count) == 2, count.statements
