# SPDX-License-Identifier: Apache-2.0
"""Notifications: their content, who writes them, and delivery separate from Nova events."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_config import cfg
from oslo_context.context import RequestContext

from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.conductor.inventory.devices import Devices
from cyborg.conductor.notifications.notifications import (
    NOTIFICATION,
    NOVA_EVENT,
    NotificationBuilder,
)
from cyborg.conductor.notifications.outbox import BATCH, create_worker
from cyborg.core.errors import InUse, TimedOut
from cyborg.core.notification import OPTIONAL_FIELDS, SCHEMAS, Event, Schema
from cyborg.db import schema
from cyborg.db.binding import write as request_store
from cyborg.db.outbox import write as outbox
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.outbox import START, Env, env, sqlite_env
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["env", "sqlite_env"]


def options(*drivers: str) -> cfg.ConfigOpts:
    conf = make_conf()
    is_enabled(conf)
    conf.set_override("driver", list(drivers), group=GROUP)
    return conf


def make_builder(*drivers: str) -> NotificationBuilder:
    return NotificationBuilder(options(*(drivers or ("messagingv2",))), now=lambda: START)


def written(engine: sa.Engine) -> list[tuple[str, str, Mapping[str, Any]]]:
    return [
        (row["kind"], row["payload"]["event_type"], row["payload"]["payload"]["data"])
        for row in rows.read(engine, schema.outbox)
    ]


def test_message_has_subject_time_and_request_id() -> None:
    row: dict[str, Any] = {"uuid": "u", "name": "n", "description": None, "groups": [], "id": 7}
    RequestContext(request_id="req-x", overwrite=True)
    first, second = make_builder().build_messages(Event.PROFILE_CREATED, [row, row | {"uuid": "v"}])
    kind, subject, payload = first
    assert (kind, subject, second[1]) == (NOTIFICATION, "u", "v")
    body = payload["payload"]
    assert body["occurred_at"] == "2026-01-01T00:00:00.000000+00:00"
    assert body["request_id"] == "req-x"
    assert body["notification_id"] != second[2]["payload"]["notification_id"]


GOLDEN = json.loads((Path(__file__).parent / "golden" / "notifications-1.0.json").read_text())


def object_of(schema: Schema) -> dict[str, Any]:
    values = {"device_profile_group_id": 0, "groups": [{"resources:FPGA": "1"}]}
    return {name: values.get(name, f"the {name}") for name in schema.fields}


def schema_of(event: Event) -> Schema:
    return SCHEMAS[event.partition(".")[0]]


def test_build_messages_matches_golden() -> None:
    """A change of the golden messages requires a new version of the schema."""
    at = datetime(2026, 1, 2, 3, 4, 5, 678)
    RequestContext(request_id="req-1", overwrite=True)
    builder = NotificationBuilder(options("messagingv2"), now=lambda: at)
    built = []
    for event in Event:
        ((_, subject, message),) = builder.build_messages(event, [object_of(schema_of(event))])
        assert subject == "the uuid"
        built.append({**message, "payload": {**message["payload"], "notification_id": "the id"}})
    assert built == GOLDEN


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=lambda schema: schema.name)
def test_build_messages_requires_the_fields_of_the_schema(schema: Schema) -> None:
    event = next(event for event in Event if schema_of(event) is schema)
    for name in schema.fields:
        row = object_of(schema) | {"id": 7, "secret": "x"}
        ((_, _, message),) = make_builder().build_messages(event, [row], **{name: "common"})
        assert list(message["payload"]["data"]) == list(schema.fields)
        assert message["payload"]["data"][name] == "common"
        del row[name]
        if name in OPTIONAL_FIELDS:
            ((_, _, message),) = make_builder().build_messages(event, [row])
            assert message["payload"]["data"][name] is None
        else:
            with pytest.raises(KeyError, match=name):
                make_builder().build_messages(event, [row])


@pytest.mark.parametrize("driver", ["", "noop"])
def test_disabled_notifications_write_nothing(sqlite_engine: sa.Engine, driver: str) -> None:
    disabled_builder = make_builder(driver)
    assert not disabled_builder.enabled
    assert disabled_builder.build_messages(Event.BOUND, [{"not": "looked at"}]) == []
    card = rows.insert_card(sqlite_engine)
    (device,) = rows.read(sqlite_engine, schema.devices, id=card.device_id)
    uow = UnitOfWork(sqlite_engine)

    def work(builder: NotificationBuilder | None) -> list[str]:
        profiles, devices = (
            build(DeviceProfiles, uow, builder),
            build(Devices, uow, notifications=builder),
        )
        with count_statements(sqlite_engine) as count:
            profiles.create({"name": "p", "groups": [{"resources:FPGA": "1"}]})
            profiles.delete(["p"])
            devices.set_status(device["uuid"], "maintaining")
            devices.set_status(device["uuid"], "enabled")
        return count.statements

    assert work(disabled_builder) == work(None)
    assert rows.read(sqlite_engine, schema.outbox) == []


def test_profile_changes_are_notified(engine: sa.Engine) -> None:
    profiles = build(DeviceProfiles, UnitOfWork(engine), make_builder())
    groups = [{"resources:FPGA": "1"}]
    created = profiles.create({"name": "p", "groups": groups, "description": "d"})
    rows.insert_arq(engine, rows.insert_profile(engine, "used"))
    with pytest.raises(InUse):
        profiles.delete(["p", "used"])
    profiles.delete(["p"])
    data = {"uuid": created["uuid"], "name": "p", "description": "d", "groups": groups}
    assert written(engine) == [
        (NOTIFICATION, "device_profile.create.end", data),
        (NOTIFICATION, "device_profile.delete.end", data),
    ]


def test_device_status_changes_are_notified_once(engine: sa.Engine) -> None:
    card = rows.insert_card(engine)
    (device,) = rows.read(engine, schema.devices, id=card.device_id)
    devices = build(Devices, UnitOfWork(engine), notifications=make_builder())
    for status in ("maintaining", "maintaining", "enabled"):
        devices.set_status(device["uuid"], status)
    disabled, enabled = written(engine)
    assert [disabled[1], enabled[1]] == ["device.disable.end", "device.enable.end"]
    assert [disabled[2]["status"], enabled[2]["status"]] == ["maintaining", "enabled"]
    assert {disabled[2]["uuid"], enabled[2]["uuid"]} == {device["uuid"]}
    assert disabled[2]["hostname"] == "compute-1"


def test_arq_and_deployable_rows_have_all_payload_fields(engine: sa.Engine) -> None:
    """The rows read by bind, unbind and programming are sufficient."""
    builder = make_builder()
    card = rows.insert_card(engine)
    uuid = rows.insert_arq(engine, rows.insert_profile(engine))
    (deployable,) = rows.read(engine, schema.deployables, id=card.deployable_id)
    with engine.begin() as tx:
        requests = request_store.lock(tx, [uuid])
        failed = builder.build_messages(
            Event.BIND_FAILED, requests, state="BindFailed", error="no such card"
        )
        outbox.add_all(tx, [outbox.Message(NOVA_EVENT, "server", {"a": 1}), *failed])
        builder.record_program_started(tx, deployable["uuid"], "i")
        builder.record_program_finished(tx, deployable["uuid"], "i", succeeded=True, error=None)
        builder.record_program_finished(
            tx, deployable["uuid"], "i", succeeded=False, error="it is stuck"
        )
    messages = rows.read(engine, schema.outbox)
    assert messages[0]["kind"] == NOVA_EVENT
    assert (messages[1]["subject"], messages[1]["payload"]["priority"]) == (uuid, "ERROR")
    data = messages[1]["payload"]["payload"]["data"]
    assert (data["state"], data["error"]) == ("BindFailed", "no such card")
    assert (data["device_profile_name"], data["project_id"]) == ("fpga", "project-1")
    kinds = [row["payload"]["event_type"].rpartition(".")[2] for row in messages[2:]]
    assert kinds == ["start", "end", "error"]
    data = messages[-1]["payload"]["payload"]["data"]
    assert (data["rp_uuid"], data["hostname"]) == (card.provider, "compute-1")
    assert (data["image"], data["bitstream_id"], data["error"]) == ("i", None, "it is stuck")


class Listener:
    """Fake sender with configurable failures."""

    timeout = 1.0

    def __init__(self) -> None:
        self.unavailable = False
        self.broken: set[int] = set()
        self.sent: list[int] = []

    def send(self, messages: Sequence[Mapping[str, Any]]) -> list[str | None]:
        if self.unavailable:
            raise TimedOut("no broker")
        numbers = [message["n"] for message in messages]
        self.sent += [n for n in numbers if n not in self.broken]
        return ["broken" if n in self.broken else None for n in numbers]


def add_notifications(env: Env, *numbers: int, subject: str | None = None) -> None:
    messages = [outbox.Message(NOTIFICATION, subject or str(uuid4()), {"n": n}) for n in numbers]
    env.uow.run(lambda tx: outbox.add_all(tx, messages))
    make_due(env)


def make_due(env: Env) -> None:
    with env.engine.begin() as tx:
        tx.execute(sa.update(schema.outbox).values(next_try_at=env.clock.now()))


def test_outage_of_one_kind_does_not_delay_the_other(env: Env) -> None:
    listener = Listener()
    worker = create_worker(
        env.conf, env.uow, listener, now=env.clock.now, clock=env.clock.monotonic
    )
    listener.unavailable = True
    env.add_events("event")
    add_notifications(env, 1, 2)
    assert worker.run_once() == 0
    assert env.outbox.run_once() == 1
    assert [(row["kind"], row["attempts"]) for row in env.rows()] == [(NOTIFICATION, 1)] * 2
    assert {row["error"] for row in env.rows()} == {"no broker"}
    listener.unavailable = False
    env.nova.status = 503
    env.add_events("later")
    make_due(env)
    assert env.outbox.run_once() == 0
    assert worker.run_once() == 2
    assert sorted(listener.sent) == [1, 2]
    assert [row["payload"]["tag"] for row in env.rows()] == ["later"]


def test_failed_message_does_not_delay_other_subjects(sqlite_env: Env) -> None:
    listener = Listener()
    worker = create_worker(
        sqlite_env.conf,
        sqlite_env.uow,
        listener,
        now=sqlite_env.clock.now,
        clock=sqlite_env.clock.monotonic,
    )
    listener.broken = {0}
    add_notifications(sqlite_env, *range(BATCH + 3))
    assert worker.run_once() == BATCH + 2
    (row,) = sqlite_env.rows()
    assert (row["payload"], row["error"], row["attempts"]) == ({"n": 0}, "broken", 1)


def test_retry_delays_cover_a_long_outage(sqlite_env: Env) -> None:
    sqlite_env.conf.clear_override("outbox_attempts", group="conductor")
    listener = Listener()
    listener.unavailable = True
    worker = create_worker(
        sqlite_env.conf,
        sqlite_env.uow,
        listener,
        now=sqlite_env.clock.now,
        clock=sqlite_env.clock.monotonic,
    )
    add_notifications(sqlite_env, 1)
    while (row := sqlite_env.rows()[0])["state"] == "pending":
        sqlite_env.clock.seconds = (row["next_try_at"] - START).total_seconds()
        worker.run_once()
    assert row["attempts"] == sqlite_env.conf.conductor.outbox_attempts
    assert sqlite_env.clock.seconds >= 100 * 60
    assert isinstance(row["updated_at"], datetime)
