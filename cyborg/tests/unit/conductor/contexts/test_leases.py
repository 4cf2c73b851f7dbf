# SPDX-License-Identifier: Apache-2.0
"""Leases of device contexts: reserve, renew, bind, unbind and expiry, on each database."""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.binder import InstanceAllocations
from cyborg.conductor.binding.context_states import record_refusal
from cyborg.conductor.jobs.reboot import enqueue_restores
from cyborg.core.errors import (
    Conflict,
    Invalid,
    NoHandle,
    NotFound,
    ServiceTokenRequired,
    WrongState,
)
from cyborg.core.text import to_iso, to_text
from cyborg.db import schema
from cyborg.db.binding import claims as handle_claims
from cyborg.db.orphans import write as orphans
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.context_work import PROJECT, ContextEnv


@pytest.fixture
def env(engine: sa.Engine) -> ContextEnv:
    return ContextEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> ContextEnv:
    return ContextEnv(sqlite_engine)


def arqs_of(env: ContextEnv) -> list[dict[str, Any]]:
    return rows.read(env.engine, schema.arqs)


def test_context_is_reserved_then_bound_then_unbound(env: ContextEnv) -> None:
    context, instance = env.create(), str(uuid4())
    row = env.reserve(context)
    assert (row["state"], row["epoch"], row["hostname"]) == ("reserved", 1, env.card.host)
    assert row["expires_at"] == to_iso(env.now() + timedelta(seconds=600))
    assert {(arq["state"], arq["instance_uuid"], arq["instance_slot"]) for arq in arqs_of(env)} == {
        ("Bound", None, None)
    }
    assert (env.handles(), env.events()) == ({"owned": 2, "free": 2}, [])
    row = env.bind_lease(context, instance, epoch=1)
    assert (row["state"], row["instance_uuid"], row["expires_at"]) == ("bound", instance, None)
    assert sorted(arq["instance_slot"] for arq in arqs_of(env)) == [0, 1]
    assert env.events() == ["completed", "completed"]
    assert env.bind_lease(context, instance, epoch=1)["state"] == "bound"
    assert env.events() == ["completed", "completed"]
    row = env.unbind_lease(context)
    assert (row["state"], row["instance_uuid"], row["epoch"]) == ("unbound", None, 1)
    assert env.handles() == {"free": 4}
    assert env.reserve(context)["epoch"] == 2


def test_renewal_needs_the_epoch_and_the_same_target(env: ContextEnv) -> None:
    context, other = env.create(), env.add_card(handles=4, host="host-2", abilities=[])
    env.reserve(context, lease_seconds=10)
    env.advance(5)
    renewed = env.reserve(context, epoch=1, lease_seconds=20)
    assert (renewed["state"], renewed["epoch"]) == ("reserved", 1)
    assert env.row(context)["lease_expires_at"] == env.now() + timedelta(seconds=20)
    with pytest.raises(WrongState, match="with epoch 1: give this epoch"):
        env.reserve(context)
    with pytest.raises(Conflict, match="no lease with epoch 7"):
        env.reserve(context, epoch=7)
    with pytest.raises(Conflict, match="is for host"):
        env.reserve(context, other, epoch=1)
    env.advance(20)
    with pytest.raises(WrongState, match="has ended"):
        env.reserve(context, epoch=1)
    assert env.leases.sweep() == 1
    with pytest.raises(Conflict, match="no lease with epoch 1"):
        env.reserve(context, epoch=1)
    assert env.row(context)["epoch"] == 1


def test_expiry_releases_the_handles_and_the_context_expires_later(env: ContextEnv) -> None:
    context = env.create()
    env.reserve(context, lease_seconds=10)
    env.advance(9)
    assert env.leases.sweep() == 0
    env.advance(1)
    with pytest.raises(WrongState, match="has ended"):
        env.bind_lease(context, str(uuid4()), epoch=1)
    assert env.leases.sweep() == 1
    row = env.row(context)
    assert (row["state"], row["hostname"]) == ("unbound", None)
    assert row["expires_at"] == env.now() + timedelta(seconds=86400)
    assert row["lease_expires_at"] is None
    assert (env.handles(), env.states()) == ({"free": 4}, {"Unbound": 2})
    env.advance(86401)
    assert (env.leases.sweep(), env.contexts.sweep()) == (0, 1)


def test_bound_context_never_expires(env: ContextEnv) -> None:
    context = env.create()
    env.reserve(context, lease_seconds=10)
    env.bind_lease(context, str(uuid4()), epoch=1)
    env.advance(10**7)
    assert (env.leases.sweep(), env.contexts.sweep()) == (0, 0)
    assert (env.state(context), env.handles()) == ("bound", {"owned": 2, "free": 2})


def test_stale_epoch_cannot_bind(env: ContextEnv) -> None:
    context, instance = env.create(), str(uuid4())
    env.reserve(context)
    env.unbind_lease(context)
    env.reserve(context)
    for epoch, message in ((1, "no lease with epoch 1"), (3, "no lease with epoch 3")):
        with pytest.raises(Conflict, match=message):
            env.bind_lease(context, instance, epoch=epoch)
    with pytest.raises(WrongState, match="epoch: missing"):
        env.bind_lease(context, instance)
    with pytest.raises(Conflict, match="hostname: the lease"):
        env.bind_lease(context, instance, epoch=2, hostname="elsewhere")
    with pytest.raises(Conflict, match="mappings: the lease"):
        env.bind_lease(context, instance, epoch=2, mappings={"0": [str(uuid4())]})
    env.bind_lease(context, instance, epoch=2, mappings={"device_profile_0": [env.card.provider]})
    with pytest.raises(WrongState, match="it is bound"):
        env.bind_lease(context, str(uuid4()), epoch=2)


def test_bind_without_a_lease(env: ContextEnv) -> None:
    context, instance = env.create(), str(uuid4())
    with pytest.raises(Invalid, match="mappings: missing"):
        env.bind_lease(context, instance)
    with pytest.raises(Conflict, match="no lease with epoch 1"):
        env.bind_lease(context, instance, epoch=1)
    mappings = {"0": [env.card.provider]}
    row = env.bind_lease(context, instance, mappings=mappings)
    assert (row["state"], row["epoch"]) == ("bound", 1)
    assert env.bind_lease(context, instance, mappings=mappings)["state"] == "bound"
    assert env.events() == ["completed", "completed"]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"hostname": ""}, "hostname"),
        ({"hostname": None}, "hostname"),
        ({"mappings": None}, "mappings"),
        ({"mappings": {}}, "mappings['device_profile_0']"),
        ({"mappings": {"1": [str(uuid4())]}}, "mappings"),
        ({"mappings": {"0": []}}, "mappings['0']"),
        ({"mappings": {"0": [str(uuid4())] * 2}}, "mappings['0']"),
        ({"mappings": {"0": ["x"]}}, "mappings['0']"),
        ({"mappings": {"0": [str(uuid4())]}}, "mappings['device_profile_0']"),
        ({"hostname": "elsewhere"}, "mappings['device_profile_0']"),
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"lease_seconds": 3601}, "lease_seconds"),
        ({"lease_seconds": True}, "lease_seconds"),
        ({"epoch": -1}, "epoch"),
        ({"colour": "red"}, "'colour'"),
    ],
)
def test_wrong_body_names_the_field(
    sqlite_env: ContextEnv, changed: dict[str, Any], field: str
) -> None:
    context = sqlite_env.create()
    with pytest.raises(Invalid) as raised:
        sqlite_env.reserve(context, **changed)
    assert raised.value.details["field"] == field
    assert (sqlite_env.state(context), sqlite_env.handles()) == ("unbound", {"free": 4})


def test_context_of_another_project_is_not_found(sqlite_env: ContextEnv) -> None:
    env, context = sqlite_env, sqlite_env.create(project="project-2")
    with pytest.raises(NotFound):
        env.reserve(context)
    with pytest.raises(NotFound):
        env.bind_lease(context, str(uuid4()))
    with pytest.raises(NotFound):
        env.leases.unbind(context, {}, PROJECT)


def test_reservation_is_all_or_nothing(env: ContextEnv) -> None:
    first, second = env.create(), env.create(resources={"FPGA": 3})
    env.reserve(first)
    with pytest.raises(NoHandle):
        env.reserve(second)
    row = env.row(second)
    assert (row["state"], row["epoch"]) == ("unbound", 0)
    assert env.handles() == {"owned": 2, "free": 2}
    env.unbind_lease(first)
    assert env.reserve(second)["epoch"] == 1


def test_refused_reservation_is_kept_until_the_next_lease(env: ContextEnv) -> None:
    first, second = env.create(), env.create(resources={"FPGA": 3})
    env.reserve(first)
    with pytest.raises(NoHandle) as exc:
        env.reserve(second)
    # The ARQs of the refused lease are rolled back: the message names their group.
    assert exc.value.message == (
        f"no free attach handle for device context {second}: group 0: handle is taken (2 handles); "
        "claimed by another request of this call (2 handles). What to do: see cyborg "
        f"device-context-explain {second}"
    )
    row = env.row(second)
    error = row["error"]
    assert (row["state"], row["epoch"]) == ("unbound", 0)
    assert f"refused at {to_text(to_iso(env.now()))}: " in error
    assert error.endswith(
        "Z: group 0: handle is taken (2 handles); group 0: claimed by another "
        "request of this call (2 handles)"
    )
    failure = row["failure"]
    assert (failure["code"], failure["hostname"]) == ("taken", env.card.host)
    assert failure["at"] == to_iso(env.now())
    assert failure["groups"][0] == {
        "group": 0,
        "provider": env.card.provider,
        "code": "taken",
        "reason": "handle is taken",
        "handles": 2,
    }
    assert env.row(first)["error"] is None
    env.unbind_lease(first)
    assert env.row(second)["error"] == error
    assert env.reserve(second)["error"] is None
    assert env.row(second)["failure"] is None


def test_refusal_of_an_earlier_epoch_is_not_kept(env: ContextEnv) -> None:
    context = env.create()
    env.reserve(context)
    refusal = NoHandle("no free attach handle", reasons={})
    with env.engine.begin() as tx:
        record_refusal(tx, refusal, {context: 0}, env.now())
        record_refusal(tx, refusal, {context: 1}, env.now())
    assert env.row(context)["error"] is None
    env.unbind_lease(context)
    with env.engine.begin() as tx:
        record_refusal(tx, refusal, {context: 0}, env.now())
    assert env.row(context)["error"] is None
    with env.engine.begin() as tx:
        record_refusal(tx, refusal, {context: 1}, env.now())
    assert "no free attach handle" in env.row(context)["error"]


def test_host_work_of_a_lease_is_done_once(engine: sa.Engine) -> None:
    env = ContextEnv(engine, "prepares")
    context, instance = env.create(), str(uuid4())
    assert env.reserve(context)["state"] == "reserving"
    env.jobs.run_once()
    assert (env.state(context), env.agents.kinds()) == ("reserved", ["prepare"])
    assert (env.agents.calls[0]["instance"], env.events()) == (None, [])
    assert rows.read(env.engine, schema.jobs)[0]["subject"] == context
    assert env.bind_lease(context, instance, epoch=1)["state"] == "bound"
    assert (env.open_jobs(), env.events()) == ([], ["completed", "completed"])
    assert env.unbind_lease(context)["state"] == "cleaning"
    env.jobs.run_once()
    assert (env.state(context), env.handles()) == ("unbound", {"free": 4})


def test_bind_while_the_host_prepares(engine: sa.Engine) -> None:
    env = ContextEnv(engine, "prepares")
    context, instance = env.create(), str(uuid4())
    env.reserve(context)
    assert env.bind_lease(context, instance, epoch=1)["state"] == "binding"
    assert env.events() == []
    env.jobs.run_once()
    assert (env.state(context), env.events()) == ("bound", ["completed", "completed"])
    assert env.agents.kinds() == ["prepare"]


def test_failed_host_work_ends_the_lease(engine: sa.Engine) -> None:
    env = ContextEnv(engine, "prepares")
    context = env.create()
    env.agents.answers["prepare"] = "failed"
    env.reserve(context)
    env.jobs.run_once()
    row = env.row(context)
    assert (row["state"], row["error"], env.events()) == ("error", "it broke", [])
    (job,) = rows.read(env.engine, schema.jobs, kind="prepare")
    failure = {"code": "prepare_failed", "hostname": env.card.host, "job": job["uuid"]}
    assert failure.items() <= row["failure"].items()
    assert env.handles()["owned"] == 0
    env.agents.answers["prepare"] = "done"
    with pytest.raises(WrongState, match="unbind it first"):
        env.reserve(context)
    env.jobs.run_once()
    assert env.unbind_lease(context)["state"] == "unbound"
    assert env.unbind_lease(context)["state"] == "unbound"
    assert (env.reserve(context)["epoch"], env.row(context)["error"]) == (2, None)


def test_failed_host_work_hides_addresses_from_the_owner(sqlite_engine: sa.Engine) -> None:
    env = ContextEnv(sqlite_engine, "prepares")
    context = env.create()
    env.agents.answers["prepare"] = "failed"
    env.agents.names_items = True
    env.reserve(context)
    env.jobs.run_once()
    row = env.row(context)
    assert row["error"] == "prepare of (hidden): it broke"
    (job,) = rows.read(env.engine, schema.jobs, kind="prepare")
    assert row["failure"]["detail"] == job["error"] != row["error"]


def test_job_after_the_expiry_reserves_nothing(engine: sa.Engine) -> None:
    env = ContextEnv(engine, "prepares")
    context = env.create()
    env.agents.answers["prepare"] = "running"
    env.reserve(context, lease_seconds=1)
    env.jobs.run_once()
    env.advance(1)
    assert env.leases.sweep() == 1
    assert env.state(context) == "cleaning"
    env.agents.answers["prepare"] = "done"
    env.advance(60)
    env.jobs.run_once()
    assert (env.state(context), env.handles()) == ("unbound", {"free": 4})


def test_nova_binds_the_handles_of_the_lease(env: ContextEnv) -> None:
    context = env.create()
    env.reserve(context)
    stale, fresh = env.read_arqs(context), env.read_arqs(context)
    assert not set(stale) & set(fresh)
    assert env.handles() == {"owned": 2, "free": 2}
    with pytest.raises(NotFound):
        env.bind(env.card, *stale)
    other = env.add_card(handles=4, host="host-2", abilities=[])
    with pytest.raises(Conflict, match=f"lease for host {env.card.host}"):
        env.bind(other, *fresh)
    assert env.state(context) == "reserved"
    instance = env.bind(env.card, *fresh)
    assert (env.state(context), env.events()) == ("bound", [])
    env.delete_server(instance)
    assert (env.state(context), env.handles()["owned"]) == ("unbound", 0)


def test_calls_of_nova_do_not_release_a_lease(env: ContextEnv) -> None:
    context = env.create()
    env.reserve(context)
    arqs = env.read_arqs(context)
    env.arqs.delete(arqs, None, None, allow_bound=True)
    env.arqs.delete(arqs, None, None, allow_bound=False)
    with pytest.raises(WrongState, match="unbind the device context"):
        env.arqs.unbind([{"request": arqs[0]}], None)
    with pytest.raises(WrongState):
        env.contexts.delete(context, PROJECT)
    assert (env.state(context), env.handles()) == ("reserved", {"owned": 2, "free": 2})
    env.bind(env.card, *arqs)
    with pytest.raises(ServiceTokenRequired):
        env.arqs.delete(arqs, None, None, allow_bound=False)


def test_nova_gets_no_arqs_of_a_lease_that_has_ended(sqlite_env: ContextEnv) -> None:
    env, context = sqlite_env, sqlite_env.create()
    env.reserve(context, lease_seconds=1)
    arqs = env.read_arqs(context)
    env.advance(1)
    with pytest.raises(WrongState, match="has ended"):
        env.read_arqs(context)
    with pytest.raises(WrongState, match="has ended"):
        env.bind(env.card, *arqs)


def test_instance_of_another_project_is_refused(sqlite_engine: sa.Engine) -> None:
    env = ContextEnv(sqlite_engine)

    class Owners:
        def find_allocations(self, instance: str) -> InstanceAllocations:
            return InstanceAllocations("project-2")

    env.arqs = Arqs(env.conf, env.uow, owners=Owners(), now=env.now)
    env.leases = env.new_leases()
    context = env.create()
    env.reserve(context)
    body = {"hostname": env.card.host, "instance_uuid": str(uuid4()), "epoch": 1}
    with pytest.raises(Conflict, match="belongs to project project-2"):
        env.leases.bind(context, body, None)
    with pytest.raises(Conflict, match="belongs to project project-2"):
        env.leases.bind(context, body, PROJECT)
    assert env.state(context) == "reserved"


def test_orphan_scan_and_restore_know_leases(engine: sa.Engine) -> None:
    env = ContextEnv(engine, "prepares")
    context = env.create()
    env.reserve(context)
    env.jobs.run_once()
    with env.engine.begin() as tx:
        assert orphans.next_bound(tx, "", 0, 10) == []
        assert orphans.bound_at_provider(tx, env.card.provider, 10) == []
        assert enqueue_restores(tx, env.card.host, env.now()) == 2
    env.jobs.run_once()
    assert (env.state(context), env.states()) == ("reserved", {"Bound": 2})
    restores = rows.read(env.engine, schema.jobs, kind="restore")
    assert {job["subject"] for job in restores} == {context}


def test_custody_names_the_instance_of_a_lease(sqlite_env: ContextEnv) -> None:
    env, context, instance = sqlite_env, sqlite_env.create(), str(uuid4())
    env.reserve(context)
    env.bind_lease(context, instance, epoch=1)
    found = rows.read(env.engine, schema.custody_records)
    events = [(row["event"], row["details"]["instance"]) for row in found]
    assert events == [("claimed", None)] * 2 + [("assigned", instance)] * 2


def test_reservation_on_another_numa_node_names_the_node(sqlite_env: ContextEnv) -> None:
    env = sqlite_env
    traits = [rows.TRAIT, "CUSTOM_NUMA_NODE_0"]
    card = env.add_card(host="host-2", abilities=[], numa_node=0, traits=traits)
    context = env.create(requires=[rows.TRAIT, "NUMA_NODE_1"])
    with pytest.raises(NoHandle) as refused:
        env.reserve(context, card)
    (first, *_) = refused.value.details["reasons"].values()
    assert first[0]["code"] == "numa_node"
    assert "NUMA node differs: device has 0, the group requires 1" in env.row(context)["error"]


def set_down(env: ContextEnv, host: str, since: datetime | None) -> None:
    (agent,) = rows.read(env.engine, schema.services, host=host)
    rows.update(env.engine, schema.services, agent["id"], down_since=since)


def set_published(env: ContextEnv, card: rows.Card, revision: int) -> None:
    (provider,) = rows.read(env.engine, schema.providers, uuid=card.provider)
    rows.update(env.engine, schema.providers, provider["id"], published_revision=revision)


def first_codes(refused: pytest.ExceptionInfo[NoHandle]) -> set[str]:
    return {reasons[0]["code"] for reasons in refused.value.details["reasons"].values()}


def test_host_that_is_down_or_unpublished_is_neither_reserved_nor_bound(env: ContextEnv) -> None:
    context, instance = env.create(), str(uuid4())
    mappings = {"0": [env.card.provider]}
    set_published(env, env.card, 0)
    for code in ("unpublished", "host_down"):
        with pytest.raises(NoHandle) as refused:
            env.reserve(context)
        assert first_codes(refused) == {code}
        with pytest.raises(NoHandle) as refused:
            env.bind_lease(context, instance, mappings=mappings)
        assert first_codes(refused) == {code}
        set_down(env, env.card.host, env.now())
    row = env.row(context)
    assert (row["state"], row["epoch"], env.handles()) == ("unbound", 0, {"free": 4})
    assert "agent of the host is down (4 handles)" in row["error"]
    # Nova has chosen the host.
    env.boot(context)
    assert env.state(context) == "bound"


def test_lease_is_renewed_and_bound_although_the_host_is_down(env: ContextEnv) -> None:
    context, instance = env.create(), str(uuid4())
    env.reserve(context)
    set_down(env, env.card.host, env.now())
    assert env.reserve(context, epoch=1)["state"] == "reserved"
    assert env.bind_lease(context, instance, epoch=1)["state"] == "bound"


@pytest.mark.parametrize("change", ["down", "unpublished"])
@pytest.mark.parametrize("verb", ["reserve", "bind"])
def test_guard_refuses_a_host_that_changes_after_the_check(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, change: str, verb: str
) -> None:
    """The check finds nothing in the first attempt, as if the change came right after it."""
    env = ContextEnv(engine)
    context, find = env.create(), handle_claims.any_unavailable
    checks: list[bool] = []

    def check(tx: sa.Connection, uuids: Collection[str]) -> bool:
        found = find(tx, uuids)
        checks.append(found)
        return found and len(checks) > 1

    monkeypatch.setattr(handle_claims, "any_unavailable", check)
    if change == "down":
        set_down(env, env.card.host, env.now())
    else:
        set_published(env, env.card, 0)
    mappings = {"0": [env.card.provider]}
    calls = {
        "reserve": lambda: env.reserve(context),
        "bind": lambda: env.bind_lease(context, str(uuid4()), mappings=mappings),
    }
    with pytest.raises(NoHandle) as refused:
        calls[verb]()
    assert checks == [True, True]
    assert first_codes(refused) == {"host_down" if change == "down" else change}
    assert (env.state(context), env.handles()) == ("unbound", {"free": 4})
