# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding import binder
from cyborg.conductor.binding.arqs import Arqs
from cyborg.core.errors import Conflict, Invalid, NoHandle, NotFound, Unavailable, WrongState
from cyborg.db import schema
from cyborg.db.binding import claims as handle_claims
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.machine.options import make_conf

INSTANCE = str(uuid4())


class Env:
    """ARQs on a database with one profile."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.woken = 0
        self.conf = make_conf()
        self.arqs = Arqs(self.conf, UnitOfWork(engine), self.wake)
        self.profile = rows.insert_profile(engine)

    def wake(self) -> None:
        self.woken += 1

    def add_arq(self, **values: Any) -> str:
        return rows.insert_arq(self.engine, self.profile, **values)

    def bind(self, card: rows.Card, *uuids: str, scope: str | None = None, **changed: Any) -> None:
        self.arqs.bind([bind_item(card, uuid, **changed) for uuid in uuids], scope)

    def row(self, uuid: str) -> dict[str, Any]:
        (row,) = rows.read(self.engine, schema.arqs, uuid=uuid)
        return row

    def handles(self, uuid: str) -> list[dict[str, Any]]:
        return rows.read(self.engine, schema.attach_handles, arq_id=self.row(uuid)["id"])

    def is_unchanged(self, *uuids: str) -> bool:
        return all(
            self.row(uuid)["state"] == "Initial"
            and self.row(uuid)["instance_uuid"] is None
            and self.handles(uuid) == []
            for uuid in uuids
        )


def bind_item(card: rows.Card, uuid: str, **changed: Any) -> dict[str, Any]:
    return {
        "request": uuid,
        "hostname": card.host,
        "device_rp_uuid": card.provider,
        "instance_uuid": INSTANCE,
    } | changed


@pytest.fixture
def env(engine: sa.Engine) -> Env:
    return Env(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> Env:
    """An env on SQLite, for behaviour that is the same on all databases."""
    return Env(sqlite_engine)


def test_bind_assigns_handle_and_needs_no_event(env: Env) -> None:
    card, uuid = rows.insert_card(env.engine), env.add_arq()
    env.bind(card, uuid, scope="project-1")
    row = env.row(uuid)
    assert (row["state"], row["hostname"], row["device_rp_uuid"], row["instance_uuid"]) == (
        "Bound",
        card.host,
        card.provider,
        INSTANCE,
    )
    assert row["project_id"] == "project-1"
    assert row["updated_at"] is not None
    assert len(env.handles(uuid)) == 1
    # nova-compute reads the ARQ after the answer: it is Bound.
    assert (rows.read(env.engine, schema.outbox), env.woken) == ([], 0)


def test_repeated_bind_changes_nothing(env: Env) -> None:
    card, uuids = rows.insert_card(env.engine), [env.add_arq(), env.add_arq()]
    env.bind(card, *uuids)
    before = [env.row(uuid) for uuid in uuids]
    env.bind(card, *uuids)
    env.bind(card, uuids[1])
    assert [env.row(uuid) for uuid in uuids] == before


def test_bind_of_more_arqs_in_second_call_succeeds(sqlite_env: Env) -> None:
    card, uuids = rows.insert_card(sqlite_env.engine), [sqlite_env.add_arq() for _ in range(3)]
    sqlite_env.bind(card, *uuids[:2])
    sqlite_env.bind(card, *uuids)
    assert [sqlite_env.row(uuid)["instance_slot"] for uuid in uuids] == [0, 1, 2]


def test_bind_to_several_providers(env: Env) -> None:
    fpga = rows.insert_card(env.engine, address="0000:01:00.0", handles=2)
    gpu = rows.insert_card(env.engine, address="0000:02:00.0", handles=1, resource_class="PGPU")
    uuids = [
        env.add_arq(),
        env.add_arq(),
        env.add_arq(resource_class="PGPU", group={"resources:PGPU": "1"}),
    ]
    env.arqs.bind(
        [bind_item(fpga, uuids[0]), bind_item(gpu, uuids[2]), bind_item(fpga, uuids[1])],
        None,
    )
    assert [env.handles(uuid)[0]["deployable_id"] for uuid in uuids] == [
        fpga.deployable_id,
        fpga.deployable_id,
        gpu.deployable_id,
    ]


def test_bind_of_unbound_arq_can_change_its_project(env: Env) -> None:
    card, uuid = rows.insert_card(env.engine), env.add_arq(state="Unbound")
    env.bind(card, uuid, project_id="project-2")
    assert (env.row(uuid)["state"], env.row(uuid)["project_id"]) == ("Bound", "project-2")


def test_bind_with_too_few_handles_changes_nothing(env: Env) -> None:
    card, uuids = rows.insert_card(env.engine, handles=2), [env.add_arq() for _ in range(3)]
    with pytest.raises(NoHandle) as raised:
        env.bind(card, *uuids)
    assert raised.value.details["reasons"]
    assert env.is_unchanged(*uuids)
    assert rows.read(env.engine, schema.outbox) == []
    assert env.woken == 0


def test_refusal_is_answered_even_if_its_note_comes_too_late(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tx: sa.Connection, **_: Any) -> None:
        raise Unavailable("the call took longer than its caller waits: nothing was changed")

    monkeypatch.setattr(binder, "record_refusal", fail)
    card, uuid = rows.insert_card(sqlite_env.engine, handles=0), sqlite_env.add_arq()
    with pytest.raises(NoHandle):
        sqlite_env.bind(card, uuid)


def test_bind_without_free_handle_reports_reasons(sqlite_env: Env) -> None:
    card, (first, second) = (
        rows.insert_card(sqlite_env.engine, handles=1),
        (sqlite_env.add_arq(), sqlite_env.add_arq()),
    )
    sqlite_env.bind(card, first, instance_uuid=str(uuid4()))
    with pytest.raises(NoHandle) as raised:
        sqlite_env.bind(card, second)
    assert card.provider in str(raised.value.details["reasons"][second])
    assert sqlite_env.is_unchanged(second)


@pytest.mark.parametrize(
    "facts",
    [
        {"status": "maintaining"},
        {"health": "unhealthy"},
        {"draining": True},
        {"setup_required": True},
        {"reboot_required": True},
        {"failing": True},
        {"deliverable": False},
        {"traits": ()},
        {"resource_class": "PGPU"},
        {"handles": 0},
    ],
)
def test_bind_to_unschedulable_device_raises_no_handle(
    sqlite_env: Env, facts: dict[str, Any]
) -> None:
    card, uuid = rows.insert_card(sqlite_env.engine, **facts), sqlite_env.add_arq()
    with pytest.raises(NoHandle):
        sqlite_env.bind(card, uuid)
    assert sqlite_env.is_unchanged(uuid)


def test_bind_ignores_draining_handle(sqlite_env: Env) -> None:
    card, uuid = rows.insert_card(sqlite_env.engine, handles=1), sqlite_env.add_arq()
    (handle,) = rows.read(sqlite_env.engine, schema.attach_handles)
    rows.update(sqlite_env.engine, schema.attach_handles, handle["id"], draining=True)
    with pytest.raises(NoHandle):
        sqlite_env.bind(card, uuid)


@pytest.mark.parametrize("state", ["BindStarted", "BindFailed", "UnbindFailed", "Deleting"])
def test_bind_in_wrong_state_raises_wrong_state(sqlite_env: Env, state: str) -> None:
    card, uuid = rows.insert_card(sqlite_env.engine), sqlite_env.add_arq(state=state)
    with pytest.raises(WrongState, match=f"{uuid} in state {state}"):
        sqlite_env.bind(card, uuid)
    assert sqlite_env.row(uuid)["state"] == state


def test_bind_of_bound_arq_elsewhere_raises_wrong_state(sqlite_env: Env) -> None:
    card, other, uuid = (
        rows.insert_card(sqlite_env.engine),
        rows.insert_card(sqlite_env.engine, "compute-2"),
        sqlite_env.add_arq(),
    )
    sqlite_env.bind(card, uuid)
    before = sqlite_env.row(uuid)
    with pytest.raises(WrongState):
        sqlite_env.bind(other, uuid)
    with pytest.raises(WrongState):
        sqlite_env.bind(card, uuid, instance_uuid=str(uuid4()))
    assert sqlite_env.row(uuid) == before


def test_bind_to_instance_with_other_arqs_raises_conflict(env: Env) -> None:
    card, first, second = rows.insert_card(env.engine), env.add_arq(), env.add_arq()
    env.bind(card, first)
    with pytest.raises(Conflict, match=INSTANCE):
        env.bind(card, second)
    # Without an ARQ in slot 0, the query of other ARQs detects the conflict.
    rows.update(env.engine, schema.arqs, env.row(first)["id"], instance_slot=1)
    with pytest.raises(Conflict, match=first) as raised:
        env.bind(card, second)
    assert raised.value.details["requests"] == [first]
    assert env.is_unchanged(second)


def test_bind_with_unknown_objects_raises_not_found(sqlite_env: Env) -> None:
    card, other, uuid = (
        rows.insert_card(sqlite_env.engine),
        rows.insert_card(sqlite_env.engine, "compute-2"),
        sqlite_env.add_arq(),
    )
    calls: list[tuple[Callable[[], None], str]] = [
        (lambda: sqlite_env.bind(card, uuid, str(uuid4())), "no accelerator request"),
        (lambda: sqlite_env.bind(card, uuid, scope="project-2"), "no accelerator request"),
        (lambda: sqlite_env.bind(card, uuid, device_rp_uuid=str(uuid4())), "does not exist"),
        (lambda: sqlite_env.bind(card, uuid, device_rp_uuid=other.provider), "not on compute-1"),
    ]
    for call, message in calls:
        with pytest.raises(NotFound, match=message):
            call()
    assert sqlite_env.is_unchanged(uuid)


def test_bind_to_a_wrong_provider_names_the_provider_and_no_arq(sqlite_env: Env) -> None:
    card, uuid = rows.insert_card(sqlite_env.engine), sqlite_env.add_arq()
    other, unknown = rows.insert_card(sqlite_env.engine, "compute-2").provider, str(uuid4())
    for provider, details in (
        (unknown, {"provider": unknown}),
        (other, {"provider": other, "host": "compute-2"}),
    ):
        with pytest.raises(NotFound, match=f"^resource provider {provider} .*: ") as raised:
            sqlite_env.bind(card, uuid, device_rp_uuid=provider)
        assert raised.value.details == details
        assert uuid not in raised.value.message


def test_bind_call_is_for_one_instance_on_one_host(sqlite_env: Env) -> None:
    card, (first, second) = (
        rows.insert_card(sqlite_env.engine),
        (sqlite_env.add_arq(), sqlite_env.add_arq()),
    )
    for changed in ({"instance_uuid": str(uuid4())}, {"hostname": "compute-2"}):
        with pytest.raises(Invalid):
            sqlite_env.arqs.bind([bind_item(card, first), bind_item(card, second, **changed)], None)
    with pytest.raises(Invalid, match="duplicate"):
        sqlite_env.bind(card, first, first.upper())
    assert sqlite_env.is_unchanged(first, second)


def test_bind_statement_count_is_constant(env: Env) -> None:
    card = rows.insert_card(env.engine, handles=8)
    first, second, uuids = env.add_arq(), env.add_arq(), [env.add_arq() for _ in range(16)]
    with count_statements(env.engine) as alone:
        env.bind(card, first)
    with env.engine.begin() as tx:
        many = [
            {
                "uuid": str(uuid4()),
                "state": "Initial",
                "profile_id": env.profile,
                "device_profile_name": "fpga",
                "device_profile_group_id": 0,
                "resource_class": "FPGA",
                "group": {},
            }
            for _ in range(500)
        ]
        tx.execute(sa.insert(schema.arqs), many)
    big = rows.insert_card(env.engine, "compute-2", handles=256)
    with count_statements(env.engine) as among_many:
        env.bind(big, second, instance_uuid=str(uuid4()))
    with count_statements(env.engine) as batch:
        env.bind(big, *uuids, instance_uuid=str(uuid4()))
    assert len(alone.statements) == len(among_many.statements)
    assert len(batch.statements) == len(alone.statements)


def test_bind_for_a_port_needs_a_handle_with_a_network(env: Env) -> None:
    card = rows.insert_card(env.engine, handles=2)
    uuid = env.add_arq(group={"resources:FPGA": "1", "accel:attach_target": "port"})
    with pytest.raises(NoHandle) as exc:
        env.bind(card, uuid)
    assert "device 0000:01:00.0 have no physical_network" in exc.value.message
    assert "device profile fpga needs: set physical_networks" in exc.value.message
    assert env.is_unchanged(uuid)
    for row in rows.read(env.engine, schema.attach_handles):
        info = {**row["info"], "physical_network": "physnet1"}
        rows.update(env.engine, schema.attach_handles, row["id"], info=info)
    env.bind(card, uuid)
    assert env.row(uuid)["state"] == "Bound"


def test_bind_for_a_port_finds_the_handle_with_a_network_among_others(env: Env) -> None:
    card = rows.insert_card(env.engine, handles=2)
    _, fitting = rows.read(env.engine, schema.attach_handles)
    info = {**fitting["info"], "physical_network": "physnet1"}
    rows.update(env.engine, schema.attach_handles, fitting["id"], info=info)
    group = {"resources:FPGA": "1", "accel:attach_target": "port"}
    first, second = env.add_arq(group=group), env.add_arq(group=group)
    env.bind(card, first)
    (bound,) = rows.read(env.engine, schema.attach_handles, arq_id=env.row(first)["id"])
    assert bound["id"] == fitting["id"]
    with pytest.raises(NoHandle, match="have no physical_network"):
        env.bind(card, second, instance_uuid=str(uuid4()))


def test_bind_leaves_handles_with_a_network_to_later_servers(env: Env) -> None:
    """As many servers with a port and a device are bound as there are handles with a network."""
    card = rows.insert_card(env.engine, handles=8)
    for row in rows.read(env.engine, schema.attach_handles)[:4]:
        info = {**row["info"], "physical_network": "physnet1"}
        rows.update(env.engine, schema.attach_handles, row["id"], info=info)
    group = {"resources:FPGA": "1", "accel:attach_target": "port"}
    for _ in range(4):
        server = [env.add_arq(group=group), env.add_arq()]
        try:
            env.bind(card, *server, instance_uuid=str(uuid4()))
        except NoHandle as exc:
            pytest.fail(exc.message)
        assert [env.row(uuid)["state"] for uuid in server] == ["Bound", "Bound"]


def test_bind_with_an_unknown_attach_target_is_refused(sqlite_env: Env) -> None:
    card = rows.insert_card(sqlite_env.engine)
    errors = {"moon": "unknown value 'moon', expected", "host": "for the host itself"}
    for value, error in errors.items():
        uuid = sqlite_env.add_arq(group={"resources:FPGA": "1", "accel:attach_target": value})
        with pytest.raises(Conflict, match=f"profile fpga.*{error}"):
            sqlite_env.bind(card, uuid)
        assert sqlite_env.is_unchanged(uuid)


@pytest.mark.parametrize("wait", [False, True])
def test_lock_unclaimed_loads_only_needed_handles(env: Env, wait: bool) -> None:
    card = rows.insert_card(env.engine, handles=256)
    free = UnitOfWork(env.engine).run(
        lambda tx: handle_claims.lock_unclaimed(tx, card.deployable_id, 3, wait=wait)
    )
    assert len(free) == 3
