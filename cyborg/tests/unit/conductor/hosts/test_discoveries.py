# SPDX-License-Identifier: Apache-2.0
import threading
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.hosts import discoveries as module
from cyborg.conductor.hosts.discoveries import HOST_DOWN, Discoveries
from cyborg.core.errors import Conflict, Invalid, NotFound, Stale, TimedOut
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.db import schema
from cyborg.db.discoveries import read
from cyborg.db.discoveries import write as store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.hosts import READY, Host, make_hosts
from cyborg.tests.fixtures.machine.options import make_conf

REPORT: list[dict[str, Any]] = [
    {"name": name, "driver": "fake", "status": "READY", "error": None} for name in ("fake", "gen0")
]
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
    return build(
        Discoveries,
        make_conf(),
        UnitOfWork(engine),
        agents,
        now=lambda: now or timeutils.utcnow(),
    )


def states(engine: sa.Engine, uuid: str) -> dict[tuple[str, str], str]:
    """Return the states of the backends, which must be those that the discovery counts."""
    found = [row["id"] for row in rows.read(engine, schema.discoveries, uuid=uuid)]
    backends = [
        row
        for id_ in found
        for row in rows.read(engine, schema.discovery_backends, discovery_id=id_)
    ]
    with engine.connect() as connection:
        counted = read.get(connection, uuid)
    assert Counter(row["state"] for row in backends) == (counted["progress"] if counted else {})
    return {(row["host"], row["backend"]): row["state"] for row in backends}


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
    (failed,) = rows.read(engine, schema.discovery_backends, state="FAILED")
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


def mark_down(engine: sa.Engine, *hosts: str) -> None:
    for row in rows.read(engine, schema.services):
        if row["host"] in hosts:
            rows.update(engine, schema.services, row["id"], down_since=timeutils.utcnow())


@pytest.mark.parametrize(
    ("filters", "called"), [((None, None), ["alpha"]), ((None, "fake"), ["alpha"]), (("beta",), [])]
)
def test_create_fails_backends_of_hosts_that_are_down_without_a_call(
    engine: sa.Engine, filters: tuple[str | None, ...], called: list[str]
) -> None:
    add_hosts(engine)
    mark_down(engine, "beta")
    agents = FakeAgents()
    uuid = make_discoveries(engine, agents).create(*filters)["uuid"]
    found = states(engine, uuid)
    assert found.pop(("beta", "fake")) == "FAILED"
    assert set(found.values()) == ({"IN-PROGRESS"} if called else set())
    (failed,) = rows.read(engine, schema.discovery_backends, state="FAILED")
    assert failed["error"] == HOST_DOWN
    join_threads(engine)
    assert [host for host, _ in agents.calls] == called


def test_create_is_refused_while_one_with_the_same_filters_is_open(engine: sa.Engine) -> None:
    add_hosts(engine)
    discoveries = make_discoveries(engine, FakeAgents())
    uuid = discoveries.create()["uuid"]
    discoveries.complete(uuid, "alpha", REPORT)
    with pytest.raises(Conflict, match=f"discovery {uuid} of the same host and driver"):
        discoveries.create()
    others = [discoveries.create(*each)["uuid"] for each in (("beta",), (None, "fake"))]
    assert set(states(engine, others[0]).values()) == {"IN-PROGRESS"}
    discoveries.complete(uuid, "beta", REPORT)
    (ended,) = rows.read(engine, schema.discoveries, uuid=uuid)
    second = discoveries.create()["uuid"]
    assert set(states(engine, second).values()) == {"IN-PROGRESS"}
    with pytest.raises(Conflict, match=second):
        discoveries.create()
    (now,) = rows.read(engine, schema.discoveries, uuid=uuid)
    assert (now["mutex_key"], now["updated_at"]) == (None, ended["updated_at"])
    join_threads(engine)


def test_create_of_backends_that_fail_at_once_leaves_no_open_discovery(
    sqlite_engine: sa.Engine,
) -> None:
    add_hosts(sqlite_engine)
    mark_down(sqlite_engine, "alpha", "beta")
    discoveries = make_discoveries(sqlite_engine, FakeAgents())
    assert discoveries.create()["uuid"] != discoveries.create()["uuid"]


def test_concurrent_creates_with_the_same_filters_start_one(engine: sa.Engine) -> None:
    add_hosts(engine)
    agents = FakeAgents()
    creators = [make_discoveries(engine, agents) for _ in range(4)]
    barrier = threading.Barrier(len(creators))
    outcomes: list[str] = []

    def create(discoveries: Discoveries) -> None:
        barrier.wait(10)
        try:
            outcomes.append(discoveries.create()["uuid"])
        except Conflict as exc:
            outcomes.append(str(exc.details.get("discovery")))

    threads = [threading.Thread(target=create, args=(each,)) for each in creators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == len(creators)
    (uuid,) = {row["uuid"] for row in rows.read(engine, schema.discoveries)}
    assert set(outcomes) == {uuid}
    join_threads(engine)
    assert sorted(agents.calls) == [("alpha", None), ("beta", None)]


def test_create_is_refused_while_too_many_are_open(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN_DISCOVERIES", 2)
    add_hosts(engine)
    discoveries = make_discoveries(engine, FakeAgents())
    first = discoveries.create("alpha")["uuid"]
    discoveries.create("beta")
    with pytest.raises(Conflict, match="2 discoveries are in progress"):
        discoveries.create()
    discoveries.complete(first, "alpha", REPORT)
    discoveries.create()
    join_threads(engine)


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


def test_sweep_purges_all_old_rows_in_small_transactions(
    sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PURGE_LIMIT", 2)
    rows.insert_discovery(sqlite_engine, *((f"h{number}", "b", "DONE") for number in range(5)))
    tomorrow = timeutils.utcnow() + timedelta(days=1, minutes=1)
    assert make_discoveries(sqlite_engine, FakeAgents(), tomorrow).sweep() == 5
    assert not rows.read(sqlite_engine, schema.discoveries)


def test_concurrent_outcomes_of_a_discovery_are_all_counted(engine: sa.Engine) -> None:
    hosts = [f"h{number}" for number in range(8)]
    uuid = str(uuid4())
    backends = [(host, name, "IN-PROGRESS") for host in hosts for name in ("a", "b")]
    rows.insert_discovery(engine, *backends, uuid=uuid)
    barrier = threading.Barrier(len(hosts))
    outcomes = [store.Outcome("a", store.DONE, None), store.Outcome("b", store.FAILED, "no bus")]

    def complete(host: str) -> None:
        barrier.wait(10)
        UnitOfWork(engine).run(lambda tx: store.record_outcomes(tx, uuid, host, outcomes))

    threads = [threading.Thread(target=complete, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Counter(states(engine, uuid).values()) == {"DONE": 8, "FAILED": 8}


def test_removal_of_a_host_leaves_the_backends_of_others(engine: sa.Engine) -> None:
    parts = [("a", "x", "DONE"), ("a", "y", "IN-PROGRESS"), ("b", "x", "FAILED")]
    first, second = str(uuid4()), str(uuid4())
    rows.insert_discovery(engine, *parts, uuid=first)
    rows.insert_discovery(engine, *parts[:2], uuid=second)
    with engine.begin() as tx:
        assert store.delete_of_host(tx, "a") == 4
    assert states(engine, first) == {("b", "x"): "FAILED"}
    (left,) = rows.read(engine, schema.discoveries)
    assert (left["uuid"], left["updated_at"]) == (first, None)


def test_complete_with_another_epoch_is_refused(engine: sa.Engine) -> None:
    add_hosts(engine)
    discoveries = make_discoveries(engine, FakeAgents())
    uuid = discoveries.create("alpha", "fake")["uuid"]
    done = [{"name": "fake", "driver": "fake", "status": "READY", "error": None}]
    (alpha,) = rows.read(engine, schema.services, host="alpha")
    (beta,) = rows.read(engine, schema.services, host="beta")
    for epoch in (beta["epoch"], str(uuid4())):
        with pytest.raises(Stale, match=f"unknown agent epoch {epoch} for host alpha"):
            discoveries.complete(uuid, "alpha", done, epoch)
    assert set(states(engine, uuid).values()) == {"IN-PROGRESS"}
    discoveries.complete(uuid, "alpha", done, alpha["epoch"])
    assert set(states(engine, uuid).values()) == {"DONE"}
    join_threads(engine)


def test_complete_of_results_that_nobody_waits_for_is_logged(
    engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    add_hosts(engine)
    discoveries = make_discoveries(engine, FakeAgents())
    uuid = discoveries.create("alpha", "fake")["uuid"]
    results = [
        {"name": name, "driver": "fake", "status": "READY", "error": None} for name in ("fake", "x")
    ]
    caplog.set_level("INFO")
    for expected in ("1 results ignored", "2 results ignored"):
        caplog.clear()
        discoveries.complete(uuid, "alpha", results)
        assert expected in caplog.text
    caplog.clear()
    discoveries.complete(uuid, "alpha", [])
    assert not caplog.text
    join_threads(engine)


def test_complete_with_malformed_results_is_refused(sqlite_engine: sa.Engine) -> None:
    discoveries = make_discoveries(sqlite_engine, FakeAgents())
    for malformed in (None, [1], [{"name": "x"}], "fake"):
        with pytest.raises(Invalid):
            discoveries.complete("6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11", "alpha", malformed)  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        discoveries.complete("x", "alpha", [])
