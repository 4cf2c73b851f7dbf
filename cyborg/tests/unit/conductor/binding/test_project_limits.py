# SPDX-License-Identifier: Apache-2.0
"""The limits that each project has by default: ARQs and device contexts."""

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import LIMIT_MARGIN, Arqs
from cyborg.conductor.contexts.device_contexts import DeviceContexts
from cyborg.core.errors import OverLimit
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.hosts.context_work import PROJECT, ContextEnv
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.unit.conductor.binding.test_limits import LIMIT, THREADS, run_together


def make_arqs(engine: sa.Engine, limit: int) -> Arqs:
    return Arqs(make_conf(conductor={"max_project_arqs": limit}), UnitOfWork(engine))


def test_concurrent_creates_of_arqs_stop_exactly_at_the_limit(engine: sa.Engine) -> None:
    rows.insert_profile(engine)
    # As of two conductors.
    conductors = [make_arqs(engine, LIMIT), make_arqs(engine, LIMIT)]

    def create(number: int) -> None:
        conductors[number % 2].create("fpga", PROJECT, PROJECT)

    refused = run_together(create)
    assert len(refused) == THREADS - LIMIT
    assert {error.details["used"] for error in refused} == {LIMIT}
    assert len(rows.read(engine, schema.arqs)) == LIMIT


def test_concurrent_creates_of_contexts_stop_exactly_at_the_limit(engine: sa.Engine) -> None:
    env = ContextEnv(engine)
    conf = make_conf(device_contexts={"max_per_project": LIMIT})
    conductors = [DeviceContexts(conf, UnitOfWork(engine), now=env.now) for _ in range(2)]

    def create(number: int) -> None:
        conductors[number % 2].create({"resources": {"FPGA": 1}}, PROJECT)

    refused = run_together(create)
    assert len(refused) == THREADS - LIMIT
    assert len(rows.read(engine, schema.device_contexts)) == LIMIT
    assert len(rows.read(engine, schema.arqs)) == LIMIT


def test_concurrent_creates_of_contexts_stop_at_the_limit_of_arqs(engine: sa.Engine) -> None:
    env = ContextEnv(engine)
    conf = make_conf(conductor={"max_project_arqs": LIMIT})
    contexts = DeviceContexts(conf, UnitOfWork(engine), now=env.now)

    def create(_: int) -> None:
        contexts.create({"resources": {"FPGA": 3}}, PROJECT)

    refused = run_together(create)
    assert len(refused) == THREADS - LIMIT // 3
    assert len(rows.read(engine, schema.arqs)) == LIMIT // 3 * 3


def test_create_far_from_the_limit_does_not_lock_the_project(sqlite_engine: sa.Engine) -> None:
    rows.insert_profile(sqlite_engine)
    arqs = make_arqs(sqlite_engine, LIMIT_MARGIN + 2)
    counts = []
    for _ in range(3):
        with count_statements(sqlite_engine) as found:
            arqs.create("fpga", PROJECT, PROJECT)
        counts.append(len([text for text in found.statements if "project_locks" in text]))
    # The third one finds no row to lock, inserts it, and locks it.
    assert counts == [0, 0, 3]


def test_create_without_a_limit_never_locks(sqlite_engine: sa.Engine) -> None:
    rows.insert_profile(sqlite_engine)
    arqs = make_arqs(sqlite_engine, -1)
    arqs.create("fpga", PROJECT, PROJECT)
    assert rows.read(sqlite_engine, schema.project_locks) == []
    with pytest.raises(OverLimit):
        make_arqs(sqlite_engine, 1).create("fpga", PROJECT, PROJECT)
