# SPDX-License-Identifier: Apache-2.0
"""Requests as the API shows them."""

import pytest
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.read import requests
from cyborg.db.reader import Reader
from cyborg.fixtures import rows

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
    "created_at",
    "updated_at",
}


def test_a_request_shows_the_handle_that_it_owns(engine: sa.Engine) -> None:
    rows.card(engine, handles=2)
    profile = rows.profile(engine)
    bare, owner = rows.request(engine, profile), rows.request(engine, profile)
    handle = rows.read(engine, schema.attach_handles)[1]
    owner_id = rows.read(engine, schema.requests, uuid=owner)[0]["id"]
    rows.change(engine, schema.attach_handles, handle["id"], request_id=owner_id)
    with Reader(engine).connect() as connection:
        found = requests.get(connection, owner)
        plain = requests.get(connection, bare)
    assert found is not None
    assert plain is not None
    assert set(found) == set(plain) == KEYS
    assert found["attach_handle_type"] == "TEST_PCI"
    assert found["attach_handle_uuid"] == handle["uuid"]
    assert found["attach_handle_info"] == handle["info"] != {}
    assert found["group"] == dict(rows.GROUPS[0])
    shown = [plain[f"attach_handle_{what}"] for what in ("type", "uuid", "info")]
    assert shown == ["", None, {}]


def test_filters_add_up(engine: sa.Engine) -> None:
    profile = rows.profile(engine)
    mine = rows.request(engine, profile, instance_uuid="i", state="Bound")
    rows.request(engine, profile, instance_uuid="i", state="Initial", project_id="other")
    rows.request(engine, profile, instance_uuid="j", state="Bound")

    with Reader(engine).connect() as connection:

        def count(**filters: object) -> int:
            return len(requests.find(connection, **filters))

        assert count() == 3
        assert count(instance_uuid="i") == 2
        assert count(instance_uuid="i", states=["Bound"]) == 1
        assert count(states=["Bound", "Initial"]) == 3
        assert count(project_id="other") == 1
        assert count(project_id="other", instance_uuid="j") == 0
        assert count(uuids=[mine, "nobody"]) == 1
        assert count(uuids=[]) == count(states=[]) == count(instance_uuid="") == 0
        assert requests.get(connection, mine, "project-1") is not None
        assert requests.get(connection, mine, "other") is None


@pytest.mark.parametrize("number", [1, 64])
def test_any_number_of_requests_is_one_statement(sqlite_engine: sa.Engine, number: int) -> None:
    profile = rows.profile(sqlite_engine)
    for _ in range(number):
        rows.request(sqlite_engine, profile)
    with counting(sqlite_engine) as count, Reader(sqlite_engine).connect() as connection:
        assert len(requests.find(connection)) == number
    assert len(count) == 1, count.statements
