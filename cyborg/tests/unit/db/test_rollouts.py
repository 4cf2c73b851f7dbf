# SPDX-License-Identifier: Apache-2.0
from typing import Any

import sqlalchemy as sa

from cyborg.core.drivers.desired_state import DesiredBackend, DesiredStatus
from cyborg.core.drivers.rollout import StepKey, StepState
from cyborg.db import schema
from cyborg.db.backends import desired as desired_backends
from cyborg.db.drivers import rollouts
from cyborg.tests.fixtures.databases import rows


def insert_owners(engine: sa.Engine, host: str, backend: str, count: int) -> list[str]:
    """Insert a device all of whose handles are owned; return the ARQs."""
    card = rows.insert_card(engine, host, handles=count, backend=backend)
    profile = rows.insert_profile(engine, f"{host}-{backend}")
    uuids = []
    for handle in rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id):
        uuids.append(rows.insert_arq(engine, profile))
        (arq,) = rows.read(engine, schema.arqs, uuid=uuids[-1])
        rows.update(engine, schema.attach_handles, handle["id"], arq_id=arq["id"])
    return uuids


def test_holders_of_other_backends_do_not_fill_the_limit(engine: sa.Engine) -> None:
    insert_owners(engine, "a", "y", 3)
    expected = insert_owners(engine, "b", "y", 3)
    expected += insert_owners(engine, "a1", "x", 1)
    with engine.begin() as tx:
        found = rollouts.holders(tx, [StepKey("a1", "x"), StepKey("a", "x"), StepKey("b", "y")], 3)
    assert len(found) == 3
    assert {row["uuid"] for row in found} <= set(expected)


def test_revert_keeps_the_desired_state_of_a_later_job(engine: sa.Engine) -> None:
    agent = rows.insert_agent(engine, "a")
    previous = DesiredBackend("y", "fake", DesiredStatus.ENABLED, 9)
    values = {"driver": "fake", "status": "enabled", "config": {"n": 1}, "generation": 5}
    rows.insert(engine, schema.desired_backends, service_id=agent, backend="y", **values)
    with engine.begin() as tx:
        assert not desired_backends.revert(tx, agent, "y", 4, previous)
        assert not desired_backends.revert(tx, agent, "y", 4, None)
    (row,) = rows.read(engine, schema.desired_backends)
    assert (row["generation"], row["config"]) == (5, {"n": 1})
    with engine.begin() as tx:
        assert desired_backends.revert(tx, agent, "y", 5, previous)
    (row,) = rows.read(engine, schema.desired_backends)
    assert (row["generation"], row["config"]) == (9, {})


def test_steps_follow_a_revert_and_keep_a_newer_generation(engine: sa.Engine) -> None:
    job: dict[str, Any] = {"kind": "update", "host": "", "subject": "fake", "arguments": {}}
    ids = []
    for state, generation in (("pending_agent", 4), ("done", 4), ("pending_agent", 5)):
        number = rows.insert(engine, schema.jobs, **job)
        step = {"job_id": number, "host": "a", "backend": "y", "state": state}
        ids.append(rows.insert(engine, schema.job_steps, generation=generation, **step))
    with engine.begin() as tx:
        rollouts.follow_revert(tx, "a", "y", 4, 7)
        rollouts.follow_revert(tx, "b", "y", 5, 7)
        rollouts.finish_step(tx, ids[0], 4, StepState.SKIPPED)
        rollouts.finish_step(tx, ids[2], 5, StepState.SKIPPED)
    found = [(row["state"], row["generation"]) for row in rows.read(engine, schema.job_steps)]
    assert found == [("pending_agent", 7), ("done", 4), ("skipped", 5)]
