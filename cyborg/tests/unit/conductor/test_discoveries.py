# SPDX-License-Identifier: Apache-2.0
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.discoveries import Discoveries
from cyborg.core.errors import Invalid, NotFound, TimedOut
from cyborg.core.report import BackendState, BackendStatus
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.hosts import READY, Host, rooms
from cyborg.fixtures.options import make_conf

GENERIC = BackendState("gen0", "generic", BackendStatus.READY)


class Bus:
    """Agents that take the call, and some that do not."""

    def __init__(self, dead: str = "", silent: threading.Event | None = None) -> None:
        self.dead = dead
        self.silent = silent
        self.calls: list[tuple[str, str | None]] = []
        self.all_called = threading.Semaphore(0)

    def discovery(
        self, host: str, driver: str | None = None, discovery_id: str | None = None
    ) -> Mapping[str, Any]:
        if self.silent is not None:
            self.silent.wait(10)
        self.calls.append((host, driver))
        self.all_called.release()
        if host == self.dead:
            raise TimedOut(f"agent {host} did not answer in 30 s")
        return {"status": "IN-PROGRESS", "discovery_id": discovery_id}

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.all_called.acquire(timeout=10)


def cloud(engine: sa.Engine) -> None:
    for name, backends in (("alpha", [READY, GENERIC]), ("beta", [READY])):
        Host(name, backends=backends).hello(rooms(engine))


def room(engine: sa.Engine, bus: Bus, now: datetime | None = None) -> Discoveries:
    return Discoveries(make_conf(), UnitOfWork(engine), bus, now=lambda: now or timeutils.utcnow())


def states(engine: sa.Engine, uuid: str) -> dict[tuple[str, str], str]:
    found = rows.read(engine, schema.discoveries, uuid=uuid)
    return {(row["host"], row["backend"]): row["state"] for row in found}


def ended(engine: sa.Engine) -> None:
    """Wait for the threads that ask agents."""
    for thread in threading.enumerate():
        if thread.name == "discovery":
            thread.join(10)


def test_every_host_is_asked_once_and_answers_for_itself(engine: sa.Engine) -> None:
    cloud(engine)
    bus = Bus()
    discoveries = room(engine, bus)
    uuid = discoveries.create()["uuid"]
    bus.wait(2)
    assert sorted(bus.calls) == [("alpha", None), ("beta", None)]
    assert set(states(engine, uuid).values()) == {"IN-PROGRESS"}
    done = [
        {"name": "fake", "driver": "fake", "status": "READY", "error": None},
        {"name": "gen0", "driver": "generic", "status": "ERROR", "error": "no bus"},
    ]
    for _ in range(2):
        discoveries.done(uuid, "alpha", done)
    assert states(engine, uuid) == {
        ("alpha", "fake"): "DONE",
        ("alpha", "gen0"): "FAILED",
        ("beta", "fake"): "IN-PROGRESS",
    }
    (failed,) = rows.read(engine, schema.discoveries, state="FAILED")
    assert failed["error"] == "no bus"
    ended(engine)


@pytest.mark.parametrize(
    ("host", "driver", "meant"),
    [
        ("alpha", None, {("alpha", "fake"), ("alpha", "gen0")}),
        (None, "fake", {("alpha", "fake"), ("beta", "fake")}),
        (None, "gen0", {("alpha", "gen0")}),
        ("alpha", "generic", {("alpha", "gen0")}),
    ],
)
def test_only_what_is_meant_is_asked(
    sqlite_engine: sa.Engine, host: str | None, driver: str | None, meant: set[tuple[str, str]]
) -> None:
    cloud(sqlite_engine)
    bus = Bus()
    uuid = room(sqlite_engine, bus).create(host, driver)["uuid"]
    bus.wait(len({each for each, _ in meant}))
    assert set(states(sqlite_engine, uuid)) == meant
    assert {asked for _, asked in bus.calls} == {driver}
    ended(sqlite_engine)


def test_names_that_are_unknown_are_refused_with_those_that_are_near(
    sqlite_engine: sa.Engine,
) -> None:
    discoveries = room(sqlite_engine, Bus())
    with pytest.raises(NotFound, match="cyborg-agent"):
        discoveries.create()
    cloud(sqlite_engine)
    with pytest.raises(NotFound, match="alpha") as bad:
        discoveries.create(host="alhpa")
    assert bad.value.details == {"field": "host", "near": ["alpha"]}
    with pytest.raises(NotFound, match="generic"):
        discoveries.create(driver="genric")
    with pytest.raises(NotFound):
        discoveries.create(host="beta", driver="generic")
    assert not rows.read(sqlite_engine, schema.discoveries)


def test_a_dead_agent_fails_its_host_alone_and_keeps_nobody_waiting(engine: sa.Engine) -> None:
    cloud(engine)
    gate = threading.Event()
    uuid = room(engine, Bus(dead="beta", silent=gate)).create()["uuid"]
    assert set(states(engine, uuid).values()) == {"IN-PROGRESS"}
    gate.set()
    ended(engine)
    assert states(engine, uuid)["beta", "fake"] == "FAILED"
    assert states(engine, uuid)["alpha", "fake"] == "IN-PROGRESS"


def test_what_never_ends_is_failed_by_the_sweep(engine: sa.Engine) -> None:
    cloud(engine)
    uuid = room(engine, Bus()).create("alpha", "fake")["uuid"]
    ended(engine)
    assert room(engine, Bus()).sweep() == 0
    later = room(engine, Bus(), timeutils.utcnow() + timedelta(minutes=10))
    assert later.sweep() == 1
    assert states(engine, uuid) == {("alpha", "fake"): "FAILED"}
    tomorrow = room(engine, Bus(), timeutils.utcnow() + timedelta(days=1, minutes=1))
    assert tomorrow.sweep() == 1, "it is forgotten"
    assert states(engine, uuid) == {}


def test_malformed_words_of_an_agent_are_refused(sqlite_engine: sa.Engine) -> None:
    discoveries = room(sqlite_engine, Bus())
    for wrong in (None, [1], [{"name": "x"}], "fake"):
        with pytest.raises(Invalid):
            discoveries.done("6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11", "alpha", wrong)  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        discoveries.done("x", "alpha", [])
