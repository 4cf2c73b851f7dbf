# SPDX-License-Identifier: Apache-2.0
"""Device contexts whose hidden profile is the device profile of a Neutron port."""

from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Conflict, Invalid, NoHandle
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.context_work import ContextEnv

PORT = {"resources": {"FPGA": 1}, "config_data": {"attach_target": "port"}}


@pytest.fixture
def env(engine: sa.Engine) -> ContextEnv:
    return ContextEnv(engine)


def add_network(env: ContextEnv, count: int) -> set[int]:
    """Give the last ``count`` handles a physical network; return their row ids."""
    found = rows.read(env.engine, schema.attach_handles)[-count:]
    for row in found:
        info = {**row["info"], "physical_network": "physnet1"}
        rows.update(env.engine, schema.attach_handles, row["id"], info=info)
    return {row["id"] for row in found}


def owned(env: ContextEnv, arq: str) -> int:
    (row,) = rows.read(env.engine, schema.arqs, uuid=arq)
    (handle,) = rows.read(env.engine, schema.attach_handles, arq_id=row["id"])
    return int(handle["id"])


@pytest.mark.parametrize("as_group", [False, True])
def test_context_of_a_port_gets_a_handle_with_a_network(env: ContextEnv, as_group: bool) -> None:
    group = {"resources:FPGA": "1", "accel:attach_target": "port"}
    body = {"groups": [group]} if as_group else PORT
    context = str(env.contexts.create(body, "project-1")["uuid"])
    with pytest.raises(NoHandle, match="no physical_network"):
        env.bind(env.card, *env.read_arqs(context))
    assert (env.state(context), env.handles()) == ("unbound", {"free": 4})
    fitting = add_network(env, 1)
    (arq,) = env.read_arqs(context)
    env.bind(env.card, arq)
    assert (env.state(context), {owned(env, arq)}) == ("bound", fitting)


def test_contexts_of_the_flavor_and_of_a_port_are_bound_in_one_call(env: ContextEnv) -> None:
    """Nova requests the ARQs of each profile, and binds all of a server in one call."""
    flavor, port = env.create(), str(env.contexts.create(PORT, "project-1")["uuid"])
    fitting = add_network(env, 1)
    of_flavor, (of_port,) = env.read_arqs(flavor), env.read_arqs(port)
    instance = env.bind(env.card, *of_flavor, of_port, instance=str(uuid4()))
    assert (env.state(flavor), env.state(port)) == ("bound", "bound")
    assert {owned(env, of_port)} == fitting
    assert not {owned(env, arq) for arq in of_flavor} & fitting
    env.delete_server(instance)
    assert (env.state(flavor), env.state(port)) == ("unbound", "unbound")
    assert env.handles() == {"free": 4}


def test_two_ports_cannot_share_a_context(env: ContextEnv) -> None:
    """The second request replaces the ARQs of the first one."""
    port = str(env.contexts.create(PORT, "project-1")["uuid"])
    add_network(env, 2)
    first, second = env.read_arqs(port), env.read_arqs(port)
    env.bind(env.card, *second)
    assert first != second
    assert env.handles() == {"owned": 1, "free": 3}


def test_context_for_an_unknown_target_is_refused(env: ContextEnv) -> None:
    for body in (
        {"resources": {"FPGA": 1}, "config_data": {"attach_target": "moon"}},
        {"groups": [{"resources:FPGA": "1", "accel:attach_target": "moon"}]},
    ):
        with pytest.raises(Invalid, match="expected instance or port or host"):
            env.contexts.create(body, "project-1")
    assert rows.read(env.engine, schema.device_contexts) == []
    # A profile of an earlier version can have any value.
    groups = [{"resources:FPGA": "1", "accel:attach_target": "moon"}]
    rows.insert_profile(env.engine, "old", groups)
    with pytest.raises(Conflict, match="unknown value 'moon', expected instance or port"):
        env.contexts.create({"device_profile": "old"}, "project-1")


def test_server_cannot_have_a_context_for_the_host(env: ContextEnv) -> None:
    body = {"resources": {"FPGA": 1}, "config_data": {"attach_target": "host"}}
    context = str(env.contexts.create(body, "project-1")["uuid"])
    with pytest.raises(Conflict, match=r"is for the host itself.*attach-host"):
        env.bind(env.card, *env.read_arqs(context))
    assert env.state(context) == "unbound"
    assert env.handles() == {"free": 4}
