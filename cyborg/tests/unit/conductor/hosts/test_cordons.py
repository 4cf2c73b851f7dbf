# SPDX-License-Identifier: Apache-2.0
"""Cordons of backends: devices that need host work are not schedulable without their driver."""

from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.placement import reconciler
from cyborg.core.errors import NoHandle
from cyborg.core.inventory.device import Ability
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.db import schema
from cyborg.db.deployables import write as deployables
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.hosts import Host, card, make_hosts
from cyborg.tests.fixtures.machine.options import make_conf

FAILED = BackendState("socket", "outside", BackendStatus.ERROR, "no driver has said hello")
CORDONED = replace(FAILED, cordoned=True)
READY = BackendState("socket", "outside", BackendStatus.READY)
PLAIN = BackendState("plain", "outside", BackendStatus.READY)


class Env:
    """A host with an agent, a card that must be prepared and a card that need not be."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.woken: list[None] = []
        self.hosts = make_hosts(engine, self.woken)
        self.host = Host(backends=(READY, PLAIN))
        able = frozenset({Ability.PREPARES})
        self.prepared = replace(card(0, backend="socket"), abilities=able)
        self.plain = card(1, backend="plain")
        self.host.send(self.hosts, self.prepared, self.plain)

    def send_states(self, *states: BackendState) -> None:
        """Send a heartbeat with these backends, and a report if one is requested."""
        self.host.backends = states
        self.host.send(self.hosts, *self.host.devices)

    def restart_agent(self, *states: BackendState) -> None:
        """Restart the agent, which has no devices then."""
        self.host.epoch, self.host.generation = str(uuid4()), 0
        self.host.backends = states
        self.host.send(self.hosts)

    def cordoned(self) -> list[bool]:
        """Return whether each provider, and each device, is cordoned."""
        devices = [row["cordoned"] for row in rows.read(self.engine, schema.devices)]
        uuids = [row["rp_uuid"] for row in rows.read(self.engine, schema.deployables)]
        with self.engine.connect() as reader:
            states = deployables.desired_state(reader, uuids)
        cordons = [reconciler.is_cordoned(row) for row in states]
        assert cordons == devices
        return cordons


@pytest.fixture
def env(engine: sa.Engine) -> Env:
    return Env(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> Env:
    return Env(sqlite_engine)


def test_cordoned_backend_with_host_work_cordons_its_devices(env: Env) -> None:
    env.woken.clear()
    env.send_states(FAILED, replace(PLAIN, status=BackendStatus.ERROR, error="no"))
    assert (env.cordoned(), env.woken) == ([False, False], []), "one failure cordons nothing"
    env.send_states(CORDONED, replace(PLAIN, status=BackendStatus.ERROR, error="no", cordoned=True))
    assert env.cordoned() == [True, False]
    assert env.woken, "the publisher is woken"
    stale = [row["stale_since"] is not None for row in rows.read(env.engine, schema.providers)]
    assert stale == [True, True]
    states = [(r["status"], r["cordoned"]) for r in rows.read(env.engine, schema.backends)]
    assert states == [("ERROR", True), ("ERROR", True)]
    env.woken.clear()
    env.send_states(READY, PLAIN)
    assert env.cordoned() == [False, False]
    assert env.woken


def test_cordon_after_agent_restart_stays_until_a_successful_discovery(sqlite_env: Env) -> None:
    sqlite_env.send_states(CORDONED, PLAIN)
    discovering = BackendState("socket", "outside", BackendStatus.DISCOVERING)
    for state in (discovering, FAILED):
        sqlite_env.restart_agent(state, replace(PLAIN, status=BackendStatus.DISCOVERING))
        assert sqlite_env.cordoned() == [True, False]
    sqlite_env.host.devices = (sqlite_env.prepared, sqlite_env.plain)
    sqlite_env.send_states(READY, PLAIN)
    assert sqlite_env.cordoned() == [False, False]


def test_cordoned_backend_without_devices_cordons_recorded_devices(sqlite_env: Env) -> None:
    """The driver process is gone and the agent was restarted: it reports no devices."""
    sqlite_env.restart_agent(CORDONED, PLAIN)
    assert len(rows.read(sqlite_env.engine, schema.devices, backend="socket")) == 1
    assert sqlite_env.cordoned()[0] is True


def test_new_device_of_a_cordoned_backend_is_cordoned(sqlite_env: Env) -> None:
    sqlite_env.send_states(CORDONED, PLAIN)
    moved = replace(sqlite_env.plain, backend="socket", abilities=sqlite_env.prepared.abilities)
    sqlite_env.host.send(sqlite_env.hosts, sqlite_env.prepared, moved)
    assert sqlite_env.cordoned() == [True, True]


def bind_prepared(env: Env) -> None:
    """Bind the card that must be prepared."""
    (deployable, _) = rows.read(env.engine, schema.deployables)
    request = rows.insert_arq(
        env.engine,
        rows.insert_profile(env.engine),
        group={f"resources:{deployable['resource_class']}": "1"},
        resource_class=deployable["resource_class"],
    )
    bind_request: dict[str, Any] = {
        "request": request,
        "hostname": env.host.name,
        "device_rp_uuid": deployable["rp_uuid"],
        "instance_uuid": str(uuid4()),
    }
    Arqs(make_conf(), UnitOfWork(env.engine)).bind([bind_request], None)


def test_bind_to_a_cordoned_backend_is_refused_with_the_reason(sqlite_env: Env) -> None:
    sqlite_env.send_states(CORDONED, PLAIN)
    with pytest.raises(NoHandle, match="being uninstalled or cordoned"):
        bind_prepared(sqlite_env)


def test_bind_without_the_agent_that_prepares_says_what_to_do(sqlite_env: Env) -> None:
    (service,) = rows.read(sqlite_env.engine, schema.services)
    rows.update(sqlite_env.engine, schema.services, service["id"], down_since=service["started_at"])
    with pytest.raises(NoHandle) as refused:
        bind_prepared(sqlite_env)
    assert refused.value.message == (
        "no free attach handle for device profile fpga: group 0: the agent of host "
        f"{sqlite_env.host.name} is down and its devices must be prepared (1 handles). "
        "What to do: see cyborg device-profile-explain fpga"
    )
