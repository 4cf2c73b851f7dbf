# SPDX-License-Identifier: Apache-2.0
"""Tests of reading services and discoveries."""

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.db import schema
from cyborg.db.discoveries import read as discoveries
from cyborg.db.engine import Reader
from cyborg.db.paging import Page
from cyborg.db.services import read as services
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements


def _agent(engine: sa.Engine, host: str, *backends: str) -> None:
    service = rows.insert_agent(engine, host)
    for name in backends:
        rows.insert(
            engine,
            schema.backends,
            service_id=service,
            name=name,
            driver="fake",
            status="ERROR" if name == "sick" else "READY",
            error="it hangs" if name == "sick" else None,
        )


def test_service_has_its_backends(engine: sa.Engine) -> None:
    _agent(engine, "one", "well", "sick")
    _agent(engine, "two", "well")
    _agent(engine, "three")
    with Reader(engine).connect() as connection:
        result = services.find(connection)
        service = services.get(connection, result[0]["uuid"])
        paged = services.find(
            connection, page=Page(limit=2, sort_key="host", marker=result[0]["uuid"])
        )
    assert service == result[0]
    assert "id" not in result[0]
    assert [(b["name"], b["status"], b["error"]) for b in result[0]["backends"]] == [
        ("sick", "ERROR", "it hangs"),
        ("well", "READY", None),
    ]
    assert not {"id", "service_id"} & set(result[0]["backends"][0])
    assert [len(row["backends"]) for row in result] == [2, 1, 0]
    assert [(row["host"], len(row["backends"])) for row in paged] == [("three", 0), ("two", 1)]


def test_filters_of_services(engine: sa.Engine) -> None:
    _agent(engine, "one")
    _agent(engine, "two")
    now = timeutils.utcnow()
    rows.insert(
        engine,
        schema.services,
        binary="cyborg-api",
        host="one",
        epoch="e",
        status="READY",
        started_at=now,
        **rows.heartbeat(now),
    )
    with Reader(engine).connect() as connection:
        assert len(services.find(connection)) == 3
        assert len(services.find(connection, host="one")) == 2
        assert len(services.find(connection, host="one", binary="cyborg-agent")) == 1
        assert services.find(connection, binary="cyborg-nothing") == []


@pytest.mark.parametrize("number", [1, 30])
def test_find_needs_two_statements(sqlite_engine: sa.Engine, number: int) -> None:
    for host in range(number):
        _agent(sqlite_engine, f"host-{host}", "a", "b")
    with count_statements(sqlite_engine) as count, Reader(sqlite_engine).connect() as connection:
        assert len(services.find(connection)) == number
    assert len(count) == 2, count.statements


def test_find_daemons_reads_the_same_services_without_backends(sqlite_engine: sa.Engine) -> None:
    for host in ("one", "two"):
        _agent(sqlite_engine, host, "a", "b")
    with count_statements(sqlite_engine) as count, Reader(sqlite_engine).connect() as connection:
        daemons = services.find_daemons(connection)
        assert len(count) == 1, count.statements
        found = services.find(connection)
        assert len(services.find_daemons(connection, page=Page(1), host="two")) == 1
    assert daemons == [{**row, "backends": []} for row in found]


@pytest.mark.parametrize("direction", ["asc", "desc"])
def test_backends_of_a_discovery_have_pages_of_hosts(engine: sa.Engine, direction: str) -> None:
    parts = [("b", "x", "DONE"), ("a", "y", "FAILED"), ("a", "x", "DONE"), ("c", "x", "DONE")]
    rows.insert_discovery(engine, *parts, uuid="d")
    rows.insert_discovery(engine, ("a", "x", "IN-PROGRESS"))
    expected = [[("a", "x"), ("a", "y"), ("b", "x")], [("c", "x")]]
    if direction == "desc":
        expected = [[("c", "x"), ("b", "x")], [("a", "x"), ("a", "y")]]
    with Reader(engine).connect() as connection:
        discovery = discoveries.get(connection, "d")
        found, marker = [], None
        for sort_key in (None, "host"):
            page = Page(2, marker, sort_key, direction)
            hosts = discoveries.find_hosts(connection, "d", page=page)
            marker = hosts[-1]["uuid"]
            page_rows = discoveries.find_backends(connection, "d", hosts)
            found.append([(row["host"], row["backend"]) for row in page_rows])
        page = Page(2, marker, None, direction)
        assert not discoveries.find_hosts(connection, "d", page=page)
        assert discoveries.get(connection, "e") is None
    assert found == expected
    assert discovery is not None
    assert discovery["progress"] == {"DONE": 3, "FAILED": 1}
    assert discoveries.find_backends(connection, "d", []) == []


def test_find_of_discoveries_counts_the_parts_of_each_discovery(engine: sa.Engine) -> None:
    parts = {
        "a": [("c1", "x", "DONE"), ("c2", "x", "FAILED"), ("c3", "x", "IN-PROGRESS")],
        "b": [("c1", "x", "DONE"), ("c2", "x", "FAILED")],
        "c": [("c1", "x", "DONE"), ("c1", "y", "DONE")],
    }
    for uuid, steps in parts.items():
        rows.insert_discovery(engine, *steps, uuid=uuid)
    with Reader(engine).connect() as connection:
        with count_statements(engine) as counted:
            summaries = discoveries.find(connection)
        assert len(counted) == 1
        assert [(row["uuid"], row["state"], row["progress"]) for row in summaries] == [
            ("a", "IN-PROGRESS", {"DONE": 1, "FAILED": 1, "IN-PROGRESS": 1}),
            ("b", "FAILED", {"DONE": 1, "FAILED": 1}),
            ("c", "DONE", {"DONE": 2}),
        ]
        assert [r["uuid"] for r in discoveries.find(connection, host="c2")] == ["a", "b"]
        assert discoveries.find(connection, host="c2")[1]["progress"] == {
            "DONE": 1,
            "FAILED": 1,
        }
        assert [r["uuid"] for r in discoveries.find(connection, state="DONE")] == ["c"]
        assert discoveries.find(connection, uuid="b") == summaries[1:2]
        page = Page(limit=1, marker="c", sort_key="created_at", sort_dir="desc")
        assert [r["uuid"] for r in discoveries.find(connection, page=page)] == ["b"]
