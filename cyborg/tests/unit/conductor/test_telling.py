# SPDX-License-Identifier: Apache-2.0
"""What each step of a request writes for Nova and for listeners, in one statement."""

from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.requests import Requests
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.options import make_conf
from cyborg.rpc.notifier import GROUP, is_wanted


def requests(engine: sa.Engine, driver: str) -> Requests:
    conf = make_conf()
    is_wanted(conf)
    conf.set_override("driver", [driver], group=GROUP)
    return Requests(conf, UnitOfWork(engine))


def live(desk: Requests, card: rows.Card) -> tuple[str, str]:
    """Make a request, bind it, unbind it, bind it again, delete it."""
    (made,) = desk.create("fpga", "project-1")["arqs"]
    instance = str(uuid4())
    wish = {
        "request": made["uuid"],
        "hostname": card.host,
        "device_rp_uuid": card.provider,
        "instance_uuid": instance,
    }
    desk.patch([wish], "bind", None)
    desk.patch([{"request": made["uuid"]}], "unbind", None)
    desk.patch([wish], "bind", None)
    desk.delete(None, instance, None, True)
    return made["uuid"], instance


def test_a_life_of_a_request_is_told(engine: sa.Engine) -> None:
    card = rows.card(engine)
    rows.profile(engine)
    uuid, instance = live(requests(engine, "messagingv2"), card)
    found = rows.read(engine, schema.outbox)
    noun = "accelerator_request"
    assert [row["payload"].get("event_type", row["kind"]) for row in found] == [
        f"{noun}.create.end",
        "nova-event",
        f"{noun}.bind.end",
        f"{noun}.unbind.end",
        "nova-event",
        f"{noun}.bind.end",
        f"{noun}.delete.end",
    ]
    told = [row["payload"]["payload"]["data"] for row in found if row["kind"] == "notification"]
    assert {data["uuid"] for data in told} == {uuid}
    assert [data["state"] for data in told] == ["Initial", "Bound", "Unbound", "Bound", "Deleting"]
    assert [data["instance_uuid"] for data in told] == [None, *[instance] * 4]


@pytest.mark.parametrize("driver", ["messagingv2", ""])
def test_both_are_one_statement(sqlite_engine: sa.Engine, driver: str) -> None:
    card = rows.card(sqlite_engine)
    rows.profile(sqlite_engine)
    desk = requests(sqlite_engine, driver)
    with counting(sqlite_engine) as count:
        live(desk, card)
    inserts = [text for text in count.statements if text.startswith("INSERT INTO outbox")]
    assert len(inserts) == (5 if driver else 2)
