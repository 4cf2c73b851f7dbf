# SPDX-License-Identifier: Apache-2.0
"""Events of each step of an ARQ, for Nova and notification listeners, in one statement."""

from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.notifications.notifications import ArqEventRecorder, NotificationBuilder
from cyborg.db import schema
from cyborg.db.binding.write import lock
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.machine.options import make_notification_conf


def make_arqs(engine: sa.Engine, driver: str) -> Arqs:
    return Arqs(make_notification_conf(driver), UnitOfWork(engine))


def run_lifecycle(arqs: Arqs, card: rows.Card) -> tuple[str, str]:
    """Create an ARQ, bind it, unbind it, bind it again, delete it."""
    (created,) = arqs.create("fpga", "project-1")["arqs"]
    instance = str(uuid4())
    bind_item = {
        "request": created["uuid"],
        "hostname": card.host,
        "device_rp_uuid": card.provider,
        "instance_uuid": instance,
    }
    arqs.bind([bind_item], None)
    arqs.unbind([{"request": created["uuid"]}], None)
    arqs.bind([bind_item], None)
    arqs.delete(None, instance, None, True)
    return created["uuid"], instance


def test_arq_lifecycle_is_recorded(engine: sa.Engine) -> None:
    card = rows.insert_card(engine)
    rows.insert_profile(engine)
    uuid, instance = run_lifecycle(make_arqs(engine, "messagingv2"), card)
    messages = rows.read(engine, schema.outbox)
    prefix = "accelerator_request"
    assert [row["payload"].get("event_type", row["kind"]) for row in messages] == [
        f"{prefix}.create.end",
        f"{prefix}.bind.end",
        f"{prefix}.unbind.end",
        f"{prefix}.bind.end",
        f"{prefix}.delete.end",
    ]
    notifications = [
        row["payload"]["payload"]["data"] for row in messages if row["kind"] == "notification"
    ]
    assert {data["uuid"] for data in notifications} == {uuid}
    assert [data["state"] for data in notifications] == [
        "Initial",
        "Bound",
        "Unbound",
        "Bound",
        "Deleting",
    ]
    assert [data["instance_uuid"] for data in notifications] == [None, *[instance] * 4]


@pytest.mark.parametrize("send_events", [True, False])
@pytest.mark.parametrize("driver", ["messagingv2", ""])
def test_events_of_a_bind_are_one_statement(
    sqlite_engine: sa.Engine, driver: str, send_events: bool
) -> None:
    profile = rows.insert_profile(sqlite_engine)
    instance = str(uuid4())
    uuid = rows.insert_arq(sqlite_engine, profile, instance_uuid=instance)
    conf, uow = make_notification_conf(driver), UnitOfWork(sqlite_engine)
    conf.set_override("send_events", send_events, group="nova")
    recorder = ArqEventRecorder(conf, NotificationBuilder(conf, now=uow.clock))
    with count_statements(sqlite_engine) as count:
        uow.run(lambda tx: recorder.record_bound(tx, lock(tx, [uuid], None)))
    inserts = [text for text in count.statements if text.startswith("INSERT INTO outbox")]
    assert len(inserts) == bool(driver or send_events)
    events = rows.read(sqlite_engine, schema.outbox, kind="nova-event")
    expected = {
        "name": "accelerator-request-bound",
        "server_uuid": instance,
        "tag": uuid,
        "status": "completed",
    }
    assert [event["payload"] for event in events] == [expected] * send_events
    assert [(event["subject"], event["state"]) for event in events] == (
        [(instance, "pending")] * send_events
    )
