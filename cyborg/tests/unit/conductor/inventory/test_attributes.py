# SPDX-License-Identifier: Apache-2.0
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.inventory.devices import Attributes
from cyborg.core.errors import Conflict, Invalid, NotFound
from cyborg.core.text import to_iso
from cyborg.db import schema
from cyborg.db.deployables import attributes as read
from cyborg.db.deployables import read as read_deployables
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.hosts.hosts import Host, card, make_hosts


def add_deployable(engine: sa.Engine, host: str = "compute-1") -> str:
    card = rows.insert_card(engine, host, handles=1)
    (row,) = rows.read(engine, schema.deployables, id=card.deployable_id)
    return str(row["uuid"])


def read_attributes(engine: sa.Engine, uuid: str) -> dict[str, str]:
    """Return the attributes of a deployable as the API reads them."""
    with engine.connect() as connection:
        row = read_deployables.get(connection, uuid)
    assert row is not None
    return dict(row["attributes"])


def test_created_attribute_is_visible_until_deleted(engine: sa.Engine) -> None:
    owner, attributes = add_deployable(engine), Attributes(UnitOfWork(engine))
    created = attributes.create(owner.upper(), "rack", "é 7")
    with engine.connect() as connection:
        (row,) = read.find(connection)
        assert read.get(connection, created["uuid"]) == row
    assert (row["deployable_uuid"], row["key"], row["value"]) == (owner, "rack", "é 7")
    assert {k: v for k, v in created.items() if k != "created_at"} == {
        k: v for k, v in row.items() if k != "created_at"
    }
    assert created["created_at"] == to_iso(row["created_at"])
    assert read_attributes(engine, owner) == {"rack": "é 7"}
    attributes.delete(created["uuid"])
    assert read_attributes(engine, owner) == {}
    with pytest.raises(NotFound):
        attributes.delete(created["uuid"])


def test_create_with_existing_key_raises_conflict(engine: sa.Engine) -> None:
    first, second = add_deployable(engine), add_deployable(engine, "compute-2")
    attributes = Attributes(UnitOfWork(engine))
    attributes.create(first, "rack", "7")
    attributes.create(second, "rack", "8")
    attributes.create(first, "Rack", "9")
    with pytest.raises(Conflict, match="already has an attribute 'rack'"):
        attributes.create(first, "rack", "8")
    assert read_attributes(engine, first) == {"rack": "7", "Rack": "9"}


def test_concurrent_creates_add_one_attribute(engine: sa.Engine) -> None:
    owner, attributes = add_deployable(engine), Attributes(UnitOfWork(engine))

    def create(n: int) -> str | None:
        try:
            attributes.create(owner, "rack", str(n))
        except Conflict:
            return None
        return str(n)

    with ThreadPoolExecutor(8) as pool:
        created = [value for value in pool.map(create, range(8)) if value is not None]
    assert len(created) == 1
    assert read_attributes(engine, owner) == {"rack": created[0]}


def test_create_for_unknown_deployable_raises_not_found(engine: sa.Engine) -> None:
    attributes = Attributes(UnitOfWork(engine))
    with pytest.raises(NotFound, match="deployable_id"):
        attributes.create(str(uuid4()), "rack", "7")
    assert rows.read(engine, schema.attributes) == []


def test_create_and_delete_execute_one_statement(sqlite_engine: sa.Engine) -> None:
    owner, attributes = add_deployable(sqlite_engine), Attributes(UnitOfWork(sqlite_engine))
    with count_statements(sqlite_engine) as statements:
        created = attributes.create(owner, "rack", "7")
    assert len(statements) == 1
    with count_statements(sqlite_engine) as statements:
        attributes.delete(created["uuid"])
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
def test_create_with_invalid_arguments_raises_invalid(
    sqlite_engine: sa.Engine, changes: dict[str, Any], field: str
) -> None:
    arguments = {"deployable": add_deployable(sqlite_engine), "key": "rack", "value": "7"} | changes
    with pytest.raises(Invalid) as raised:
        Attributes(UnitOfWork(sqlite_engine)).create(**arguments)
    assert raised.value.details["field"] == field
    assert rows.read(sqlite_engine, schema.attributes) == []


@pytest.mark.slow
def test_report_keeps_attributes_of_operators(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card())
    (deployable,) = rows.read(engine, schema.deployables)
    attributes = Attributes(UnitOfWork(engine))
    attributes.create(deployable["uuid"], "rack", "7")
    created = attributes.create(deployable["uuid"], "key", "the operator's")
    assert read_attributes(engine, deployable["uuid"]) == {"key": "the operator's", "rack": "7"}
    host.send(hosts, card(serial="S2"))
    host.send(hosts, card(count=3))
    assert read_attributes(engine, deployable["uuid"]) == {"key": "the operator's", "rack": "7"}
    attributes.delete(created["uuid"])
    assert read_attributes(engine, deployable["uuid"]) == {"key": "value", "rack": "7"}
