# SPDX-License-Identifier: Apache-2.0
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.hosts.discoveries import Discoveries
from cyborg.core.errors import Invalid, NotFound, TimedOut
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.hosts import READY, Host, make_hosts
from cyborg.tests.fixtures.machine.options import make_conf

GENERIC = BackendState("gen0", "generic", BackendStatus.READY)


class FakeAgents:
    """Fake of the agents' API; ``dead`` is a host whose agent does not answer."""

    def __init__(self, dead: str = "", blocked: threading.Event | None = None) -> None:
        self.dead = dead
        self.blocked = blocked
        self.calls: list[tuple[str, str | None]] = []
        self.all_called = threading.Semaphore(0)

    def discovery(
        self, host: str, driver: str | None = None, discovery_id: str | None = None
    ) -> Mapping[str, Any]:
        if self.blocked is not None:
            self.blocked.wait(10)
        self.calls.append((host, driver))
        self.all_called.release()
        if host == self.dead:
            raise TimedOut(f"agent {host} did not answer in 30 s")
        return {"status": "IN-PROGRESS", "discovery_id": discovery_id}

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.all_called.acquire(timeout=10)


def add_hosts(engine: sa.Engine) -> None:
    for name, backends in (("alpha", [READY, GENERIC]), ("beta", [READY])):
        Host(name, backends=backends).hello(make_hosts(engine))


def make_discoveries(
    engine: sa.Engine, agents: FakeAgents, now: datetime | None = None
) -> Discoveries:
    return Discoveries(
        make_conf(),
        UnitOfWork(engine),
        agents,  # type: ignore[arg-type]
        now=lambda: now or timeutils.utcnow(),
    )


def states(engine: sa.Engine, uuid: str) -> dict[tuple[str, str], str]:
    discovery_rows = rows.read(engine, schema.discoveries, uuid=uuid)
    return {(row["host"], row["backend"]): row["state"] for row in discovery_rows}


def join_threads(engine: sa.Engine) -> None:
    """Wait for the threads that call agents."""
    for thread in threading.enumerate():
        if thread.name == "discovery":
            thread.join(120)


def test_create_calls_each_host_once(engine: sa.Engine) -> None:
    add_hosts(engine)
    agents = FakeAgents()
    discoveries = make_discoveries(engine, agents)
    uuid = discoveries.create()["uuid"]
    agents.wait(2)
    assert sorted(agents.calls) == [("alpha", None), ("beta", None)]
    assert set(states(engine, uuid).values()) == {"IN-PROGRESS"}
    done: list[dict[str, Any]] = [
        {"name": "fake", "driver": "fake", "status": "READY", "error": None},
        {"name": "gen0", "driver": "generic", "status": "ERROR", "error": "no bus"},
    ]
    for _ in range(2):
        discoveries.complete(uuid, "alpha", done)
    assert states(engine, uuid) == {
        ("alpha", "fake"): "DONE",
        ("alpha", "gen0"): "FAILED",
        ("beta", "fake"): "IN-PROGRESS",
    }
    (failed,) = rows.read(engine, schema.discoveries, state="FAILED")
    assert failed["error"] == "no bus"
    join_threads(engine)


@pytest.mark.parametrize(
    ("host", "driver", "targets"),
    [
        ("alpha", None, {("alpha", "fake"), ("alpha", "gen0")}),
        (None, "fake", {("alpha", "fake"), ("beta", "fake")}),
        (None, "gen0", {("alpha", "gen0")}),
        ("alpha", "generic", {("alpha", "gen0")}),
    ],
)
def test_create_with_host_or_driver_calls_only_these_backends(
    sqlite_engine: sa.Engine, host: str | None, driver: str | None, targets: set[tuple[str, str]]
) -> None:
    add_hosts(sqlite_engine)
    agents = FakeAgents()
    uuid = make_discoveries(sqlite_engine, agents).create(host, driver)["uuid"]
    agents.wait(len({host_name for host_name, _ in targets}))
    assert set(states(sqlite_engine, uuid)) == targets
    assert {name for _, name in agents.calls} == {driver}
    join_threads(sqlite_engine)


def test_create_with_unknown_name_is_refused_with_similar_names(
    sqlite_engine: sa.Engine,
) -> None:
    discoveries = make_discoveries(sqlite_engine, FakeAgents())
    with pytest.raises(NotFound, match="cyborg-agent"):
        discoveries.create()
    add_hosts(sqlite_engine)
    with pytest.raises(NotFound, match="alpha") as raised:
        discoveries.create(host="alhpa")
    assert raised.value.details == {"field": "host", "near": ["alpha"]}
    with pytest.raises(NotFound, match="generic"):
        discoveries.create(driver="genric")
    with pytest.raises(NotFound):
        discoveries.create(host="beta", driver="generic")
    assert not rows.read(sqlite_engine, schema.discoveries)


def test_create_with_unreachable_agent_fails_only_its_host(engine: sa.Engine) -> None:
    add_hosts(engine)
    release = threading.Event()
    uuid = make_discoveries(engine, FakeAgents(dead="beta", blocked=release)).create()["uuid"]
    assert set(states(engine, uuid).values()) == {"IN-PROGRESS"}
    release.set()
    join_threads(engine)
    assert states(engine, uuid)["beta", "fake"] == "FAILED"
    assert states(engine, uuid)["alpha", "fake"] == "IN-PROGRESS"


def test_sweep_fails_timed_out_discoveries_and_purges_old_ones(engine: sa.Engine) -> None:
    add_hosts(engine)
    uuid = make_discoveries(engine, FakeAgents()).create("alpha", "fake")["uuid"]
    join_threads(engine)
    assert make_discoveries(engine, FakeAgents()).sweep() == 0
    later = make_discoveries(engine, FakeAgents(), timeutils.utcnow() + timedelta(minutes=10))
    assert later.sweep() == 1
    assert states(engine, uuid) == {("alpha", "fake"): "FAILED"}
    tomorrow = make_discoveries(
        engine, FakeAgents(), timeutils.utcnow() + timedelta(days=1, minutes=1)
    )
    assert tomorrow.sweep() == 1, "it is purged"
    assert states(engine, uuid) == {}


def test_complete_with_malformed_results_is_refused(sqlite_engine: sa.Engine) -> None:
    discoveries = make_discoveries(sqlite_engine, FakeAgents())
    for malformed in (None, [1], [{"name": "x"}], "fake"):
        with pytest.raises(Invalid):
            discoveries.complete("6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11", "alpha", malformed)  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        discoveries.complete("x", "alpha", [])
