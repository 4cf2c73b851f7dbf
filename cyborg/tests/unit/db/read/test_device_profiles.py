# SPDX-License-Identifier: Apache-2.0
"""Device profiles as the API shows them."""

import sqlalchemy as sa

from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.read import device_profiles
from cyborg.db.reader import Reader
from cyborg.fixtures import rows


def test_a_profile_is_found_by_uuid_and_by_name(engine: sa.Engine) -> None:
    rows.profile(engine, "fpga")
    (row,) = rows.read(engine, schema.device_profiles)
    # A name may look like a uuid; a uuid that is one wins.
    rows.profile(engine, row["uuid"])
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
        rows.profile(engine, name)
    uuids = {row["name"]: row["uuid"] for row in rows.read(engine, schema.device_profiles)}
    with counting(engine) as count, Reader(engine).connect() as connection:

        def names(**filters: object) -> list[str]:
            return [row["name"] for row in device_profiles.find(connection, **filters)]

        assert names() == ["a", "b", "c"]
        assert names(names=["c", "a", "x"]) == ["a", "c"]
        assert names(names=[]) == []
        assert names(uuids=[uuids["b"]]) == ["b"]
        assert names(uuids=[uuids["b"]], names=["a"]) == []
    assert len(count) == 5
