# SPDX-License-Identifier: Apache-2.0
"""Races of an ARQ that becomes UnbindFailed, or stops to be, on each of the real databases."""

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from cyborg.core.errors import WrongState
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.interleave import Race
from cyborg.tests.fixtures.hosts.host_work import JobsEnv

POINTS = ("FROM arqs WHERE arqs.job_id", "UPDATE arqs SET", "COMMIT")
points = pytest.mark.parametrize("at", POINTS)


class RaceEnv(JobsEnv):
    """An unbound ARQ whose release job has reached its deadline."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        self.card = self.add_card(handles=2, abilities=["sanitises"])
        self.arq = self.add_arq()
        self.bind(self.card, self.arq)
        self.agents.answers["release"] = "failed"
        self.arqs.unbind([{"request": self.arq}], None)
        self.jobs.run_once()
        self.advance(self.conf.conductor.release_timeout)

    def report(self, state: str) -> Callable[[], None]:
        """Return a call by which the agent reports the result of its job."""
        (job,) = rows.read(self.engine, schema.jobs, kind="release")
        error = "it broke" if state == "failed" else None
        return lambda: self.new_dispatcher().complete(job["uuid"], self.card.host, state, error)

    def arq_row(self) -> dict[str, object]:
        (row,) = rows.read(self.engine, schema.arqs)
        return row


@pytest.fixture
def env(engine: sa.Engine) -> RaceEnv:
    return RaceEnv(engine)


@points
def test_bind_concurrent_with_the_deadline(env: RaceEnv, at: str) -> None:
    race = Race(env.engine, env.report("failed"), at, lambda: env.bind(env.card, env.arq))
    assert race.reached
    assert race.first is None
    if race.second is None:
        assert env.states() == {"Bound": 1}
        assert env.handles() == {"dirty": 1, "owned": 1}
        assert env.arq_row()["job_id"] is None
    else:
        assert isinstance(race.second, WrongState)
        assert env.states() == {"UnbindFailed": 1}
        assert env.handles() == {"dirty": 1, "free": 1}


@points
def test_delete_concurrent_with_the_deadline(env: RaceEnv, at: str) -> None:
    race = Race(
        env.engine,
        env.report("failed"),
        at,
        lambda: env.arqs.delete([env.arq], None, None, allow_bound=False),
    )
    assert (race.reached, race.first, race.second) == (True, None, None)
    assert env.states() == {}
    assert env.open_jobs() == ["release"]
    assert env.handles() == {"dirty": 1, "free": 1}


@points
@pytest.mark.parametrize("first", ["failed", "done"])
def test_success_concurrent_with_the_deadline(env: RaceEnv, at: str, first: str) -> None:
    """Two conductors record two answers: whatever their order, the handle is clean at the end."""
    second = "done" if first == "failed" else "failed"
    race = Race(env.engine, env.report(first), at, env.report(second))
    assert (race.reached, race.first, race.second) == (True, None, None)
    assert env.states() == {"Unbound": 1}
    assert env.arq_row()["job_id"] is None
    assert env.handles() == {"free": 2}
    assert env.open_jobs() == []


@points
def test_delete_concurrent_with_the_end_of_the_cleaning(env: RaceEnv, at: str) -> None:
    env.report("failed")()
    assert env.states() == {"UnbindFailed": 1}
    race = Race(
        env.engine,
        env.report("done"),
        at,
        lambda: env.arqs.delete([env.arq], None, None, allow_bound=False),
    )
    assert (race.reached, race.first, race.second) == (True, None, None)
    assert env.states() == {}
    assert env.handles() == {"free": 2}
