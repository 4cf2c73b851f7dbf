# SPDX-License-Identifier: Apache-2.0
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.attributes import Attributes
from cyborg.core.errors import Conflict, Invalid, NotFound
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.read import attributes as read
from cyborg.db.read import deployables as read_deployables
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.hosts import Host, card, rooms


def deployable(engine: sa.Engine, host: str = "compute-1") -> str:
    made = rows.card(engine, host, handles=1)
    (row,) = rows.read(engine, schema.deployables, id=made.deployable_id)
    return str(row["uuid"])


def shown(engine: sa.Engine, uuid: str) -> dict[str, str]:
    """Return what readers see of a deployable's attributes."""
    with engine.connect() as connection:
        row = read_deployables.get(connection, uuid)
    assert row is not None
    return dict(row["attributes"])


def test_what_was_made_is_read_until_it_is_deleted(engine: sa.Engine) -> None:
    owner, attributes = deployable(engine), Attributes(UnitOfWork(engine))
    made = attributes.create(owner.upper(), "rack", "é 7")
    with engine.connect() as connection:
        (row,) = read.find(connection)
        assert read.get(connection, made["uuid"]) == row
    assert (row["deployable_uuid"], row["key"], row["value"]) == (owner, "rack", "é 7")
    assert {k: v for k, v in made.items() if k != "created_at"} == {
        k: v for k, v in row.items() if k != "created_at"
    }
    assert made["created_at"] == f"{row['created_at'].isoformat()}+00:00"
    assert shown(engine, owner) == {"rack": "é 7"}
    attributes.delete(made["uuid"])
    assert shown(engine, owner) == {}
    with pytest.raises(NotFound):
        attributes.delete(made["uuid"])


def test_a_key_is_given_once_to_a_deployable(engine: sa.Engine) -> None:
    first, second = deployable(engine), deployable(engine, "compute-2")
    attributes = Attributes(UnitOfWork(engine))
    attributes.create(first, "rack", "7")
    attributes.create(second, "rack", "8")
    attributes.create(first, "Rack", "9")
    with pytest.raises(Conflict, match="'rack' already"):
        attributes.create(first, "rack", "8")
    assert shown(engine, first) == {"rack": "7", "Rack": "9"}


def test_of_many_at_once_one_gives_it(engine: sa.Engine) -> None:
    owner, attributes = deployable(engine), Attributes(UnitOfWork(engine))

    def give(n: int) -> str | None:
        try:
            attributes.create(owner, "rack", str(n))
        except Conflict:
            return None
        return str(n)

    with ThreadPoolExecutor(8) as pool:
        given = [value for value in pool.map(give, range(8)) if value is not None]
    assert len(given) == 1
    assert shown(engine, owner) == {"rack": given[0]}


def test_of_nobody_nothing(engine: sa.Engine) -> None:
    attributes = Attributes(UnitOfWork(engine))
    with pytest.raises(NotFound, match="deployable_id"):
        attributes.create(str(uuid4()), "rack", "7")
    assert rows.read(engine, schema.attributes) == []


def test_the_cost_is_one_statement(sqlite_engine: sa.Engine) -> None:
    owner, attributes = deployable(sqlite_engine), Attributes(UnitOfWork(sqlite_engine))
    with counting(sqlite_engine) as statements:
        made = attributes.create(owner, "rack", "7")
    assert len(statements) == 1
    with counting(sqlite_engine) as statements:
        attributes.delete(made["uuid"])
    assert len(statements) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"deployable": "x"}, "deployable_id"),
        ({"deployable": None}, "deployable_id"),
        ({"key": ""}, "key"),
        ({"key": "k" * 256}, "key"),
        ({"key": "a\0b"}, "key"),
        ({"value": ""}, "value"),
        ({"value": 7}, "value"),
        ({"value": "\ud800"}, "value"),
    ],
)
def test_what_the_tables_cannot_hold(
    sqlite_engine: sa.Engine, changes: dict[str, Any], field: str
) -> None:
    wish = {"deployable": deployable(sqlite_engine), "key": "rack", "value": "7"} | changes
    with pytest.raises(Invalid) as raised:
        Attributes(UnitOfWork(sqlite_engine)).create(**wish)
    assert raised.value.details["field"] == field
    assert rows.read(sqlite_engine, schema.attributes) == []


def test_no_report_removes_what_the_operator_gave(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    host.tell(hosts, card())
    (part,) = rows.read(engine, schema.deployables)
    attributes = Attributes(UnitOfWork(engine))
    attributes.create(part["uuid"], "rack", "7")
    made = attributes.create(part["uuid"], "key", "the operator's")
    assert shown(engine, part["uuid"]) == {"key": "the operator's", "rack": "7"}
    host.tell(hosts, card(serial="S2"))
    host.tell(hosts, card(count=3))
    assert shown(engine, part["uuid"]) == {"key": "the operator's", "rack": "7"}
    attributes.delete(made["uuid"])
    assert shown(engine, part["uuid"]) == {"key": "value", "rack": "7"}
