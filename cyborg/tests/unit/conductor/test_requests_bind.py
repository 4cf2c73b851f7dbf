# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.requests import Requests
from cyborg.core.errors import Conflict, Invalid, NoHandle, NotFound, WrongState
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.store import claims
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.options import make_conf

INSTANCE = str(uuid4())


class Bed:
    """Requests on a database with one profile."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.woken = 0
        self.conf = make_conf()
        self.requests = Requests(self.conf, UnitOfWork(engine), self.wake)
        self.profile = rows.profile(engine)

    def wake(self) -> None:
        self.woken += 1

    def make(self, **values: Any) -> str:
        return rows.request(self.engine, self.profile, **values)

    def bind(self, card: rows.Card, *uuids: str, scope: str | None = None, **changed: Any) -> None:
        self.requests.patch([wish(card, uuid, **changed) for uuid in uuids], "bind", scope)

    def request(self, uuid: str) -> dict[str, Any]:
        (row,) = rows.read(self.engine, schema.requests, uuid=uuid)
        return row

    def handles(self, uuid: str) -> list[dict[str, Any]]:
        return rows.read(self.engine, schema.attach_handles, request_id=self.request(uuid)["id"])

    def untouched(self, *uuids: str) -> bool:
        return all(
            self.request(uuid)["state"] == "Initial"
            and self.request(uuid)["instance_uuid"] is None
            and self.handles(uuid) == []
            for uuid in uuids
        )


def wish(card: rows.Card, uuid: str, **changed: Any) -> dict[str, Any]:
    return {
        "request": uuid,
        "hostname": card.host,
        "device_rp_uuid": card.provider,
        "instance_uuid": INSTANCE,
    } | changed


@pytest.fixture
def bed(engine: sa.Engine) -> Bed:
    return Bed(engine)


@pytest.fixture
def light(sqlite_engine: sa.Engine) -> Bed:
    """A bed on one database, for what no database does its own way."""
    return Bed(sqlite_engine)


def test_a_bound_request_owns_a_handle_and_nova_is_told(bed: Bed) -> None:
    card, uuid = rows.card(bed.engine), bed.make()
    bed.bind(card, uuid, scope="project-1")
    row = bed.request(uuid)
    assert (row["state"], row["hostname"], row["device_rp_uuid"], row["instance_uuid"]) == (
        "Bound",
        card.host,
        card.provider,
        INSTANCE,
    )
    assert row["project_id"] == "project-1"
    assert row["updated_at"] is not None
    assert len(bed.handles(uuid)) == 1
    (event,) = rows.read(bed.engine, schema.outbox)
    assert (event["kind"], event["subject"], event["state"]) == ("nova-event", INSTANCE, "pending")
    assert event["payload"] == {
        "name": "accelerator-request-bound",
        "server_uuid": INSTANCE,
        "tag": uuid,
        "status": "completed",
    }
    assert bed.woken == 1


def test_without_nova_nothing_is_promised(light: Bed) -> None:
    light.conf.set_override("notify", False, group="nova")
    light.bind(rows.card(light.engine), light.make())
    assert rows.read(light.engine, schema.outbox) == []
    assert light.woken == 0


def test_the_same_bind_again_changes_nothing(bed: Bed) -> None:
    card, uuids = rows.card(bed.engine), [bed.make(), bed.make()]
    bed.bind(card, *uuids)
    before = [bed.request(uuid) for uuid in uuids]
    bed.bind(card, *uuids)
    bed.bind(card, uuids[1])
    assert [bed.request(uuid) for uuid in uuids] == before
    assert len(rows.read(bed.engine, schema.outbox)) == 2
    assert bed.woken == 1


def test_the_rest_of_a_batch_may_follow(light: Bed) -> None:
    card, uuids = rows.card(light.engine), [light.make() for _ in range(3)]
    light.bind(card, *uuids[:2])
    light.bind(card, *uuids)
    assert [light.request(uuid)["instance_slot"] for uuid in uuids] == [0, 1, 2]


def test_over_several_providers(bed: Bed) -> None:
    fpga = rows.card(bed.engine, address="0000:01:00.0", handles=2)
    gpu = rows.card(bed.engine, address="0000:02:00.0", handles=1, resource_class="PGPU")
    uuids = [bed.make(), bed.make(), bed.make(resource_class="PGPU", group={"resources:PGPU": "1"})]
    bed.requests.patch(
        [wish(fpga, uuids[0]), wish(gpu, uuids[2]), wish(fpga, uuids[1])], "bind", None
    )
    assert [bed.handles(uuid)[0]["deployable_id"] for uuid in uuids] == [
        fpga.deployable_id,
        fpga.deployable_id,
        gpu.deployable_id,
    ]


def test_an_unbound_request_may_be_bound_to_another_project(bed: Bed) -> None:
    card, uuid = rows.card(bed.engine), bed.make(state="Unbound")
    bed.bind(card, uuid, project_id="project-2")
    assert (bed.request(uuid)["state"], bed.request(uuid)["project_id"]) == ("Bound", "project-2")


def test_all_or_nothing(bed: Bed) -> None:
    card, uuids = rows.card(bed.engine, handles=2), [bed.make() for _ in range(3)]
    with pytest.raises(NoHandle) as raised:
        bed.bind(card, *uuids)
    assert raised.value.details["reasons"]
    assert bed.untouched(*uuids)
    assert rows.read(bed.engine, schema.outbox) == []
    assert bed.woken == 0


def test_a_refusal_says_why(light: Bed) -> None:
    card, (first, second) = rows.card(light.engine, handles=1), (light.make(), light.make())
    light.bind(card, first, instance_uuid=str(uuid4()))
    with pytest.raises(NoHandle) as raised:
        light.bind(card, second)
    assert card.provider in str(raised.value.details["reasons"][second])
    assert light.untouched(second)


@pytest.mark.parametrize(
    "closed",
    [
        {"status": "maintaining"},
        {"health": "unhealthy"},
        {"draining": True},
        {"setup_required": True},
        {"reboot_required": True},
        {"traits": ()},
        {"resource_class": "PGPU"},
        {"handles": 0},
    ],
)
def test_what_closes_a_device(light: Bed, closed: dict[str, Any]) -> None:
    card, uuid = rows.card(light.engine, **closed), light.make()
    with pytest.raises(NoHandle):
        light.bind(card, uuid)
    assert light.untouched(uuid)


def test_a_draining_handle_is_given_to_nobody(light: Bed) -> None:
    card, uuid = rows.card(light.engine, handles=1), light.make()
    (handle,) = rows.read(light.engine, schema.attach_handles)
    rows.change(light.engine, schema.attach_handles, handle["id"], draining=True)
    with pytest.raises(NoHandle):
        light.bind(card, uuid)


@pytest.mark.parametrize("state", ["BindStarted", "BindFailed", "UnbindFailed", "Deleting"])
def test_a_request_in_a_wrong_state(light: Bed, state: str) -> None:
    card, uuid = rows.card(light.engine), light.make(state=state)
    with pytest.raises(WrongState, match=f"{uuid}, which is {state}"):
        light.bind(card, uuid)
    assert light.request(uuid)["state"] == state


def test_a_bound_request_goes_nowhere_else(light: Bed) -> None:
    card, other, uuid = rows.card(light.engine), rows.card(light.engine, "compute-2"), light.make()
    light.bind(card, uuid)
    before = light.request(uuid)
    with pytest.raises(WrongState):
        light.bind(other, uuid)
    with pytest.raises(WrongState):
        light.bind(card, uuid, instance_uuid=str(uuid4()))
    assert light.request(uuid) == before


def test_an_instance_that_has_others(bed: Bed) -> None:
    card, first, second = rows.card(bed.engine), bed.make(), bed.make()
    bed.bind(card, first)
    with pytest.raises(Conflict, match=INSTANCE):
        bed.bind(card, second)
    # Without a request at place 0 it is the look at the others that decides.
    rows.change(bed.engine, schema.requests, bed.request(first)["id"], instance_slot=1)
    with pytest.raises(Conflict, match=first) as raised:
        bed.bind(card, second)
    assert raised.value.details["requests"] == [first]
    assert bed.untouched(second)


def test_what_does_not_exist(light: Bed) -> None:
    card, other, uuid = rows.card(light.engine), rows.card(light.engine, "compute-2"), light.make()
    calls: list[tuple[Callable[[], None], str]] = [
        (lambda: light.bind(card, uuid, str(uuid4())), "no accelerator request"),
        (lambda: light.bind(card, uuid, scope="project-2"), "no accelerator request"),
        (lambda: light.bind(card, uuid, device_rp_uuid=str(uuid4())), "no resource provider"),
        (lambda: light.bind(card, uuid, device_rp_uuid=other.provider), "not on compute-1"),
    ]
    for call, told in calls:
        with pytest.raises(NotFound, match=told):
            call()
    assert light.untouched(uuid)


def test_one_call_is_for_one_instance_on_one_host(light: Bed) -> None:
    card, (first, second) = rows.card(light.engine), (light.make(), light.make())
    for changed in ({"instance_uuid": str(uuid4())}, {"hostname": "compute-2"}):
        with pytest.raises(Invalid):
            light.requests.patch([wish(card, first), wish(card, second, **changed)], "bind", None)
    with pytest.raises(Invalid, match="twice"):
        light.bind(card, first, first.upper())
    assert light.untouched(first, second)


def test_a_bind_costs_the_same_however_much_there_is(bed: Bed) -> None:
    card = rows.card(bed.engine, handles=8)
    first, second, uuids = bed.make(), bed.make(), [bed.make() for _ in range(16)]
    with counting(bed.engine) as alone:
        bed.bind(card, first)
    with bed.engine.begin() as tx:
        many = [
            {
                "uuid": str(uuid4()),
                "state": "Initial",
                "profile_id": bed.profile,
                "device_profile_name": "fpga",
                "device_profile_group_id": 0,
                "resource_class": "FPGA",
                "group": {},
            }
            for _ in range(500)
        ]
        tx.execute(sa.insert(schema.requests), many)
    big = rows.card(bed.engine, "compute-2", handles=256)
    with counting(bed.engine) as among_many:
        bed.bind(big, second, instance_uuid=str(uuid4()))
    with counting(bed.engine) as batch:
        bed.bind(big, *uuids, instance_uuid=str(uuid4()))
    assert len(alone.statements) == len(among_many.statements)
    assert len(batch.statements) == len(alone.statements)


@pytest.mark.parametrize("wait", [False, True])
def test_of_many_free_handles_only_those_needed_are_loaded(bed: Bed, wait: bool) -> None:
    card = rows.card(bed.engine, handles=256)
    free = UnitOfWork(bed.engine).run(
        lambda tx: claims.lock_free(tx, card.deployable_id, 3, wait=wait)
    )
    assert len(free) == 3
