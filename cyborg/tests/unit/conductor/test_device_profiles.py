# SPDX-License-Identifier: Apache-2.0
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.core.errors import Conflict, InUse, Invalid, NotFound
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows

GROUPS = [{"resources:FPGA": 2, "trait:CUSTOM_FAKE_DEVICE": "required"}]


@pytest.fixture
def profiles(engine: sa.Engine) -> DeviceProfiles:
    return DeviceProfiles(UnitOfWork(engine))


@pytest.fixture
def light(sqlite_engine: sa.Engine) -> DeviceProfiles:
    return DeviceProfiles(UnitOfWork(sqlite_engine))


def names(engine: sa.Engine) -> list[str]:
    return [row["name"] for row in rows.read(engine, schema.device_profiles)]


def test_a_profile_is_kept_with_strings_for_values(
    engine: sa.Engine, profiles: DeviceProfiles
) -> None:
    made = profiles.create({"name": "p", "groups": GROUPS, "description": "two of them"})
    (row,) = rows.read(engine, schema.device_profiles)
    assert made["groups"] == [{"resources:FPGA": "2", "trait:CUSTOM_FAKE_DEVICE": "required"}]
    assert made["created_at"].endswith("+00:00")
    assert made["updated_at"] is None
    assert {key: row[key] for key in ("uuid", "name", "description", "groups")} == {
        key: made[key] for key in ("uuid", "name", "description", "groups")
    }


@pytest.mark.parametrize(
    ("profile", "field"),
    [
        ({"name": "", "groups": GROUPS}, "name"),
        ({"name": "x" * 256, "groups": GROUPS}, "name"),
        ({"groups": GROUPS}, "name"),
        ({"name": "p", "groups": []}, "groups"),
        ({"name": "p", "groups": [{"resources:FPGA": 0}]}, "groups[0]['resources:FPGA']"),
        ({"name": "p", "groups": GROUPS, "uuid": "none"}, "uuid"),
        ({"name": "p", "groups": GROUPS, "description": 1}, "description"),
        ({"name": "p", "groups": GROUPS, "description": "x" * 4097}, "description"),
        ([], "body"),
    ],
)
def test_what_the_edge_let_through_is_checked_again(
    sqlite_engine: sa.Engine, light: DeviceProfiles, profile: Any, field: str
) -> None:
    with pytest.raises(Invalid) as raised:
        light.create(profile)
    assert raised.value.details["field"] == field
    assert names(sqlite_engine) == []


def test_a_name_and_a_uuid_are_given_once(engine: sa.Engine, profiles: DeviceProfiles) -> None:
    uuid = str(uuid4())
    profiles.create({"name": "p", "groups": GROUPS, "uuid": uuid})
    with pytest.raises(Conflict, match="name p exists") as raised:
        profiles.create({"name": "p", "groups": GROUPS})
    assert raised.value.details == {"field": "name"}
    with pytest.raises(Conflict, match=f"uuid {uuid} exists"):
        profiles.create({"name": "q", "groups": GROUPS, "uuid": uuid.upper()})
    assert names(engine) == ["p"]


def test_deleted_by_name_or_uuid_all_or_none(engine: sa.Engine, profiles: DeviceProfiles) -> None:
    made = [profiles.create({"name": name, "groups": GROUPS}) for name in "abcd"]
    with pytest.raises(NotFound, match="nobody") as raised:
        profiles.delete(["a", "nobody", made[1]["uuid"]])
    assert raised.value.details == {"unknown": ["nobody"]}
    assert names(engine) == ["a", "b", "c", "d"]
    profiles.delete(["a", "a", made[0]["uuid"], made[1]["uuid"]])
    assert names(engine) == ["c", "d"]


def test_a_uuid_goes_before_a_name_that_looks_like_it(
    sqlite_engine: sa.Engine, light: DeviceProfiles
) -> None:
    first = light.create({"name": "first", "groups": GROUPS})
    light.create({"name": first["uuid"], "groups": GROUPS})
    light.delete([first["uuid"]])
    assert names(sqlite_engine) == [first["uuid"]]


def test_a_profile_in_use_stays_with_all_named_beside_it(
    engine: sa.Engine, profiles: DeviceProfiles
) -> None:
    profiles.create({"name": "free", "groups": GROUPS})
    profile_id = rows.profile(engine, "used")
    for _ in range(3):
        rows.request(engine, profile_id)
    with pytest.raises(InUse, match="used by 3 accelerator requests") as raised:
        profiles.delete(["free", "used"])
    assert raised.value.details == {"requests": {"used": 3}}
    assert names(engine) == ["free", "used"]


@pytest.mark.parametrize("keys", [[], [""], [None]])
def test_deleting_nothing_is_a_mistake(light: DeviceProfiles, keys: list[Any]) -> None:
    with pytest.raises(Invalid):
        light.delete(keys)
