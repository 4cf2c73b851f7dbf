# SPDX-License-Identifier: Apache-2.0
"""Device contexts in the conductor: life cycle, limits, expiry and the hidden profile."""

from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.contexts.device_contexts import DeviceContexts
from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.binding.profile import MAX_KEYS, hidden_profile_name
from cyborg.core.errors import (
    Conflict,
    InUse,
    Invalid,
    NoHandle,
    NotFound,
    ServiceTokenRequired,
    WrongState,
)
from cyborg.db import schema
from cyborg.db.orphans.write import assign_project
from cyborg.rpc.notifications import is_enabled
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.context_work import BODY, PROJECT, ContextEnv
from cyborg.tests.fixtures.machine.options import make_conf


@pytest.fixture
def env(engine: sa.Engine) -> ContextEnv:
    return ContextEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> ContextEnv:
    return ContextEnv(sqlite_engine)


def test_context_has_arqs_and_hidden_profile(env: ContextEnv) -> None:
    created = env.contexts.create({**BODY, "name": "gzip"}, PROJECT)
    assert (created["state"], created["name"], created["project_id"]) == (
        "unbound",
        "gzip",
        PROJECT,
    )
    groups = [
        {
            "resources:FPGA": "2",
            f"trait:{rows.TRAIT}": "required",
            "trait:OWNER_CYBORG": "required",
        }
    ]
    assert created["groups"] == groups
    (profile,) = rows.read(
        env.engine, schema.device_profiles, name=hidden_profile_name(created["uuid"])
    )
    assert profile["groups"] == groups
    arqs = rows.read(env.engine, schema.arqs, profile_id=profile["id"])
    assert [arq["group"] for arq in arqs] == [{**groups[0], "accel:key1": "val1"}] * 2
    assert {arq["project_id"] for arq in arqs} == {PROJECT}
    for scope in (PROJECT, None):
        found = env.arqs.create(profile["name"], "another", scope)["arqs"]
        kept = ("group", "project_id", "device_profile_group_id", "resource_class", "state")
        assert [[arq[name] for name in kept] for arq in found] == [
            [arq[name] for name in kept] for arq in arqs
        ]


def test_each_caller_gets_arqs_of_its_own(env: ContextEnv) -> None:
    """Late calls of a caller whose ARQs were replaced change nothing."""
    context = env.create()
    stale, fresh = env.read_arqs(context), env.read_arqs(context)
    assert not set(stale) & set(fresh)
    assert env.counts() == (1, 1, 2)
    instance = env.bind(env.card, *fresh)
    with pytest.raises(NotFound):
        env.bind(env.card, *stale)
    with pytest.raises(NotFound):
        env.arqs.delete(stale, None, None, allow_bound=True)
    assert (env.state(context), env.row(context)["instance_uuid"]) == ("bound", instance)
    env.delete_server(instance)
    env.boot(context)
    with pytest.raises(NotFound):
        env.arqs.delete(fresh, None, None, allow_bound=True)
    assert (env.state(context), env.handles()) == ("bound", {"owned": 2, "free": 2})


def test_label_ends_with_the_server(env: ContextEnv) -> None:
    context = env.create()
    instance = env.boot(context)
    for arq in rows.read(env.engine, schema.arqs):
        rows.update(env.engine, schema.arqs, arq["id"], label_name="of the first server")
    env.delete_server(instance)
    env.boot(context)
    assert {arq["label_name"] for arq in rows.read(env.engine, schema.arqs)} == {None}


def test_context_is_used_again_after_its_server_is_deleted(env: ContextEnv) -> None:
    context = env.create()
    for _ in range(2):
        instance = env.boot(context)
        row = env.row(context)
        assert (row["state"], row["hostname"], row["instance_uuid"]) == (
            "bound",
            env.card.host,
            instance,
        )
        assert row["expires_at"] is None
        assert env.handles() == {"owned": 2, "free": 2}
        env.delete_server(instance)
        row = env.row(context)
        assert (row["state"], row["hostname"], row["instance_uuid"]) == ("unbound", None, None)
        assert row["expires_at"] is None
        assert env.handles() == {"free": 4}
        assert env.states() == {"Unbound": 2}
    env.contexts.delete(context, PROJECT)
    assert env.counts() == (0, 0, 0)


def test_host_work_of_a_context(engine: sa.Engine) -> None:
    env = ContextEnv(engine, "prepares")
    context = env.create()
    instance = env.boot(context)
    assert env.state(context) == "binding"
    env.jobs.run_once()
    assert env.agents.calls[0]["items"][0]["accel"] == {"key1": "val1"}
    assert env.state(context) == "bound"
    env.agents.answers["release"] = "running"
    env.delete_server(instance)
    env.jobs.run_once()
    row = env.row(context)
    assert (row["state"], row["instance_uuid"]) == ("cleaning", None)
    with pytest.raises(WrongState):
        env.contexts.update(context, {"name": "n"}, PROJECT)
    env.agents.answers["release"] = "done"
    env.advance(60)
    env.jobs.run_once()
    assert env.state(context) == "unbound"
    env.contexts.delete(context, PROJECT)
    assert (env.counts(), env.handles()) == ((0, 0, 0), {"free": 4})


@pytest.mark.parametrize("is_late", [False, True])
def test_server_is_evacuated_while_its_host_does_not_clean(env: ContextEnv, is_late: bool) -> None:
    """Nova deletes the ARQs of the instance and creates them for another host, at once."""
    env.card = env.add_card(handles=2, host="host-1", abilities=["sanitises"])
    other = env.add_card(handles=2, host="host-2", abilities=["sanitises"])
    context = env.create()
    instance = env.boot(context)
    env.agents.answers["release"] = "failed"
    env.delete_server(instance)
    if is_late:
        env.advance(env.conf.conductor.release_timeout)
        env.jobs.run_once()
        assert env.states() == {"UnbindFailed": 2}
    assert env.state(context) == "cleaning"
    arqs = env.read_arqs(context)
    assert (env.state(context), env.states()) == ("unbound", {"Initial": 2})
    env.bind(other, *arqs, instance=instance)
    assert (env.state(context), env.row(context)["hostname"]) == ("bound", "host-2")
    env.agents.answers["release"] = "done"
    env.advance(600)
    env.jobs.run_once()
    assert (env.state(context), env.states()) == ("bound", {"Bound": 2})
    assert not env.handles()["dirty"]


def test_context_is_bound_again_while_it_is_cleaned(env: ContextEnv) -> None:
    env.card = env.add_card(handles=4, host="host-1", abilities=["sanitises"])
    context = env.create()
    arqs = env.read_arqs(context)
    env.bind(env.card, *arqs)
    env.arqs.unbind([{"request": arq} for arq in arqs], None)
    assert env.state(context) == "cleaning"
    env.bind(env.card, *arqs)
    assert env.state(context) == "bound"
    env.jobs.run_once()
    assert (env.state(context), env.handles()["owned"]) == ("bound", 2)


def test_context_can_be_deleted_while_it_is_cleaned(env: ContextEnv) -> None:
    env.card = env.add_card(handles=2, host="host-1", abilities=["sanitises"])
    context = env.create()
    env.delete_server(env.boot(context))
    assert env.state(context) == "cleaning"
    env.contexts.delete(context, PROJECT)
    assert (env.counts(), env.handles()["dirty"]) == ((0, 0, 0), 2)
    env.jobs.run_once()
    assert env.handles()["dirty"] == 0


def test_failed_bind_is_undone_and_says_why(engine: sa.Engine) -> None:
    env = ContextEnv(engine, "prepares")
    context = env.create()
    env.agents.answers["prepare"] = "failed"
    instance = env.boot(context)
    env.jobs.run_once()
    row = env.row(context)
    assert (row["state"], row["error"]) == ("error", "it broke")
    assert env.handles()["owned"] == 0
    with pytest.raises(WrongState):
        env.read_arqs(context)
    env.agents.answers["prepare"] = "done"
    env.jobs.run_once()
    env.delete_server(instance)
    assert (env.state(context), env.row(context)["error"]) == ("unbound", "it broke")
    env.boot(context)
    env.jobs.run_once()
    assert (env.state(context), env.row(context)["error"]) == ("bound", None)


def test_context_in_error_can_be_deleted(sqlite_engine: sa.Engine) -> None:
    env = ContextEnv(sqlite_engine, "prepares")
    context = env.create()
    env.agents.answers["prepare"] = "failed"
    env.boot(context)
    env.jobs.run_once()
    env.contexts.delete(context, PROJECT)
    assert env.counts() == (0, 0, 0)


def test_late_cleaning_shows_its_error(sqlite_engine: sa.Engine) -> None:
    env = ContextEnv(sqlite_engine, "sanitises")
    context = env.create()
    instance = env.boot(context)
    env.agents.answers["release"] = "failed"
    env.delete_server(instance)
    env.advance(env.conf.conductor.release_timeout)
    env.jobs.run_once()
    row = env.row(context)
    assert row["state"] == "cleaning"
    # A member of the project sees the error: it does not name the host.
    assert row["error"] == "it broke"
    assert {"code": "clean_failed", "hostname": env.card.host}.items() <= row["failure"].items()
    assert env.states() == {"UnbindFailed": 2}
    env.agents.answers["release"] = "done"
    env.advance(600)
    env.jobs.run_once()
    assert env.state(context) == "unbound"


def test_partial_unbind_is_unbinding(env: ContextEnv) -> None:
    context = env.create()
    arqs = env.read_arqs(context)
    env.bind(env.card, *arqs)
    env.arqs.unbind([{"request": arqs[0]}], None)
    assert env.state(context) == "unbinding"
    env.arqs.delete([arqs[1]], None, None, allow_bound=True)
    assert env.state(context) == "unbound"


def test_partial_bind_is_refused(env: ContextEnv) -> None:
    context = env.create()
    arqs = env.read_arqs(context)
    with pytest.raises(Conflict, match="has 2 ARQs and the call has 1"):
        env.bind(env.card, arqs[0])
    assert (env.state(context), env.handles()) == ("unbound", {"free": 4})


def test_bind_without_free_handle_changes_nothing(env: ContextEnv) -> None:
    first, context = env.create(resources={"FPGA": 4}), env.create()
    env.boot(first)
    with pytest.raises(NoHandle):
        env.boot(context)
    assert (env.state(context), env.row(context)["instance_uuid"]) == ("unbound", None)
    assert "handle is taken (4 handles)" in env.row(context)["error"]


def test_bound_context_cannot_be_used_changed_or_deleted(env: ContextEnv) -> None:
    context = env.create()
    instance = env.boot(context)
    calls: list[Any] = [
        lambda: env.read_arqs(context),
        lambda: env.contexts.update(context, {"name": "n"}, PROJECT),
        lambda: env.contexts.delete(context, PROJECT),
    ]
    for call in calls:
        with pytest.raises(WrongState, match=instance):
            call()
    assert (env.state(context), env.row(context)["name"]) == ("bound", None)


def test_delete_of_unbound_arqs_keeps_the_context(env: ContextEnv) -> None:
    """Nova deletes the ARQs of a server that it could not place."""
    context = env.create()
    arqs = env.read_arqs(context)
    env.arqs.delete(arqs, None, PROJECT, allow_bound=False)
    assert (env.state(context), env.states()) == ("unbound", {"Initial": 2})
    env.bind(env.card, *env.read_arqs(context))
    assert env.state(context) == "bound"


def test_delete_of_bound_arqs_needs_a_service_token(sqlite_env: ContextEnv) -> None:
    context = sqlite_env.create()
    arqs = sqlite_env.read_arqs(context)
    sqlite_env.bind(sqlite_env.card, *arqs)
    with pytest.raises(ServiceTokenRequired):
        sqlite_env.arqs.delete(arqs, None, PROJECT, allow_bound=False)
    assert sqlite_env.state(context) == "bound"


def test_delete_by_instance_deletes_other_arqs_only(env: ContextEnv) -> None:
    context, other = env.create(), env.add_arq()
    instance = env.bind(env.card, *env.read_arqs(context), other)
    env.delete_server(instance)
    assert (env.state(context), env.states()) == ("unbound", {"Unbound": 2})
    assert env.handles() == {"free": 4}


@pytest.mark.parametrize("scope", ["other", ""])
def test_context_of_another_project_is_not_found(env: ContextEnv, scope: str) -> None:
    context = env.create()
    name = hidden_profile_name(context)
    with pytest.raises((NotFound, Invalid)):
        env.arqs.create(name, "other", scope)
    for call in (
        lambda: env.contexts.update(context, {"name": "n"}, scope),
        lambda: env.contexts.delete(context, scope),
    ):
        with pytest.raises((NotFound, Invalid)):
            call()
    assert env.counts() == (1, 1, 2)


def test_instance_of_another_project_is_refused(env: ContextEnv) -> None:
    context = env.create()
    request = {
        "hostname": env.card.host,
        "device_rp_uuid": env.card.provider,
        "instance_uuid": str(uuid4()),
        "project_id": "other",
    }
    items = [{"request": arq, **request} for arq in env.read_arqs(context)]
    with pytest.raises(Conflict, match="belongs to project other"):
        env.arqs.bind(items, None)
    assert (env.state(context), env.handles()) == ("unbound", {"free": 4})


def test_project_of_a_context_never_changes(env: ContextEnv) -> None:
    context = env.create()
    instance = env.boot(context)
    ids = [row["id"] for row in rows.read(env.engine, schema.arqs)]
    for id_ in ids:
        rows.update(env.engine, schema.arqs, id_, owner_verified=False)
    with env.engine.begin() as tx:
        assert assign_project(tx, ids, instance, "other") == 0
    assert {row["project_id"] for row in rows.read(env.engine, schema.arqs)} == {PROJECT}


def test_context_needs_a_project(env: ContextEnv) -> None:
    with pytest.raises(Invalid) as raised:
        env.create(None)
    assert raised.value.details["field"] == "project_id"
    assert env.counts() == (0, 0, 0)


def test_profile_that_is_too_large_with_the_owner_trait(env: ContextEnv) -> None:
    group = {"resources:FPGA": "1", **{f"accel:k{n}": "v" for n in range(MAX_KEYS - 1)}}
    rows.insert_profile(env.engine, "large", [group])
    for body in ({"device_profile": "large"}, {"groups": [group]}):
        with pytest.raises(Invalid, match="keys"):
            env.contexts.create(body, PROJECT)
    assert env.counts() == (0, 0, 0)


def test_profile_is_copied(env: ContextEnv) -> None:
    profiles = build(DeviceProfiles, env.uow)
    profile = profiles.create({"name": "gzip", "groups": [{"resources:FPGA": "1"}]})
    by_name = env.contexts.create({"device_profile": "gzip"}, PROJECT)
    by_uuid = env.contexts.create({"device_profile": profile["uuid"]}, PROJECT)
    profiles.delete(["gzip"])
    for context in (by_name, by_uuid):
        assert context["device_profile"] == "gzip"
        assert context["groups"] == [{"resources:FPGA": "1", "trait:OWNER_CYBORG": "required"}]
        env.boot(context["uuid"])
        assert env.state(context["uuid"]) == "bound"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"device_profile": "unknown"}, NotFound),
        ({"device_profile": "accel", "config_data": {"k": "v"}}, Invalid),
        ({"device_profile": "foreign"}, Invalid),
        ({"resources": {"FPGA": 0}}, Invalid),
    ],
)
def test_refused_context_leaves_nothing(
    env: ContextEnv, body: dict[str, Any], error: type[Exception]
) -> None:
    rows.insert_profile(env.engine, "accel", [{"resources:FPGA": "1", "accel:k": "w"}])
    forbidden = {"resources:FPGA": "1", "trait:OWNER_CYBORG": "forbidden"}
    rows.insert_profile(env.engine, "foreign", [forbidden])
    with pytest.raises(error):
        env.contexts.create(body, PROJECT)
    assert env.counts() == (0, 0, 0)


def test_update_changes_the_config_data_of_the_arqs(env: ContextEnv) -> None:
    context = env.create(
        resources=None,
        requires=None,
        groups=[{"resources:FPGA": "1"}, {"resources:PGPU": "1"}],
    )
    before = rows.read(env.engine, schema.arqs)
    changed = env.contexts.update(context, {"name": "n", "config_data": {"k": "2"}}, PROJECT)
    assert (changed["name"], changed["config_data"]) == ("n", {"k": "2"})
    after = rows.read(env.engine, schema.arqs)
    groups = [arq["group"] for arq in after]
    assert [group["accel:k"] for group in groups] == ["2", "2"]
    assert ["resources:FPGA" in groups[0], "resources:PGPU" in groups[1]] == [True, True]
    assert all("accel:key1" not in group for group in groups)
    assert [arq["updated_at"] for arq in after] == [arq["updated_at"] for arq in before]
    with pytest.raises(Invalid):
        env.contexts.update(context, {"name": "x", "config_data": {"k": "\n"}}, PROJECT)
    assert env.row(context)["name"] == "n"


def test_hidden_profile_cannot_be_made_or_deleted(env: ContextEnv) -> None:
    context, profiles = env.create(), build(DeviceProfiles, env.uow)
    name = hidden_profile_name(context)
    for key in (name, rows.read(env.engine, schema.device_profiles, name=name)[0]["uuid"]):
        with pytest.raises(InUse, match=f"belongs to device context {context}"):
            profiles.delete([key])
    with pytest.raises(Invalid, match="reserved"):
        profiles.create(
            {"name": hidden_profile_name(str(uuid4())), "groups": [{"resources:FPGA": "1"}]}
        )
    assert env.counts() == (1, 1, 2)


def test_changes_are_notified(engine: sa.Engine) -> None:
    env = ContextEnv(engine, "prepares")
    conf = make_conf()
    assert not is_enabled(conf)  # registers the options
    conf.set_override("driver", ["messagingv2"], group="oslo_messaging_notifications")
    notices = NotificationBuilder(conf, now=env.now)
    env.contexts = DeviceContexts(conf, env.uow, None, notices, now=env.now)
    env.arqs = Arqs(conf, env.uow, notifications=notices, now=env.now)
    context = env.create()
    env.contexts.update(context, {"name": "n"}, PROJECT)
    instance = env.boot(context)
    env.delete_server(instance)
    written = [
        (row["payload"]["event_type"], row["payload"]["payload"]["data"]["state"])
        for row in rows.read(env.engine, schema.outbox, subject=context)
    ]
    assert written == [
        ("device_context.create.end", "unbound"),
        ("device_context.update.end", "unbound"),
        ("device_context.bind.start", "binding"),
        ("device_context.unbind.start", "cleaning"),
    ]
