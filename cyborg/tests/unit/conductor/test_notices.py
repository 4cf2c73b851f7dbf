# SPDX-License-Identifier: Apache-2.0
"""What is written for listeners, by whom, and that it is sent apart from Nova's events."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_config import cfg
from oslo_context.context import RequestContext

from cyborg.conductor.delivery import BATCH
from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.conductor.devices import Devices
from cyborg.conductor.events import EVENT
from cyborg.conductor.notices import NOTIFICATION, Notices, delivery
from cyborg.core.errors import InUse, TimedOut
from cyborg.core.notification import Event
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.store import outbox
from cyborg.db.store import requests as request_store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.options import make_conf
from cyborg.fixtures.outbox import START, Bed, bed, light
from cyborg.rpc.notifier import GROUP, is_wanted

__all__ = ["bed", "light"]


def options(*drivers: str) -> cfg.ConfigOpts:
    conf = make_conf()
    is_wanted(conf)
    conf.set_override("driver", list(drivers), group=GROUP)
    return conf


def notices(*drivers: str) -> Notices:
    return Notices(options(*(drivers or ("messagingv2",))), now=lambda: START)


def written(engine: sa.Engine) -> list[tuple[str, str, Mapping[str, Any]]]:
    return [
        (row["kind"], row["payload"]["event_type"], row["payload"]["payload"]["data"])
        for row in rows.read(engine, schema.outbox)
    ]


def test_a_message_tells_what_when_and_who_asked() -> None:
    row = {"uuid": "u", "name": "n", "description": None, "groups": [], "id": 7}
    RequestContext(request_id="req-x", overwrite=True)
    first, second = notices().rows(Event.PROFILE_CREATED, [row, row | {"uuid": "v"}])
    kind, subject, payload = first
    assert (kind, subject, second[1]) == (NOTIFICATION, "u", "v")
    inner = payload["payload"]
    assert (inner["occurred_at"], inner["request_id"]) == ("2026-01-01T00:00:00+00:00", "req-x")
    assert inner["notification_id"] != second[2]["payload"]["notification_id"]


@pytest.mark.parametrize("driver", ["", "noop"])
def test_with_nobody_to_tell_nothing_is_written(sqlite_engine: sa.Engine, driver: str) -> None:
    silent = notices(driver)
    assert not silent.enabled
    assert silent.rows(Event.BOUND, [{"not": "looked at"}]) == []
    card = rows.card(sqlite_engine)
    (device,) = rows.read(sqlite_engine, schema.devices, id=card.device_id)
    uow = UnitOfWork(sqlite_engine)

    def work(its: Notices | None) -> list[str]:
        profiles, devices = DeviceProfiles(uow, its), Devices(uow, notices=its)
        with counting(sqlite_engine) as count:
            profiles.create({"name": "p", "groups": [{"resources:FPGA": "1"}]})
            profiles.delete(["p"])
            devices.set_status(device["uuid"], "maintaining")
            devices.set_status(device["uuid"], "enabled")
        return count.statements

    assert work(silent) == work(None)
    assert rows.read(sqlite_engine, schema.outbox) == []


def test_profiles_tell_of_themselves(engine: sa.Engine) -> None:
    profiles = DeviceProfiles(UnitOfWork(engine), notices())
    groups = [{"resources:FPGA": "1"}]
    made = profiles.create({"name": "p", "groups": groups, "description": "d"})
    rows.request(engine, rows.profile(engine, "used"))
    with pytest.raises(InUse):
        profiles.delete(["p", "used"])
    profiles.delete(["p"])
    data = {"uuid": made["uuid"], "name": "p", "description": "d", "groups": groups}
    assert written(engine) == [
        (NOTIFICATION, "device_profile.create.end", data),
        (NOTIFICATION, "device_profile.delete.end", data),
    ]


def test_devices_tell_of_themselves_once(engine: sa.Engine) -> None:
    card = rows.card(engine)
    (device,) = rows.read(engine, schema.devices, id=card.device_id)
    devices = Devices(UnitOfWork(engine), notices=notices())
    for status in ("maintaining", "maintaining", "enabled"):
        devices.set_status(device["uuid"], status)
    disabled, enabled = written(engine)
    assert [disabled[1], enabled[1]] == ["device.disable.end", "device.enable.end"]
    assert [disabled[2]["status"], enabled[2]["status"]] == ["maintaining", "enabled"]
    assert {disabled[2]["uuid"], enabled[2]["uuid"]} == {device["uuid"]}
    assert disabled[2]["hostname"] == "compute-1"


def test_rows_of_requests_and_deployables_have_what_is_told(engine: sa.Engine) -> None:
    """The rows that binding, unbinding and programming have at hand are enough."""
    its = notices()
    card = rows.card(engine)
    uuid = rows.request(engine, rows.profile(engine))
    (deployable,) = rows.read(engine, schema.deployables, id=card.deployable_id)
    with engine.begin() as tx:
        requests = request_store.lock(tx, [uuid])
        failed = its.rows(Event.BIND_FAILED, requests, state="BindFailed", error="no such card")
        outbox.add_all(tx, [(EVENT, "server", {"a": 1}), *failed])
        its.programming(tx, deployable["uuid"], "i")
        its.programmed(tx, deployable["uuid"], "i", good=True, error=None)
        its.programmed(tx, deployable["uuid"], "i", good=False, error="it is stuck")
    found = rows.read(engine, schema.outbox)
    assert found[0]["kind"] == EVENT
    assert (found[1]["subject"], found[1]["payload"]["priority"]) == (uuid, "ERROR")
    data = found[1]["payload"]["payload"]["data"]
    assert (data["state"], data["error"]) == ("BindFailed", "no such card")
    assert (data["device_profile_name"], data["project_id"]) == ("fpga", "project-1")
    told = [row["payload"]["event_type"].rpartition(".")[2] for row in found[2:]]
    assert told == ["start", "end", "error"]
    data = found[-1]["payload"]["payload"]["data"]
    assert (data["rp_uuid"], data["hostname"]) == (card.provider, "compute-1")
    assert (data["image"], data["bitstream_id"], data["error"]) == ("i", None, "it is stuck")


class Listener:
    """A way to listeners that does as it is told."""

    seconds = 1.0

    def __init__(self) -> None:
        self.away = False
        self.broken: set[int] = set()
        self.sent: list[int] = []

    def send(self, messages: Sequence[Mapping[str, Any]]) -> list[str | None]:
        if self.away:
            raise TimedOut("nobody there")
        numbers = [message["n"] for message in messages]
        self.sent += [n for n in numbers if n not in self.broken]
        return ["broken" if n in self.broken else None for n in numbers]


def note(bed: Bed, *numbers: int, subject: str | None = None) -> None:
    messages = [(NOTIFICATION, subject or str(uuid4()), {"n": n}) for n in numbers]
    bed.uow.run(lambda tx: outbox.add_all(tx, messages))
    due(bed)


def due(bed: Bed) -> None:
    with bed.engine.begin() as tx:
        tx.execute(sa.update(schema.outbox).values(next_try_at=bed.clock.now()))


def test_each_kind_has_its_own_way(bed: Bed) -> None:
    listener = Listener()
    telling = delivery(bed.conf, bed.uow, listener, now=bed.clock.now, clock=bed.clock.monotonic)
    listener.away = True
    bed.promise("event")
    note(bed, 1, 2)
    assert telling.run_once() == 0
    assert bed.outbox.run_once() == 1
    assert [(row["kind"], row["attempts"]) for row in bed.rows()] == [(NOTIFICATION, 1)] * 2
    assert {row["error"] for row in bed.rows()} == {"nobody there"}
    listener.away = False
    bed.nova.status = 503
    bed.promise("later")
    due(bed)
    assert bed.outbox.run_once() == 0
    assert telling.run_once() == 2
    assert sorted(listener.sent) == [1, 2]
    assert [row["payload"]["tag"] for row in bed.rows()] == ["later"]


def test_one_that_cannot_be_sent_keeps_no_other_subject(light: Bed) -> None:
    listener = Listener()
    telling = delivery(
        light.conf, light.uow, listener, now=light.clock.now, clock=light.clock.monotonic
    )
    listener.broken = {0}
    note(light, *range(BATCH + 3))
    assert telling.run_once() == BATCH + 2
    (row,) = light.rows()
    assert (row["payload"], row["error"], row["attempts"]) == ({"n": 0}, "broken", 1)


def test_pauses_grow_to_those_of_a_long_outage(light: Bed) -> None:
    light.conf.clear_override("outbox_attempts", group="conductor")
    listener = Listener()
    listener.away = True
    telling = delivery(
        light.conf, light.uow, listener, now=light.clock.now, clock=light.clock.monotonic
    )
    note(light, 1)
    while (row := light.rows()[0])["state"] == "pending":
        light.clock.seconds = (row["next_try_at"] - START).total_seconds()
        telling.run_once()
    assert row["attempts"] == light.conf.conductor.outbox_attempts
    assert light.clock.seconds >= 100 * 60
    assert isinstance(row["updated_at"], datetime)
