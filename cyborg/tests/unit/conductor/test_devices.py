# SPDX-License-Identifier: Apache-2.0
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.devices import Devices
from cyborg.core.errors import Invalid, NotFound
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows


def test_a_status_is_set_once_and_its_providers_are_stale(engine: sa.Engine) -> None:
    mine, other = rows.card(engine), rows.card(engine, "compute-2")
    woken: list[None] = []
    devices = Devices(UnitOfWork(engine), lambda: woken.append(None))
    (device,) = rows.read(engine, schema.devices, id=mine.device_id)
    for _ in range(2):
        devices.set_status(device["uuid"], "maintaining")
    assert [d["status"] for d in rows.read(engine, schema.devices)] == ["maintaining", "enabled"]
    revisions = {p["uuid"]: p["revision"] for p in rows.read(engine, schema.providers)}
    assert revisions == {mine.provider: 2, other.provider: 1}
    assert len(woken) == 1
    devices.set_status(device["uuid"], "enabled")
    assert len(woken) == 2


def test_unknown_devices_and_states_are_refused(engine: sa.Engine) -> None:
    rows.card(engine)
    devices = Devices(UnitOfWork(engine))
    (device,) = rows.read(engine, schema.devices)
    with pytest.raises(NotFound):
        devices.set_status(str(uuid4()), "enabled")
    with pytest.raises(Invalid):
        devices.set_status("0000:01:00.0", "enabled")
    for status in ("broken", "", None):
        with pytest.raises(Invalid):
            devices.set_status(device["uuid"], status)  # type: ignore[arg-type]
