# SPDX-License-Identifier: Apache-2.0
"""Labels: whose they are, and that they go with the one who gave them."""

import json
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.accelerators import Accelerators
from cyborg.core.errors import Invalid, NotFound, WrongState
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.read import accelerators as read
from cyborg.db.store import claims
from cyborg.db.store import requests as store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.interleave import Race

OWN, OTHER = "project-1", "project-2"


@pytest.fixture
def handles(engine: sa.Engine) -> list[str]:
    """Two handles, of which a request of project-1 holds the first."""
    rows.card(engine, handles=2)
    first, second = rows.read(engine, schema.attach_handles)
    rows.request(engine, rows.profile(engine), state="Bound")
    (request,) = rows.read(engine, schema.requests)
    rows.change(engine, schema.attach_handles, first["id"], request_id=request["id"])
    return [first["uuid"], second["uuid"]]


def shown(engine: sa.Engine, uuid: str) -> dict[str, Any]:
    with engine.connect() as connection:
        row = read.get(connection, uuid)
    assert row is not None
    return {name: row[name] for name in ("name", "description", "tags")}


def give_back(engine: sa.Engine) -> None:
    """Delete the one request, as those who hold an accelerator do in the end."""
    (request,) = rows.read(engine, schema.requests)

    def work(tx: sa.Connection) -> None:
        (row,) = store.lock(tx, [request["uuid"]])
        claims.release(tx, [row["id"]])
        assert store.delete(tx, [row["id"]]) == 1

    UnitOfWork(engine).run(work)


@pytest.mark.parametrize("scope", [OWN, None])
def test_a_label_is_given_changed_and_taken_away(
    engine: sa.Engine, handles: list[str], scope: str | None
) -> None:
    room = Accelerators(UnitOfWork(engine))
    label = {"name": "mine", "description": "d", "tags": ["é", "b"]}
    made = room.update(handles[0].upper(), label, scope)
    assert json.loads(json.dumps(made)) == made
    assert shown(engine, handles[0]) == label == {name: made[name] for name in label}
    assert made["created_at"].endswith("+00:00")
    room.update(handles[0], {"name": None}, scope)
    assert shown(engine, handles[0]) == {**label, "name": None}
    room.update(handles[0], {"tags": [], "description": None}, scope)
    assert shown(engine, handles[0]) == {"name": None, "description": None, "tags": []}


def test_others_do_not_learn_that_there_is_one(engine: sa.Engine, handles: list[str]) -> None:
    room = Accelerators(UnitOfWork(engine))
    held, free = handles
    for uuid, scope in ((held, OTHER), (held, ""), (free, OWN), (str(uuid4()), OWN)):
        with pytest.raises(NotFound, match=uuid):
            room.update(uuid, {"name": "n"}, scope)
    with pytest.raises(NotFound):
        room.update(str(uuid4()), {"name": "n"}, None)
    with pytest.raises(WrongState, match="held by nobody"):
        room.update(free, {"name": "n"}, None)
    assert shown(engine, held)["name"] is None


def test_the_label_goes_with_its_holder(engine: sa.Engine, handles: list[str]) -> None:
    Accelerators(UnitOfWork(engine)).update(handles[0], {"name": "secret", "tags": ["t"]}, OWN)
    give_back(engine)
    assert shown(engine, handles[0]) == {"name": None, "description": None, "tags": []}


def test_a_holder_that_leaves_meanwhile(engine: sa.Engine, handles: list[str]) -> None:
    room = Accelerators(UnitOfWork(engine))
    race = Race(
        engine,
        lambda: room.update(handles[0], {"name": "late"}, OWN),
        "UPDATE requests",
        lambda: give_back(engine),
    )
    assert race.met
    # Either it was labelled and left, or it had left: nobody is left with the label.
    assert race.first is None or isinstance(race.first, NotFound)
    assert shown(engine, handles[0])["name"] is None


def test_a_label_is_no_step_of_the_request(engine: sa.Engine, handles: list[str]) -> None:
    (before,) = rows.read(engine, schema.requests)
    Accelerators(UnitOfWork(engine)).update(handles[0], {"name": "n"}, OWN)
    (after,) = rows.read(engine, schema.requests)
    assert after == {**before, "label_name": "n"}


def test_the_cost(sqlite_engine: sa.Engine) -> None:
    rows.card(sqlite_engine, handles=1)
    (handle,) = rows.read(sqlite_engine, schema.attach_handles)
    rows.request(sqlite_engine, rows.profile(sqlite_engine), state="Bound")
    (request,) = rows.read(sqlite_engine, schema.requests)
    rows.change(sqlite_engine, schema.attach_handles, handle["id"], request_id=request["id"])
    with counting(sqlite_engine) as statements:
        Accelerators(UnitOfWork(sqlite_engine)).update(handle["uuid"], {"name": "n"}, OWN)
    assert len(statements) == 2


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("x", {"name": "n"}, OWN), "uuid"),
        ((str(uuid4()), {}, OWN), "body"),
        ((str(uuid4()), None, OWN), "body"),
        ((str(uuid4()), {"state": "free"}, OWN), "state"),
        ((str(uuid4()), {"name": "n"}, 7), "scope"),
    ],
)
def test_what_is_malformed(
    sqlite_engine: sa.Engine, arguments: tuple[Any, Any, Any], field: str
) -> None:
    with pytest.raises(Invalid) as raised:
        Accelerators(UnitOfWork(sqlite_engine)).update(*arguments)
    assert raised.value.details["field"] == field
