# SPDX-License-Identifier: Apache-2.0
"""How far devices under maintenance are drained, on all databases."""

from datetime import datetime, timedelta

import sqlalchemy as sa

from cyborg.db import schema
from cyborg.db.devices import read
from cyborg.db.devices.read import MAX_OWNERS
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

UNTIL = datetime(2030, 3, 1, 12)


def add_device(engine: sa.Engine, number: int, *, owned: int, dirty: int = 0) -> str:
    """Insert a device with a window, bound handles and dirty ones; return its uuid."""
    address = f"0000:{number:02}:00.0"
    card = rows.insert_card(engine, "compute-1", address, handles=owned + dirty + 1)
    (row,) = rows.read(engine, schema.devices, id=card.device_id)
    profile = rows.insert_profile(engine, f"profile-{number}")
    handles = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)
    for handle in handles[:owned]:
        uuid = rows.insert_arq(engine, profile, state="Bound")
        (arq,) = rows.read(engine, schema.arqs, uuid=uuid)
        rows.update(engine, schema.attach_handles, handle["id"], arq_id=arq["id"])
    for handle in handles[owned : owned + dirty]:
        rows.update(engine, schema.attach_handles, handle["id"], needs_cleaning=True)
    rows.insert(
        engine,
        schema.device_maintenances,
        device_uuid=row["uuid"],
        until=UNTIL + timedelta(hours=number),
        next_status="enabled",
    )
    return str(row["uuid"])


def test_drain_counts_all_handles_and_shows_the_first_owners(engine: sa.Engine) -> None:
    first = add_device(engine, 1, owned=MAX_OWNERS + 3, dirty=2)
    other = add_device(engine, 2, owned=2)
    empty = add_device(engine, 3, owned=0, dirty=1)
    with count_statements(engine) as one, engine.connect() as connection:
        shown = read.get(connection, first)
    with count_statements(engine) as many, engine.connect() as connection:
        found = {row["uuid"]: row["maintenance"] for row in read.find(connection)}
    assert len(one) == len(many)
    assert shown is not None
    assert shown["maintenance"] == found[first]
    counts = {
        uuid: (window["owned"], window["cleaning"], len(window["owners"]))
        for uuid, window in found.items()
        if window is not None
    }
    assert counts == {
        first: (MAX_OWNERS + 3, 2, MAX_OWNERS),
        other: (2, 0, 2),
        empty: (0, 1, 0),
    }
    window = found[first]
    assert window is not None
    bound = [row["uuid"] for row in rows.read(engine, schema.arqs)]
    assert [owner["arq"] for owner in window["owners"]] == bound[:MAX_OWNERS]
