# SPDX-License-Identifier: Apache-2.0
"""The limit of ARQs of a project, on each kind of database."""

import threading

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.core.errors import OverLimit
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.machine.options import make_conf

LIMIT = 5


def make_arqs(engine: sa.Engine, limit: int = LIMIT) -> Arqs:
    return Arqs(make_conf(conductor={"max_project_arqs": limit}), UnitOfWork(engine))


def fill(engine: sa.Engine, profile: int, count: int, **values: str) -> None:
    for _ in range(count):
        rows.insert_arq(engine, profile, **values)


def test_create_at_project_limit_fails_only_for_that_project(engine: sa.Engine) -> None:
    profile, two = rows.insert_profile(engine), [{"resources:FPGA": "2"}]
    rows.insert_profile(engine, "two", two)
    arqs = make_arqs(engine)
    fill(engine, profile, LIMIT - 1, project_id="full")
    with pytest.raises(OverLimit) as raised:
        arqs.create("two", "full")
    assert raised.value.details == {"limit": LIMIT, "used": LIMIT - 1}
    assert len(arqs.create("fpga", "full")["arqs"]) == 1
    with pytest.raises(OverLimit):
        arqs.create("fpga", "full")
    assert len(arqs.create("two", "other")["arqs"]) == 2
    # A deleted ARQ no longer counts.
    uuid = rows.read(engine, schema.arqs, project_id="full")[0]["uuid"]
    arqs.delete([uuid], None, None, True)
    assert len(arqs.create("fpga", "full")["arqs"]) == 1


@pytest.mark.parametrize(("limit", "project"), [(-1, "p"), (LIMIT, None)])
def test_create_without_limit_or_project_succeeds(
    sqlite_engine: sa.Engine, limit: int, project: str | None
) -> None:
    profile = rows.insert_profile(sqlite_engine)
    fill(sqlite_engine, profile, LIMIT + 1, project_id=project)  # type: ignore[arg-type]
    assert len(make_arqs(sqlite_engine, limit).create("fpga", project)["arqs"]) == 1


def test_limit_adds_no_statement(sqlite_engine: sa.Engine) -> None:
    rows.insert_profile(sqlite_engine)
    costs = []
    for limit in (-1, 1000):
        with count_statements(sqlite_engine) as count:
            make_arqs(sqlite_engine, limit).create("fpga", "p")
        costs.append(len(count))
    assert costs[0] == costs[1]


def test_concurrent_creates_exceed_limit_only_by_their_own_arqs(engine: sa.Engine) -> None:
    concurrency, each = 4, 10
    rows.insert_profile(engine)
    start = threading.Barrier(concurrency)

    def make_many(arqs: Arqs) -> None:
        start.wait()
        for _ in range(each):
            try:
                arqs.create("fpga", "p")
            except OverLimit:
                return

    threads = [
        threading.Thread(target=make_many, args=(make_arqs(engine),)) for _ in range(concurrency)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    count = len(rows.read(engine, schema.arqs))
    assert LIMIT <= count <= LIMIT + concurrency - 1
    with pytest.raises(OverLimit):
        make_arqs(engine).create("fpga", "p")
