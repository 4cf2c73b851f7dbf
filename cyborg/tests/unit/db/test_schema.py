# SPDX-License-Identifier: Apache-2.0
"""What the tables themselves refuse, on every database: law 2 holds whatever the code does."""

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_db.exception import DBDuplicateEntry, DBReferenceError
from oslo_utils import timeutils

from cyborg.db import schema
from cyborg.fixtures import rows

Insert = Callable[[], Any]
SERVICE = {"binary": "cyborg-agent", "epoch": "e", "status": "READY"}


def _refused(engine: sa.Engine, table: sa.Table, **values: Any) -> None:
    """Put the same row in twice and see the second refused."""
    rows.insert(engine, table, **values)
    with pytest.raises(DBDuplicateEntry):
        rows.insert(engine, table, **values)


def _device(**values: Any) -> dict[str, Any]:
    facts = {"backend": "b", "type": "GPU", "vendor": "v", "model": "m", "health": "ok"}
    boards = {"std_board_info": {}, "vendor_board_info": {}}
    return {**facts, **boards, "setup_required": False, "reboot_required": False, **values}


def test_names_and_places_are_taken_once(engine: sa.Engine) -> None:
    now = timeutils.utcnow()
    moments = {"started_at": now, "last_seen_at": now}
    _refused(engine, schema.services, host="h", **SERVICE, **moments)
    _refused(engine, schema.devices, **_device(host="h", address="0000:00:00.0"))
    rows.insert(engine, schema.devices, **_device(host="other", address="0000:00:00.0"))
    _refused(engine, schema.device_profiles, name="p", groups=[])
    _refused(engine, schema.providers, name="h_1", host="h")
    part = {"uuid": "d", "host": "h", "backend": "b", "state": "DONE"}
    _refused(engine, schema.discoveries, **part)


def test_capitals_and_accents_make_another_name(engine: sa.Engine) -> None:
    for name in ("gzip", "GZIP", "gzíp"):
        rows.insert(engine, schema.device_profiles, name=name, groups=[])
    found = rows.read(engine, schema.device_profiles, name="gzip")
    assert [row["name"] for row in found] == ["gzip"]


@pytest.mark.parametrize("column", ["name", "rp_uuid", "uuid"])
def test_a_deployable_is_one_provider(engine: sa.Engine, column: str) -> None:
    card = rows.card(engine, handles=0)
    (taken,) = rows.read(engine, schema.deployables)
    values = {
        "device_id": card.device_id,
        "address": "a",
        "name": "free",
        "rp_uuid": "free",
        "resource_class": "FPGA",
        "traits": [],
        "attributes": {},
    }
    with pytest.raises(DBDuplicateEntry):
        rows.insert(engine, schema.deployables, **values | {column: taken[column]})


def test_a_handle_has_one_owner_and_an_owner_one_handle(engine: sa.Engine) -> None:
    card = rows.card(engine, handles=2)
    first, second = rows.read(engine, schema.attach_handles)
    rows.request(engine, rows.profile(engine))
    (request,) = rows.read(engine, schema.requests)
    rows.change(engine, schema.attach_handles, first["id"], request_id=request["id"])
    with pytest.raises(DBDuplicateEntry):
        rows.change(engine, schema.attach_handles, second["id"], request_id=request["id"])
    with pytest.raises(DBDuplicateEntry):
        rows.insert(
            engine,
            schema.attach_handles,
            deployable_id=card.deployable_id,
            address=first["address"],
            type="PCI",
            info={},
        )


def test_many_may_have_no_owner_and_no_instance(engine: sa.Engine) -> None:
    rows.card(engine, handles=3)
    profile = rows.profile(engine)
    for _ in range(3):
        rows.request(engine, profile)
    assert len(rows.read(engine, schema.attach_handles, request_id=None)) == 3
    assert len(rows.read(engine, schema.requests, instance_uuid=None)) == 3


def test_of_two_binds_for_one_instance_one_is_refused(engine: sa.Engine) -> None:
    profile = rows.profile(engine)
    rows.request(engine, profile, instance_uuid="i", instance_slot=0)
    rows.request(engine, profile, instance_uuid="i", instance_slot=1)
    with pytest.raises(DBDuplicateEntry):
        rows.request(engine, profile, instance_uuid="i", instance_slot=0)


def test_what_is_in_use_stays(engine: sa.Engine) -> None:
    card = rows.card(engine, handles=1)
    profile = rows.profile(engine)
    rows.request(engine, profile)
    (request,) = rows.read(engine, schema.requests)
    (handle,) = rows.read(engine, schema.attach_handles)
    rows.change(engine, schema.attach_handles, handle["id"], request_id=request["id"])
    for table, id_ in (
        (schema.device_profiles, profile),
        (schema.requests, request["id"]),
        (schema.deployables, card.deployable_id),
        (schema.devices, card.device_id),
    ):
        with pytest.raises(DBReferenceError), engine.begin() as tx:
            tx.execute(sa.delete(table).where(table.c.id == id_))


def test_what_belongs_to_something_goes_with_it(engine: sa.Engine) -> None:
    card = rows.card(engine, handles=0)
    rows.insert(engine, schema.attributes, deployable_id=card.deployable_id, key="site", value="a")
    service = rows.agent(engine)
    rows.insert(
        engine, schema.backends, service_id=service, name="b", driver="fake", status="READY"
    )
    with engine.begin() as tx:
        tx.execute(sa.delete(schema.devices))
        tx.execute(sa.delete(schema.services))
    for table in (schema.deployables, schema.attributes, schema.backends):
        assert rows.read(engine, table) == []


def test_moments_keep_their_microseconds_and_texts_their_signs(engine: sa.Engine) -> None:
    now = timeutils.utcnow().replace(microsecond=123456)
    text = "größer 🚀 " * 20_000
    rows.insert(
        engine,
        schema.services,
        host="h",
        **SERVICE,
        started_at=now,
        last_seen_at=now,
        versions={"🚀": [1, None, "x"]},
    )
    rows.insert(engine, schema.device_profiles, name="p", groups=[], description=text)
    (service,) = rows.read(engine, schema.services)
    assert service["last_seen_at"] == now
    assert service["versions"] == {"🚀": [1, None, "x"]}
    assert rows.read(engine, schema.device_profiles)[0]["description"] == text
