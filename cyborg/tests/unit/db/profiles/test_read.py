# SPDX-License-Identifier: Apache-2.0
"""Tests of reading device profiles."""

from typing import Any

import sqlalchemy as sa

from cyborg.db import schema
from cyborg.db.engine import Reader
from cyborg.db.profiles import read as device_profiles
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements


def test_get_accepts_a_uuid_and_a_name(engine: sa.Engine) -> None:
    rows.insert_profile(engine, "fpga")
    (row,) = rows.read(engine, schema.device_profiles)
    # A name may look like a uuid; the uuid takes precedence.
    rows.insert_profile(engine, row["uuid"])
    with Reader(engine).connect() as connection:
        by_name = device_profiles.get(connection, "fpga")
        by_uuid = device_profiles.get(connection, row["uuid"])
        assert device_profiles.get(connection, "FPGA") is None
    assert by_name == by_uuid
    assert by_name is not None
    assert set(by_name) == {"uuid", "name", "description", "groups", "created_at", "updated_at"}
    assert by_name["groups"] == [dict(group) for group in rows.GROUPS]


def test_filters(engine: sa.Engine) -> None:
    for name in ("a", "b", "c"):
        rows.insert_profile(engine, name)
    uuids = {row["name"]: row["uuid"] for row in rows.read(engine, schema.device_profiles)}
    with count_statements(engine) as count, Reader(engine).connect() as connection:

        def names(**filters: Any) -> list[str]:
            return [row["name"] for row in device_profiles.find(connection, **filters)]

        assert names() == ["a", "b", "c"]
        assert names(names=["c", "a", "x"]) == ["a", "c"]
        assert names(names=[]) == []
        assert names(uuids=[uuids["b"]]) == ["b"]
        assert names(uuids=[uuids["b"]], names=["a"]) == []
    assert len(count) == 5
