# SPDX-License-Identifier: Apache-2.0
"""A call whose conductor ends before it answers is sent again, as a copy of the same call."""

import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from cyborg.core.errors import STOPPING, TimedOut, Unavailable
from cyborg.rpc import client as client_module
from cyborg.rpc.client import Client, make_conductor_client
from cyborg.rpc.contract import CONDUCTOR
from cyborg.rpc.envelope import wrap_error
from cyborg.tests.fixtures.bus.broker import Bus, open_bus
from cyborg.tests.fixtures.machine.processes import ends_within

pytestmark = pytest.mark.services

SLACK = 20.0  # additional seconds for a busy machine


class Conductor:
    """Endpoint that records the ids of calls.

    The first ``silent`` calls get no answer; the first ``stopping`` ones, that it stops.
    """

    def __init__(self, silent: int = 0, stopping: int = 0) -> None:
        self.stopping = stopping
        self.ids: list[str] = []
        self.ends: list[datetime | None] = []
        self.silent = silent
        self.end = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def answer(ctxt: Any, **arguments: Any) -> Any:
            self.ids.append(ctxt.call_id)
            self.ends.append(ctxt.answer_by)
            if len(self.ids) <= self.silent:
                self.end.wait(SLACK)
            if len(self.ids) <= self.stopping:
                raise Unavailable("the conductor stops", **{STOPPING: True})
            return arguments

        return answer


@pytest.fixture
def bus(rabbit_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bus]:
    monkeypatch.setattr(client_module, "REPEAT_AFTER", 1.0)
    options = {"topic": f"test-{uuid4().hex[:12]}", "timeout": 4.0}
    with open_bus(rabbit_url, rpc=options) as found:
        yield found


def test_call_without_an_answer_is_repeated_with_its_id(bus: Bus) -> None:
    conductor = Conductor(silent=1)
    with bus.serving("conductor", conductor):
        assert bus.conductor().discovery_create("h")["host"] == "h"
        conductor.end.set()
    first, second = conductor.ids
    assert first == second


def test_call_of_a_stopping_conductor_is_repeated_with_its_id(bus: Bus) -> None:
    conductor = Conductor(stopping=2)
    with bus.serving("conductor", conductor):
        assert bus.conductor().discovery_create("h")["host"] == "h"
    assert len(conductor.ids) == 3
    assert len(set(conductor.ids)) == 1


def test_call_while_all_conductors_stop_is_unavailable(bus: Bus) -> None:
    conductor = Conductor(stopping=100)
    with bus.serving("conductor", conductor):
        with pytest.raises(Unavailable, match="the conductor stops") as found:
            bus.conductor().discovery_create("h")
        assert not isinstance(found.value, TimedOut), "the call was certainly not carried out"
        count = len(conductor.ids)
        with pytest.raises(Unavailable):
            bus.conductor().get_desired_backends("h", str(uuid4()))
        assert len(conductor.ids) == count + 1, "an agent repeats its calls by itself"


def test_copies_of_a_call_have_the_end_of_the_first_one(bus: Bus) -> None:
    conductor, start = Conductor(silent=1), datetime(2030, 1, 31)
    readings = list[tuple[float, float]]()

    def time_at(moment: float) -> datetime:
        readings.append((moment, time.monotonic()))
        return start + timedelta(seconds=moment)

    with bus.serving("conductor", conductor):
        began = time.monotonic()
        make_conductor_client(bus.transport, bus.conf, time_at).discovery_create("h")
        conductor.end.set()
    ((seconds, read_at),) = readings
    # From the begin of the call, which is between the two readings of the clock.
    assert began <= seconds - bus.conf.rpc.timeout <= read_at
    assert conductor.ends == [start + timedelta(seconds=seconds)] * 2


def test_call_has_no_end_while_the_time_of_the_database_is_unknown(bus: Bus) -> None:
    conductor = Conductor()
    with bus.serving("conductor", conductor):
        make_conductor_client(bus.transport, bus.conf, lambda _: None).discovery_create("h")
    assert conductor.ends == [None]


def test_calls_have_different_ids(bus: Bus) -> None:
    conductor = Conductor()
    with bus.serving("conductor", conductor):
        for _ in range(2):
            bus.conductor().discovery_create("h")
    assert len(set(conductor.ids)) == 2


@pytest.mark.matrix
def test_call_that_is_never_answered_ends_at_the_timeout(bus: Bus) -> None:
    conductor = Conductor(silent=100)
    with bus.serving("conductor", conductor):
        with ends_within(4.0 + SLACK), pytest.raises(TimedOut, match=r"did not answer in 4 s"):
            bus.conductor().discovery_create("h")
        conductor.end.set()
    assert 2 <= len(conductor.ids) <= 4
    assert len(set(conductor.ids)) == 1


@pytest.mark.matrix
def test_call_of_an_agent_is_sent_once(bus: Bus) -> None:
    """It is large, and the agent repeats it by itself."""
    conductor = Conductor(silent=100)
    with bus.serving("conductor", conductor):
        with pytest.raises(TimedOut):
            bus.conductor().get_desired_backends("h", str(uuid4()))
        conductor.end.set()
    assert len(conductor.ids) == 1


def test_call_with_an_unanswered_copy_is_not_certainly_undone(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_module.Client.__new__(client_module.Client)

    def fail(call: Any, deadline: float) -> Any:
        raise Unavailable("no cyborg-conductor listens")

    monkeypatch.setattr(client, "_send", fail)
    call = client_module._Call("m", {}, {}, "q", "conductor.m", None)  # type: ignore[arg-type]
    with pytest.raises(Unavailable) as found:
        client._finish(call, 0.0)
    assert not isinstance(found.value, TimedOut)
    call.may_be_executed = True
    with pytest.raises(TimedOut, match="an earlier copy may have been carried out"):
        client._finish(call, 0.0)


def test_call_of_a_stopping_conductor_waits_as_long_for_the_next_one(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one may have kept the call for most of the time that it may wait for a server."""
    client = Client(CONDUCTOR, bus.transport, bus.conf)
    ends = list[float | None]()
    stopping = wrap_error(Unavailable("the conductor stops", **{STOPPING: True}))

    def send(call: Any, deadline: float) -> Any:
        ends.append(call.end)
        call.end = 1.0
        return stopping if len(ends) == 1 else {"ok": 5}

    monkeypatch.setattr(client, "_send", send)
    call = client_module._Call("m", {}, {}, "q", "m", None, True)  # type: ignore[arg-type]
    assert client._finish(call, time.monotonic() + SLACK) == 5
    assert ends == [None, None]
    assert not call.may_be_executed
