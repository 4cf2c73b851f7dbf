# SPDX-License-Identifier: Apache-2.0
"""Guards of UPDATEs that hold without the locks and checks that the callers take before them.

The callers lock the row first, so a test of a whole operation does not reach these guards. Here two
connections execute only the UPDATE: the second waits for the first to commit, and must see its
change.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core.contexts.states import ContextState
from cyborg.db import schema
from cyborg.db.binding import claims as handle_claims
from cyborg.db.binding import project_units
from cyborg.db.contexts import write as device_contexts
from cyborg.db.device_sets import offers
from cyborg.db.providers import write as publishing
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.interleave import Race

NOW = timeutils.utcnow().replace(microsecond=0)
LATER = NOW + timedelta(seconds=60)
HOST = "compute-1"


def run_second_during_first(
    engine: sa.Engine,
    first: Callable[[sa.Connection], int],
    second: Callable[[sa.Connection], int],
) -> list[int]:
    """Start ``second`` before the commit of ``first``; return the results of both."""
    uow, results = UnitOfWork(engine), dict[str, int]()

    def run(name: str, work: Callable[[sa.Connection], int]) -> None:
        results[name] = uow.run(work)

    race = Race(engine, partial(run, "first", first), "COMMIT", partial(run, "second", second))
    assert (race.reached, race.waited) == (True, True)
    return [results["first"], results["second"]]


@pytest.mark.parametrize("count", [1, 3])
def test_claim_of_handles_that_a_concurrent_claim_takes_claims_none(
    engine: sa.Engine, count: int
) -> None:
    rows.insert_card(engine, handles=count)
    profile = rows.insert_profile(engine)
    for _ in range(2 * count):
        rows.insert_arq(engine, profile)
    arqs = [row["id"] for row in rows.read(engine, schema.arqs)]
    handles = [row["id"] for row in rows.read(engine, schema.attach_handles)]
    winners, losers = (dict(zip(handles, ids, strict=True)) for ids in (arqs[:count], arqs[count:]))
    claimed = run_second_during_first(
        engine,
        lambda tx: handle_claims.claim(tx, winners),
        lambda tx: handle_claims.claim(tx, losers),
    )
    assert claimed == [count, 0]
    owners = {row["id"]: row["arq_id"] for row in rows.read(engine, schema.attach_handles)}
    assert owners == winners


def add_context(engine: sa.Engine, epoch: int) -> int:
    """Insert a context with a lease, and return its id."""
    return rows.insert(
        engine,
        schema.device_contexts,
        state="reserved",
        groups=[],
        config_data={},
        hostname=HOST,
        epoch=epoch,
        lease_expires_at=LATER,
    )


def consume(tx: sa.Connection, context: int, instance: str, epoch: int) -> bool:
    return device_contexts.consume_lease(tx, context, ContextState.BOUND, instance, epoch, NOW)


def test_consume_of_a_lease_that_a_later_lease_replaces_changes_nothing(engine: sa.Engine) -> None:
    context, instance = add_context(engine, epoch=1), str(uuid4())

    def start_next_lease(tx: sa.Connection) -> bool:
        device_contexts.set_state(tx, [context], ContextState.UNBOUND, {"lease_expires_at": None})
        return device_contexts.start_lease(tx, context, ContextState.RESERVED, HOST, 2, LATER)

    results = run_second_during_first(
        engine, start_next_lease, partial(consume, context=context, instance=instance, epoch=1)
    )
    assert results == [True, False]
    (row,) = rows.read(engine, schema.device_contexts)
    assert (row["state"], row["epoch"], row["instance_uuid"]) == ("reserved", 2, None)
    assert UnitOfWork(engine).run(lambda tx: consume(tx, context, instance, epoch=2))
    (row,) = rows.read(engine, schema.device_contexts)
    assert (row["state"], row["instance_uuid"]) == ("bound", instance)


def test_ended_lease_is_neither_consumed_nor_renewed(engine: sa.Engine) -> None:
    context = add_context(engine, epoch=1)
    before = rows.read(engine, schema.device_contexts)

    def use(tx: sa.Connection) -> list[bool]:
        bound = ContextState.BOUND
        return [
            device_contexts.consume_lease(tx, context, bound, str(uuid4()), 1, LATER),
            device_contexts.renew_lease(tx, context, 1, LATER + timedelta(seconds=60), LATER),
        ]

    assert UnitOfWork(engine).run(use) == [False, False]
    assert rows.read(engine, schema.device_contexts) == before


def test_locked_project_counts_the_units_of_a_concurrent_create(engine: sa.Engine) -> None:
    profile, project = rows.insert_profile(engine), "project-1"
    rows.insert_arq(engine, profile, project_id=project)
    UnitOfWork(engine).run(lambda tx: project_units.insert_lock(tx, project))
    (arq,) = rows.read(engine, schema.arqs)
    values = {name: value for name, value in arq.items() if name != "id"}

    def count_then_create(tx: sa.Connection) -> int:
        assert project_units.lock(tx, project)
        units = project_units.count(tx, project, ["FPGA"], bound=False)
        tx.execute(sa.insert(schema.arqs).values(values | {"uuid": str(uuid4())}))
        return units["FPGA"]

    assert run_second_during_first(engine, count_then_create, count_then_create) == [1, 2]


def test_plan_waits_for_a_claim_that_changes_a_withdrawn_set(engine: sa.Engine) -> None:
    card = rows.insert_card(engine)
    (row,) = rows.read(engine, schema.providers, uuid=card.provider)
    revisions = {card.provider: row["revision"]}
    assert UnitOfWork(engine).run(lambda tx: offers.lock_current(tx, revisions)) == {card.provider}
    found = run_second_during_first(
        engine,
        lambda tx: publishing.mark_stale_existing(tx, [card.provider], NOW),
        lambda tx: len(offers.lock_current(tx, revisions)),
    )
    assert found == [1, 0]
