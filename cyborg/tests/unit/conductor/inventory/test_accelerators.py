# SPDX-License-Identifier: Apache-2.0
"""Labels of accelerators: who may change them, and their removal with the ARQ."""

import json
import logging
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.inventory.devices import Accelerators
from cyborg.core.errors import Invalid, NotFound, WrongState
from cyborg.db import schema
from cyborg.db.binding import accelerators as read
from cyborg.db.binding import claims as handle_claims
from cyborg.db.binding import write as store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.interleave import Race

OWN, OTHER = "project-1", "project-2"


@pytest.fixture
def handles(engine: sa.Engine) -> list[str]:
    """Two handles, the first one bound to an ARQ of project-1."""
    rows.insert_card(engine, handles=2)
    first, second = rows.read(engine, schema.attach_handles)
    rows.insert_arq(engine, rows.insert_profile(engine), state="Bound")
    (request,) = rows.read(engine, schema.arqs)
    rows.update(engine, schema.attach_handles, first["id"], arq_id=request["id"])
    return [first["uuid"], second["uuid"]]


def read_label(engine: sa.Engine, uuid: str) -> dict[str, Any]:
    with engine.connect() as connection:
        row = read.get(connection, uuid)
    assert row is not None
    return {name: row[name] for name in ("name", "description", "tags")}


def delete_arq(engine: sa.Engine) -> None:
    """Delete the ARQ and free its handle."""
    (request,) = rows.read(engine, schema.arqs)

    def work(tx: sa.Connection) -> None:
        (row,) = store.lock(tx, [request["uuid"]])
        handle_claims.release(tx, [row["id"]], timeutils.utcnow())
        assert store.delete(tx, [row["id"]]) == 1

    UnitOfWork(engine).run(work)


@pytest.mark.parametrize("scope", [OWN, None])
def test_update_sets_changes_and_removes_label(
    engine: sa.Engine, handles: list[str], scope: str | None
) -> None:
    accelerators = Accelerators(UnitOfWork(engine))
    label = {"name": "mine", "description": "d", "tags": ["é", "b"]}
    updated = accelerators.update(handles[0].upper(), label, scope)
    assert json.loads(json.dumps(updated)) == updated
    assert read_label(engine, handles[0]) == label == {name: updated[name] for name in label}
    assert updated["created_at"].endswith("+00:00")
    accelerators.update(handles[0], {"name": None}, scope)
    assert read_label(engine, handles[0]) == {**label, "name": None}
    accelerators.update(handles[0], {"tags": [], "description": None}, scope)
    assert read_label(engine, handles[0]) == {"name": None, "description": None, "tags": []}


def test_update_outside_scope_raises_not_found(engine: sa.Engine, handles: list[str]) -> None:
    accelerators = Accelerators(UnitOfWork(engine))
    bound, free = handles
    for uuid, scope in ((bound, OTHER), (bound, ""), (free, OWN), (str(uuid4()), OWN)):
        with pytest.raises(NotFound, match=uuid):
            accelerators.update(uuid, {"name": "n"}, scope)
    with pytest.raises(NotFound):
        accelerators.update(str(uuid4()), {"name": "n"}, None)
    with pytest.raises(WrongState, match="is not bound"):
        accelerators.update(free, {"name": "n"}, None)
    assert read_label(engine, bound)["name"] is None


def test_release_removes_label(engine: sa.Engine, handles: list[str]) -> None:
    Accelerators(UnitOfWork(engine)).update(handles[0], {"name": "secret", "tags": ["t"]}, OWN)
    delete_arq(engine)
    assert read_label(engine, handles[0]) == {"name": None, "description": None, "tags": []}


def test_update_concurrent_with_release_leaves_no_label(
    engine: sa.Engine, handles: list[str]
) -> None:
    accelerators = Accelerators(UnitOfWork(engine))
    race = Race(
        engine,
        lambda: accelerators.update(handles[0], {"name": "late"}, OWN),
        "UPDATE arqs",
        lambda: delete_arq(engine),
    )
    assert race.reached
    # Whether the update came first or the deletion: no label is left.
    assert race.first is None or isinstance(race.first, NotFound)
    assert read_label(engine, handles[0])["name"] is None


def test_update_changes_only_the_label(engine: sa.Engine, handles: list[str]) -> None:
    (old,) = rows.read(engine, schema.arqs)
    Accelerators(UnitOfWork(engine)).update(handles[0], {"name": "n"}, OWN)
    (new,) = rows.read(engine, schema.arqs)
    assert new == {**old, "label_name": "n"}


def test_update_logs_the_accelerator_and_the_arq_that_owns_it(
    engine: sa.Engine, handles: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (arq,) = rows.read(engine, schema.arqs)
    with caplog.at_level(logging.INFO, "cyborg.conductor.inventory.devices"):
        Accelerators(UnitOfWork(engine)).update(handles[0], {"name": "n"}, OWN)
    (record,) = (r for r in caplog.records if r.name.endswith(".devices"))
    fields: dict[str, Any] = record.extra  # type: ignore[attr-defined]
    assert (fields["accelerator"], fields["arq"]) == (handles[0], arq["uuid"])


def test_update_executes_two_statements(sqlite_engine: sa.Engine) -> None:
    rows.insert_card(sqlite_engine, handles=1)
    (handle,) = rows.read(sqlite_engine, schema.attach_handles)
    rows.insert_arq(sqlite_engine, rows.insert_profile(sqlite_engine), state="Bound")
    (request,) = rows.read(sqlite_engine, schema.arqs)
    rows.update(sqlite_engine, schema.attach_handles, handle["id"], arq_id=request["id"])
    with count_statements(sqlite_engine) as statements:
        Accelerators(UnitOfWork(sqlite_engine)).update(handle["uuid"], {"name": "n"}, OWN)
    assert len(statements) == 2


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("x", {"name": "n"}, OWN), "uuid"),
        ((str(uuid4()), {}, OWN), "body"),
        ((str(uuid4()), None, OWN), "body"),
        ((str(uuid4()), {"state": "free"}, OWN), "state"),
        ((str(uuid4()), {"name": "n"}, 7), "project_scope"),
    ],
)
def test_update_with_malformed_arguments_raises_invalid(
    sqlite_engine: sa.Engine, arguments: tuple[Any, Any, Any], field: str
) -> None:
    with pytest.raises(Invalid) as raised:
        Accelerators(UnitOfWork(sqlite_engine)).update(*arguments)
    assert raised.value.details["field"] == field
