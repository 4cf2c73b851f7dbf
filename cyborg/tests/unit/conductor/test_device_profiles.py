# SPDX-License-Identifier: Apache-2.0
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.device_profiles import MAX_NAMED, DeviceProfiles
from cyborg.core.errors import Conflict, InUse, Invalid, NotFound
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build

GROUPS = [{"resources:FPGA": 2, "trait:CUSTOM_FAKE_DEVICE": "required"}]


@pytest.fixture
def profiles(engine: sa.Engine) -> DeviceProfiles:
    return build(DeviceProfiles, UnitOfWork(engine))


@pytest.fixture
def sqlite_profiles(sqlite_engine: sa.Engine) -> DeviceProfiles:
    return build(DeviceProfiles, UnitOfWork(sqlite_engine))


def names(engine: sa.Engine) -> list[str]:
    return [row["name"] for row in rows.read(engine, schema.device_profiles)]


def test_create_stores_values_as_strings(engine: sa.Engine, profiles: DeviceProfiles) -> None:
    created = profiles.create({"name": "p", "groups": GROUPS, "description": "two of them"})
    (row,) = rows.read(engine, schema.device_profiles)
    assert created["groups"] == [{"resources:FPGA": "2", "trait:CUSTOM_FAKE_DEVICE": "required"}]
    assert created["created_at"].endswith("+00:00")
    assert created["updated_at"] is None
    assert {key: row[key] for key in ("uuid", "name", "description", "groups")} == {
        key: created[key] for key in ("uuid", "name", "description", "groups")
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
def test_create_with_malformed_profile_raises_invalid(
    sqlite_engine: sa.Engine, sqlite_profiles: DeviceProfiles, profile: Any, field: str
) -> None:
    with pytest.raises(Invalid) as raised:
        sqlite_profiles.create(profile)
    assert raised.value.details["field"] == field
    assert names(sqlite_engine) == []


def test_create_with_existing_name_or_uuid_raises_conflict(
    engine: sa.Engine, profiles: DeviceProfiles
) -> None:
    uuid = str(uuid4())
    profiles.create({"name": "p", "groups": GROUPS, "uuid": uuid})
    with pytest.raises(Conflict, match="name p already exists") as raised:
        profiles.create({"name": "p", "groups": GROUPS})
    assert raised.value.details == {"field": "name"}
    with pytest.raises(Conflict, match=f"uuid {uuid} already exists"):
        profiles.create({"name": "q", "groups": GROUPS, "uuid": uuid.upper()})
    assert names(engine) == ["p"]


def test_delete_by_name_or_uuid_is_all_or_none(engine: sa.Engine, profiles: DeviceProfiles) -> None:
    created = [profiles.create({"name": name, "groups": GROUPS}) for name in "abcd"]
    with pytest.raises(NotFound, match="nobody") as raised:
        profiles.delete(["a", "nobody", created[1]["uuid"]])
    assert raised.value.details == {"unknown": ["nobody"]}
    assert names(engine) == ["a", "b", "c", "d"]
    profiles.delete(["a", "a", created[0]["uuid"], created[1]["uuid"]])
    assert names(engine) == ["c", "d"]


def test_delete_prefers_uuid_to_name(
    sqlite_engine: sa.Engine, sqlite_profiles: DeviceProfiles
) -> None:
    first = sqlite_profiles.create({"name": "first", "groups": GROUPS})
    sqlite_profiles.create({"name": first["uuid"], "groups": GROUPS})
    sqlite_profiles.delete([first["uuid"]])
    assert names(sqlite_engine) == [first["uuid"]]


def test_delete_of_profile_in_use_deletes_nothing(
    engine: sa.Engine, profiles: DeviceProfiles
) -> None:
    profiles.create({"name": "free", "groups": GROUPS})
    profile_id = rows.insert_profile(engine, "used")
    instance = str(uuid4())
    uuids = [
        rows.insert_arq(engine, profile_id, state="Bound", instance_uuid=instance),
        rows.insert_arq(engine, profile_id),
    ]
    with pytest.raises(InUse) as raised:
        profiles.delete(["free", "used"])
    assert raised.value.message == (
        f"device profile in use: used by 2 accelerator requests: {uuids[0]} (Bound, instance "
        f"{instance}), {uuids[1]} (Initial)"
    )
    assert raised.value.details == {"requests": {"used": 2}, "arqs": uuids}
    assert names(engine) == ["free", "used"]


def test_delete_of_profile_with_many_arqs_lists_the_first(
    sqlite_engine: sa.Engine, sqlite_profiles: DeviceProfiles
) -> None:
    profile_id = rows.insert_profile(sqlite_engine, "used")
    uuids = [rows.insert_arq(sqlite_engine, profile_id) for _ in range(MAX_NAMED + 2)]
    with pytest.raises(InUse, match=r"used by 12 accelerator requests: .*, 2 more$") as raised:
        sqlite_profiles.delete(["used"])
    assert raised.value.details["arqs"] == uuids[:MAX_NAMED]
    assert uuids[MAX_NAMED] not in raised.value.message


@pytest.mark.parametrize("keys", [[], [""], [None]])
def test_delete_without_keys_raises_invalid(
    sqlite_profiles: DeviceProfiles, keys: list[Any]
) -> None:
    with pytest.raises(Invalid):
        sqlite_profiles.delete(keys)
