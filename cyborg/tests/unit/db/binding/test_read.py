# SPDX-License-Identifier: Apache-2.0
"""Tests of reading ARQs."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.db.binding import read as arqs
from cyborg.db.engine import Reader
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

KEYS = {
    "uuid",
    "state",
    "device_profile_name",
    "device_profile_group_id",
    "resource_class",
    "group",
    "project_id",
    "hostname",
    "device_rp_uuid",
    "instance_uuid",
    "attach_handle_type",
    "attach_handle_uuid",
    "attach_handle_info",
    "attached_at",
    "attach_error",
    "created_at",
    "updated_at",
}


def test_arq_has_the_handle_that_it_owns(engine: sa.Engine) -> None:
    rows.insert_card(engine, handles=2)
    profile = rows.insert_profile(engine)
    bare, owner = rows.insert_arq(engine, profile), rows.insert_arq(engine, profile)
    handle = rows.read(engine, schema.attach_handles)[1]
    owner_id = rows.read(engine, schema.arqs, uuid=owner)[0]["id"]
    rows.update(engine, schema.attach_handles, handle["id"], arq_id=owner_id)
    with Reader(engine).connect() as connection:
        arq = arqs.get(connection, owner)
        plain = arqs.get(connection, bare)
    assert arq is not None
    assert plain is not None
    assert set(arq) == set(plain) == KEYS
    assert arq["attach_handle_type"] == "TEST_PCI"
    assert arq["attach_handle_uuid"] == handle["uuid"]
    assert arq["attach_handle_info"] == handle["info"] != {}
    assert arq["group"] == dict(rows.GROUPS[0])
    assert (plain["attach_handle_type"], plain["attach_handle_uuid"]) == ("", None)
    assert plain["attach_handle_info"] == {}


def test_filters_combine(engine: sa.Engine) -> None:
    profile = rows.insert_profile(engine)
    bound = rows.insert_arq(engine, profile, instance_uuid="i", state="Bound")
    rows.insert_arq(engine, profile, instance_uuid="i", state="Initial", project_id="other")
    rows.insert_arq(engine, profile, instance_uuid="j", state="Bound")

    with Reader(engine).connect() as connection:

        def count(**filters: Any) -> int:
            return len(arqs.find(connection, **filters))

        assert count() == 3
        assert count(instance_uuid="i") == 2
        assert count(instance_uuid="i", states=["Bound"]) == 1
        assert count(states=["Bound", "Initial"]) == 3
        assert count(project_id="other") == 1
        assert count(project_id="other", instance_uuid="j") == 0
        assert count(uuids=[bound, "no-such-arq"]) == 1
        assert count(uuids=[]) == count(states=[]) == count(instance_uuid="") == 0
        assert arqs.get(connection, bound, "project-1") is not None
        assert arqs.get(connection, bound, "other") is None


@pytest.mark.parametrize("number", [1, 64])
def test_find_needs_one_statement(sqlite_engine: sa.Engine, number: int) -> None:
    profile = rows.insert_profile(sqlite_engine)
    for _ in range(number):
        rows.insert_arq(sqlite_engine, profile)
    with count_statements(sqlite_engine) as count, Reader(sqlite_engine).connect() as connection:
        assert len(arqs.find(connection)) == number
    assert len(count) == 1, count.statements
