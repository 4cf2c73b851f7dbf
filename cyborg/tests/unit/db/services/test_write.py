# SPDX-License-Identifier: Apache-2.0
"""Tests of writing services."""

from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core.hosts import AGENT
from cyborg.db import schema
from cyborg.db.services import write as services
from cyborg.tests.fixtures.databases import rows

NOW = timeutils.utcnow()
LATER = NOW + timedelta(minutes=1)
TIMES: services.HeartbeatTimes = {"last_seen_at": LATER, "late_at": LATER, "down_at": LATER}
FIELDS: services.HeartbeatFields = {"status": "READY", "versions": {"rpc": "1"}}


def test_first_heartbeat_of_a_new_process_returns_the_stored_row(engine: sa.Engine) -> None:
    rows.insert_agent(engine, "one")
    epoch = str(uuid4())
    with engine.begin() as tx:
        previous = services.previous_incarnation(tx, AGENT, "one", epoch)
        assert previous is not None
        written = services.restart(tx, previous, epoch, TIMES, FIELDS)
        assert written is not None
        stored = services.find_agent(tx, "one")
    assert stored is not None
    assert {**written, "updated_at": None} == {**stored, "updated_at": None}
    assert (stored["epoch"], stored["generation"], stored["started_at"]) == (epoch, 0, LATER)


@pytest.mark.parametrize(
    "values",
    [
        {"epoch": str(uuid4())},
        {"generation": 7},
        {"digest": "b" * 64},
        {"down_since": NOW},
        {"desired_generation": 7},
    ],
    ids=lambda values: next(iter(values)),
)
def test_first_heartbeat_after_a_concurrent_change_changes_nothing(
    engine: sa.Engine, values: dict[str, object]
) -> None:
    rows.insert_agent(engine, "one")
    epoch = str(uuid4())
    with engine.begin() as tx:
        previous = services.previous_incarnation(tx, AGENT, "one", epoch)
    assert previous is not None
    with engine.begin() as tx:
        tx.execute(sa.update(schema.services).values(**values))
    before = rows.read(engine, schema.services)
    with engine.begin() as tx:
        assert services.restart(tx, previous, epoch, TIMES, FIELDS) is None
    assert rows.read(engine, schema.services) == before
