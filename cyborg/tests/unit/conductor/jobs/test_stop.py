# SPDX-License-Identifier: Apache-2.0
"""Jobs of a dispatcher that stops."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import TimedOut
from cyborg.db import schema
from cyborg.tests.fixtures.hosts.host_work import JobsEnv


def test_call_that_fails_while_the_dispatcher_stops_leaves_the_job_leased(
    sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop closes the connections: the failure says nothing about the agent."""
    env = JobsEnv(sqlite_engine)
    env.bind(env.add_card())

    def job(*_: Any) -> Any:
        env.jobs.stop()
        raise TimedOut("no answer")

    monkeypatch.setattr(env.agents, "job", job)
    env.jobs.run_once()
    with env.engine.connect() as connection:
        (stored,) = connection.execute(sa.select(schema.jobs))
    assert stored.error is None
    assert stored.owner is not None
    assert env.states() == {"BindStarted": 1}
