# SPDX-License-Identifier: Apache-2.0
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.inventory.devices import Devices
from cyborg.core.errors import Invalid, NotFound
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build


def test_set_status_marks_providers_stale_once(engine: sa.Engine) -> None:
    card, other = rows.insert_card(engine), rows.insert_card(engine, "compute-2")
    woken: list[None] = []
    devices = build(Devices, UnitOfWork(engine), lambda: woken.append(None))
    (device,) = rows.read(engine, schema.devices, id=card.device_id)
    for _ in range(2):
        devices.set_status(device["uuid"], "maintaining")
    assert [d["status"] for d in rows.read(engine, schema.devices)] == ["maintaining", "enabled"]
    revisions = {p["uuid"]: p["revision"] for p in rows.read(engine, schema.providers)}
    assert revisions == {card.provider: 2, other.provider: 1}
    assert len(woken) == 1
    devices.set_status(device["uuid"], "enabled")
    assert len(woken) == 2


def test_set_status_of_unknown_device_or_status_raises(engine: sa.Engine) -> None:
    rows.insert_card(engine)
    devices = build(Devices, UnitOfWork(engine))
    (device,) = rows.read(engine, schema.devices)
    with pytest.raises(NotFound):
        devices.set_status(str(uuid4()), "enabled")
    with pytest.raises(Invalid):
        devices.set_status("0000:01:00.0", "enabled")
    for status in ("broken", "", None):
        with pytest.raises(Invalid):
            devices.set_status(device["uuid"], status)  # type: ignore[arg-type]
