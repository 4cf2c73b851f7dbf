# SPDX-License-Identifier: Apache-2.0
"""Calls over a bus, inside the process and on RabbitMQ."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from oslo_context.context import RequestContext

from cyborg.core.errors import CyborgError, Invalid, NoHandle, TimedOut, Unavailable
from cyborg.fixtures.broker import MEMORY, Bus, open_bus
from cyborg.rpc.agent import AgentClient
from cyborg.rpc.client import Client
from cyborg.rpc.contract import CONDUCTOR, Contract, Method

REPORT_LIMIT = 65536


class Recorder:
    """Has every method of the conductor's contract; notes what it is called with."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.contexts: list[RequestContext] = []
        self.answer: Any = None
        self.error: Exception | None = None
        self.hold: threading.Event | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in CONDUCTOR.methods:
            raise AttributeError(name)

        def take(ctxt: RequestContext, **arguments: Any) -> Any:
            self.calls.append((name, arguments))
            self.contexts.append(ctxt)
            if self.hold is not None:
                self.hold.wait(20)
            if self.error is not None:
                raise self.error
            return self.answer

        return take

    def secret(self, ctxt: RequestContext) -> str:
        raise AssertionError("nobody may call this")


@pytest.fixture(
    scope="module", params=["memory", pytest.param("rabbit", marks=pytest.mark.services)]
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Bus, Recorder]]:
    """One server for all tests: oslo.messaging takes a second to stop one."""
    url = MEMORY if request.param == "memory" else request.getfixturevalue("rabbit_url")
    endpoint = Recorder()
    with (
        open_bus(url, conductor={"max_report_bytes": REPORT_LIMIT}) as bus,
        bus.serving("conductor", endpoint),
    ):
        yield bus, endpoint


@pytest.fixture
def bus(served: tuple[Bus, Recorder]) -> Bus:
    return served[0]


@pytest.fixture
def recorder(served: tuple[Bus, Recorder]) -> Recorder:
    served[1].forget()
    return served[1]


def test_plain_values_come_through(bus: Bus, recorder: Recorder) -> None:
    recorder.answer = {"uuid": "u", "deep": [{"null": None, "é": 1.5, "yes": True}]}
    assert bus.conductor().discovery_create(host="h", driver=None) == recorder.answer
    assert recorder.calls == [("discovery_create", {"host": "h", "driver": None})]


def test_tuples_arrive_as_lists(bus: Bus, recorder: Recorder) -> None:
    bus.conductor().device_profile_delete(("a", "b"))
    assert recorder.calls == [("device_profile_delete", {"keys": ["a", "b"]})]


def test_an_error_arrives_as_itself(bus: Bus, recorder: Recorder) -> None:
    recorder.error = NoHandle("none is free", reasons={"r": [{"reason": "taken"}]})
    with pytest.raises(NoHandle, match="none is free") as raised:
        bus.conductor().arq_patch([], "bind", None)
    assert raised.value.details == {"reasons": {"r": [{"reason": "taken"}]}}


def test_a_surprise_tells_nothing_but_the_request_id(bus: Bus, recorder: Recorder) -> None:
    recorder.error = RuntimeError("SELECT password FROM users")
    with pytest.raises(CyborgError) as raised:
        bus.conductor().device_set_status("u", "enabled")
    assert type(raised.value) is CyborgError
    assert raised.value.message == (
        f"internal error: the log has it under request id {recorder.contexts[0].request_id}"
    )


def test_who_asks_comes_along_without_the_token(bus: Bus, recorder: Recorder) -> None:
    asking = RequestContext(
        auth_token="secret-token", user_id="u1", project_id="p1", roles=["member"], is_admin=False
    )
    bus.conductor().device_set_status("u", "enabled")
    heard = recorder.contexts[0]
    assert (heard.request_id, heard.user_id) == (asking.request_id, "u1")
    assert (heard.project_id, heard.roles) == ("p1", ["member"])
    assert heard.auth_token is None


def test_a_report_has_its_own_limit(bus: Bus, recorder: Recorder) -> None:
    recorder.answer = {"accepted": True}
    client = bus.conductor()
    client.report({"fill": "x" * (REPORT_LIMIT - 100)})
    with pytest.raises(Invalid, match=r"conductor\.report: .* more than the limit of 65536"):
        client.report({"fill": "x" * REPORT_LIMIT})
    client.device_profile_delete(["x" * REPORT_LIMIT])
    with pytest.raises(Invalid, match="limit of 1048576"):
        client.device_profile_delete(["x" * 1048576])
    assert len(recorder.calls) == 2


def test_the_receiver_measures_too(bus: Bus, recorder: Recorder) -> None:
    careless = Contract("conductor", "1.0", {"report": Method(("report",)), "secret": Method(())})
    with pytest.raises(Invalid, match="limit of 65536"):
        Client(careless, bus.transport, bus.conf).call("report", report="x" * REPORT_LIMIT)
    assert recorder.calls == []


def test_an_answer_that_is_too_large_or_not_plain_is_refused(bus: Bus, recorder: Recorder) -> None:
    recorder.answer = "x" * REPORT_LIMIT
    for answer in ("x" * REPORT_LIMIT, {"at": object()}):
        recorder.answer = answer
        with pytest.raises(CyborgError, match="internal error") as bad:
            bus.conductor().arq_create("p", None)
        assert type(bad.value) is CyborgError, "the mistake is not the caller's"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"uuid": "u"}, "the argument status is missing"),
        ({"uuid": "u", "status": "s", "more": 1}, "the argument more is unknown"),
    ],
)
def test_other_arguments_are_refused(
    bus: Bus, recorder: Recorder, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(Invalid, match=told):
        Client(CONDUCTOR, bus.transport, bus.conf).call("device_set_status", **arguments)
    assert recorder.calls == []


def test_what_is_not_in_the_contract_cannot_be_called(bus: Bus, recorder: Recorder) -> None:
    curious = Contract("conductor", "1.0", {"secret": Method(())})
    with pytest.raises(Unavailable, match="NoSuchMethod"):
        Client(curious, bus.transport, bus.conf).call("secret")


def test_a_newer_major_version_is_not_understood(bus: Bus, recorder: Recorder) -> None:
    newer = Contract("conductor", "2.0", CONDUCTOR.methods)
    with pytest.raises(Unavailable, match="UnsupportedVersion"):
        Client(newer, bus.transport, bus.conf).call("arq_create", device_profile_name="p")


def test_an_answer_is_waited_for_so_long(bus: Bus, recorder: Recorder) -> None:
    recorder.hold = threading.Event()
    bus.conf.set_override("timeout", 0.2, group="rpc")
    client = bus.conductor()
    began = time.monotonic()
    try:
        with pytest.raises(TimedOut, match=r"conductor\.arq_create did not answer in 0\.2 s"):
            client.arq_create("p", None)
    finally:
        recorder.hold.set()
        bus.conf.set_override("timeout", 10.0, group="rpc")
    assert time.monotonic() - began < 5


class Host:
    """An agent's endpoint that says its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def discovery(self, ctxt: Any, driver: Any = None, discovery_id: Any = None) -> dict[str, Any]:
        return {"status": self.name, "discovery_id": discovery_id}

    def hardware(self, ctxt: Any, driver: Any = None) -> dict[str, Any]:
        return {"hardware": [self.name]}

    def wanted(self, ctxt: Any, revision: Any) -> dict[str, Any]:
        return {"revision": revision}

    def job(self, ctxt: Any, job: Any, kind: Any, arguments: Any, seconds: Any) -> dict[str, Any]:
        return {"state": "running", "error": None}


def test_an_agent_is_called_by_its_host(bus: Bus) -> None:
    client = AgentClient(bus.transport, bus.conf)
    with (
        bus.serving("agent", Host("one"), "one"),
        bus.serving("agent", Host("two.example.org"), "two.example.org"),
    ):
        for _ in range(3):
            assert client.hardware("two.example.org") == {"hardware": ["two.example.org"]}
            assert client.discovery("one", None, "d")["status"] == "one"


def test_a_call_takes_milliseconds(bus: Bus, recorder: Recorder) -> None:
    client = bus.conductor()
    client.device_set_status("u", "enabled")
    times = []
    for _ in range(20):
        began = time.perf_counter()
        client.device_set_status("u", "enabled")
        times.append(time.perf_counter() - began)
    assert sorted(times)[10] < 0.025, "polling somewhere: fake:// takes 50 ms a call"


def test_two_buses_of_one_process_do_not_hear_each_other(memory_bus: Bus) -> None:
    mine, other = Recorder(), Recorder()
    with (
        open_bus(MEMORY) as stranger,
        memory_bus.serving("conductor", mine),
        stranger.serving("conductor", other),
    ):
        memory_bus.conductor().device_set_status("u", "enabled")
        assert (len(mine.calls), len(other.calls)) == (1, 0)
