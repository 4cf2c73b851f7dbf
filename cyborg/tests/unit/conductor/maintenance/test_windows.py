# SPDX-License-Identifier: Apache-2.0
"""Maintenance windows of devices, on all databases, with a fake clock."""

from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.inventory.devices import Devices
from cyborg.conductor.maintenance.windows import MaintenanceWindows
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.errors import Invalid, NotFound, WrongState
from cyborg.db import schema
from cyborg.db.devices import read
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.machine.options import make_conf

START = datetime(2026, 3, 1, 12)


class Env:
    """A device, and conductors with a fake clock."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine, self.now = engine, START
        self.card = rows.insert_card(engine)
        (row,) = rows.read(engine, schema.devices)
        self.device = row["uuid"]
        self.woken = 0
        conf = make_conf()
        is_enabled(conf)  # registers the options of notifications
        conf.set_override("driver", ["messagingv2"], group=GROUP)
        self.windows = self.make_windows(conf)
        notices = NotificationBuilder(conf, now=lambda: self.now)
        self.devices = build(Devices, UnitOfWork(engine), self.wake, notices, now=lambda: self.now)

    def make_windows(self, conf: Any) -> MaintenanceWindows:
        notices = NotificationBuilder(conf, now=lambda: self.now)
        return build(
            MaintenanceWindows,
            conf,
            UnitOfWork(self.engine),
            self.wake,
            notices,
            now=lambda: self.now,
        )

    def wake(self) -> None:
        self.woken += 1

    def begin(self, hours: float = 2, **values: Any) -> None:
        until = (self.now + timedelta(hours=hours)).isoformat()
        self.windows.begin({"uuid": self.device, "until": until, "user_id": "user-1"} | values)

    def show(self) -> dict[str, Any]:
        with self.engine.connect() as connection:
            row = read.get(connection, self.device)
        assert row is not None
        return dict(row)

    def status(self) -> tuple[str, bool]:
        row = self.show()
        return row["status"], row["maintenance"] is not None

    def revision(self) -> int:
        (row,) = rows.read(self.engine, schema.providers)
        return int(row["revision"])

    def events(self) -> list[str]:
        found = rows.read(self.engine, schema.outbox)
        return [row["payload"]["event_type"] for row in found]


@pytest.fixture
def env(engine: sa.Engine) -> Env:
    return Env(engine)


def test_begin_cordons_the_device_at_once_and_shows_the_window(env: Env) -> None:
    before = env.revision()
    env.begin(successor="auto")
    row = env.show()
    window = row["maintenance"]
    assert row["status"] == "maintaining"
    assert (window["until"], window["user_id"]) == (START + timedelta(hours=2), "user-1")
    assert (window["successor"], window["owned"], window["owners"]) == ("auto", 0, [])
    assert (env.revision(), env.woken) == (before + 1, 1)
    assert env.events() == ["device.maintenance.start"]


def test_window_ends_by_itself_once(env: Env) -> None:
    env.begin()
    env.now += timedelta(hours=2) - timedelta(seconds=1)
    assert env.windows.sweep() == 0
    assert env.status() == ("maintaining", True)
    env.now += timedelta(seconds=1)
    revision = env.revision()
    assert env.windows.sweep() == 1
    assert env.status() == ("enabled", False)
    assert env.revision() == revision + 1
    assert env.windows.sweep() == 0
    assert env.events() == ["device.maintenance.start", "device.maintenance.end"]


@pytest.mark.parametrize("when", ["before", "during"])
def test_disabled_device_stays_disabled_after_its_window(env: Env, when: str) -> None:
    if when == "before":
        env.devices.set_status(env.device, "maintaining")
    env.begin()
    if when == "during":
        env.devices.set_status(env.device, "maintaining")
    env.now += timedelta(hours=3)
    assert env.windows.sweep() == 1
    assert env.status() == ("maintaining", False)


def test_enable_ends_the_window(env: Env) -> None:
    env.begin()
    env.devices.set_status(env.device, "enabled")
    assert env.status() == ("enabled", False)
    assert set(env.events()[1:]) == {"device.maintenance.end", "device.enable.end"}
    env.now += timedelta(hours=3)
    assert env.windows.sweep() == 0


def test_extended_window_does_not_end_at_its_former_end(env: Env) -> None:
    env.begin(2)
    env.now += timedelta(hours=1)
    env.begin(4)
    env.now += timedelta(hours=2)
    assert env.windows.sweep() == 0
    assert env.status() == ("maintaining", True)
    assert env.show()["maintenance"]["since"] is not None
    assert env.events() == ["device.maintenance.start"]
    env.now += timedelta(hours=2)
    assert env.windows.sweep() == 1


def test_window_that_is_extended_after_it_was_found_due_does_not_end(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep of one conductor races with an operator who extends the window."""
    env.begin(1)
    env.now += timedelta(hours=2)
    end = env.windows._end_due

    def extend_first(tx: sa.Connection, device: str, now: datetime) -> bool:
        tx.execute(sa.update(schema.device_maintenances).values(until=now + timedelta(hours=1)))
        return end(tx, device, now)

    monkeypatch.setattr(env.windows, "_end_due", extend_first)
    assert env.windows.sweep() == 0
    assert env.status() == ("maintaining", True)


def test_end_without_window_raises(env: Env) -> None:
    with pytest.raises(WrongState, match="no maintenance window"):
        env.windows.end(env.device)
    env.begin()
    env.windows.end(env.device)
    assert env.status() == ("enabled", False)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"until": "2026-03-01T11:59:59"}, "until"),
        ({"until": "tomorrow"}, "until"),
        ({"until": "2036-03-01T12:00:00"}, "until"),
        ({"until": None}, "until"),
        ({"successor": "manual"}, "successor"),
        ({"uuid": "0000:01:00.0"}, "uuid"),
    ],
)
def test_bad_window_is_rejected(env: Env, values: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        env.begin(**values)
    assert caught.value.details["field"] == field
    assert env.status() == ("enabled", False)


def test_window_of_unknown_device_is_not_found(env: Env) -> None:
    unknown = str(uuid4())
    with pytest.raises(NotFound):
        env.begin(uuid=unknown)
    with pytest.raises(NotFound):
        env.windows.end(unknown)


def test_window_outlives_the_device_until_its_tombstone_is_gone(env: Env) -> None:
    """A card that is replaced during its window returns with the uuid of its tombstone."""
    env.begin()
    (row,) = rows.read(env.engine, schema.devices)
    with env.engine.begin() as tx:
        for table in (schema.attach_handles, schema.deployables, schema.devices):
            tx.execute(sa.delete(table))
    rows.insert(
        env.engine,
        schema.device_tombstones,
        uuid=env.device,
        host=row["host"],
        address=row["address"],
        status=row["status"],
        deployables={},
    )
    env.now += timedelta(hours=3)
    assert env.windows.sweep() == 0
    assert len(rows.read(env.engine, schema.device_maintenances)) == 1
    with env.engine.begin() as tx:
        tx.execute(sa.delete(schema.device_tombstones))
    assert env.windows.sweep() == 1
    assert rows.read(env.engine, schema.device_maintenances) == []


def test_device_that_returns_after_its_window_is_enabled(env: Env) -> None:
    env.begin()
    (row,) = rows.read(env.engine, schema.devices)
    with env.engine.begin() as tx:
        for table in (schema.attach_handles, schema.deployables, schema.providers, schema.devices):
            tx.execute(sa.delete(table))
    env.now += timedelta(hours=3)
    rows.insert_card(env.engine, uuid=env.device, status=row["status"])
    assert env.status() == ("maintaining", True)
    assert env.windows.sweep() == 1
    assert env.status() == ("enabled", False)
