# SPDX-License-Identifier: Apache-2.0
"""Tests of the constraints of the schema, on every database."""

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_db.exception import DBDuplicateEntry, DBReferenceError
from oslo_utils import timeutils

from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows

Insert = Callable[[], Any]
SERVICE = {"binary": "cyborg-agent", "epoch": "e", "status": "READY"}


def _assert_unique(engine: sa.Engine, table: sa.Table, **values: Any) -> None:
    """Insert the same row twice and check that the second one is rejected."""
    rows.insert(engine, table, **values)
    with pytest.raises(DBDuplicateEntry):
        rows.insert(engine, table, **values)


def _device(**values: Any) -> dict[str, Any]:
    facts = {"backend": "b", "type": "GPU", "vendor": "v", "model": "m", "health": "ok"}
    boards: dict[str, Any] = {"std_board_info": {}, "vendor_board_info": {}}
    return {**facts, **boards, "setup_required": False, "reboot_required": False, **values}


def test_names_and_addresses_are_unique(engine: sa.Engine) -> None:
    now = timeutils.utcnow()
    times = {"started_at": now, **rows.heartbeat(now)}
    _assert_unique(engine, schema.services, host="h", **SERVICE, **times)
    _assert_unique(engine, schema.devices, **_device(host="h", address="0000:00:00.0"))
    rows.insert(engine, schema.devices, **_device(host="other", address="0000:00:00.0"))
    _assert_unique(engine, schema.device_profiles, name="p", groups=[])
    _assert_unique(engine, schema.providers, name="h_1", host="h")
    discovery = rows.insert_discovery(engine)
    row = {"discovery_id": discovery, "host": "h", "backend": "b", "state": "DONE"}
    _assert_unique(engine, schema.discovery_backends, **row)


def test_names_are_case_and_accent_sensitive(engine: sa.Engine) -> None:
    for name in ("gzip", "GZIP", "gzíp"):
        rows.insert(engine, schema.device_profiles, name=name, groups=[])
    profiles = rows.read(engine, schema.device_profiles, name="gzip")
    assert [row["name"] for row in profiles] == ["gzip"]


@pytest.mark.parametrize("column", ["name", "rp_uuid", "uuid"])
def test_deployable_has_a_unique_provider(engine: sa.Engine, column: str) -> None:
    card = rows.insert_card(engine, handles=0)
    (existing,) = rows.read(engine, schema.deployables)
    values = {
        "device_id": card.device_id,
        "host": existing["host"],
        "address": "a",
        "name": "free",
        "rp_uuid": "free",
        "resource_class": "FPGA",
        "traits": [],
        "attributes": {},
    }
    with pytest.raises(DBDuplicateEntry):
        rows.insert(engine, schema.deployables, **values | {column: existing[column]})


def test_handle_has_one_owner_and_owner_one_handle(engine: sa.Engine) -> None:
    card = rows.insert_card(engine, handles=2)
    first, second = rows.read(engine, schema.attach_handles)
    rows.insert_arq(engine, rows.insert_profile(engine))
    (request,) = rows.read(engine, schema.arqs)
    rows.update(engine, schema.attach_handles, first["id"], arq_id=request["id"])
    with pytest.raises(DBDuplicateEntry):
        rows.update(engine, schema.attach_handles, second["id"], arq_id=request["id"])
    with pytest.raises(DBDuplicateEntry):
        rows.insert(
            engine,
            schema.attach_handles,
            deployable_id=card.deployable_id,
            address=first["address"],
            type="PCI",
            info={},
        )


def test_null_owner_and_instance_are_not_unique(engine: sa.Engine) -> None:
    rows.insert_card(engine, handles=3)
    profile = rows.insert_profile(engine)
    for _ in range(3):
        rows.insert_arq(engine, profile)
    assert len(rows.read(engine, schema.attach_handles, arq_id=None)) == 3
    assert len(rows.read(engine, schema.arqs, instance_uuid=None)) == 3


def test_second_bind_of_an_instance_slot_is_rejected(engine: sa.Engine) -> None:
    profile = rows.insert_profile(engine)
    rows.insert_arq(engine, profile, instance_uuid="i", instance_slot=0)
    rows.insert_arq(engine, profile, instance_uuid="i", instance_slot=1)
    with pytest.raises(DBDuplicateEntry):
        rows.insert_arq(engine, profile, instance_uuid="i", instance_slot=0)


def test_row_in_use_cannot_be_deleted(engine: sa.Engine) -> None:
    card = rows.insert_card(engine, handles=1)
    profile = rows.insert_profile(engine)
    rows.insert_arq(engine, profile)
    (request,) = rows.read(engine, schema.arqs)
    (handle,) = rows.read(engine, schema.attach_handles)
    rows.update(engine, schema.attach_handles, handle["id"], arq_id=request["id"])
    for table, id_ in (
        (schema.device_profiles, profile),
        (schema.arqs, request["id"]),
        (schema.deployables, card.deployable_id),
        (schema.devices, card.device_id),
    ):
        with pytest.raises(DBReferenceError), engine.begin() as tx:
            tx.execute(sa.delete(table).where(table.c.id == id_))


def test_delete_cascades_to_dependent_rows(engine: sa.Engine) -> None:
    card = rows.insert_card(engine, handles=0)
    rows.insert(engine, schema.attributes, deployable_id=card.deployable_id, key="site", value="a")
    service = rows.insert_agent(engine)
    rows.insert(
        engine, schema.backends, service_id=service, name="b", driver="fake", status="READY"
    )
    with engine.begin() as tx:
        tx.execute(sa.delete(schema.devices))
        tx.execute(sa.delete(schema.services))
    for table in (schema.deployables, schema.attributes, schema.backends):
        assert rows.read(engine, table) == []


def test_times_keep_microseconds_and_texts_keep_unicode(engine: sa.Engine) -> None:
    now = timeutils.utcnow().replace(microsecond=123456)
    text = "größer 🚀 " * 20_000
    rows.insert(
        engine,
        schema.services,
        host="h",
        **SERVICE,
        started_at=now,
        **rows.heartbeat(now),
        versions={"🚀": [1, None, "x"]},
    )
    rows.insert(engine, schema.device_profiles, name="p", groups=[], description=text)
    (service,) = rows.read(engine, schema.services)
    assert service["last_seen_at"] == now
    assert service["versions"] == {"🚀": [1, None, "x"]}
    assert rows.read(engine, schema.device_profiles)[0]["description"] == text
