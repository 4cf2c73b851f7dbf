# SPDX-License-Identifier: Apache-2.0
"""Calls over a bus, inside the process and on RabbitMQ."""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from oslo_context.context import RequestContext

from cyborg.core.errors import CyborgError, Invalid, NoHandle, TimedOut, Unavailable
from cyborg.rpc.client import Client, make_agent_client
from cyborg.rpc.contract import CONDUCTOR, Contract, Method
from cyborg.tests.fixtures.bus.broker import MEMORY, Bus, open_bus
from cyborg.tests.fixtures.machine.processes import busy_factor, ends_within, wait_until

REPORT_LIMIT = 65536


class Recorder:
    """Stub with every method of the conductor's contract; records its calls."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.contexts: list[RequestContext] = []
        self.answer: Any = None
        self.error: Exception | None = None
        self.proceed: threading.Event | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in CONDUCTOR.methods:
            raise AttributeError(name)

        def record(ctxt: RequestContext, **arguments: Any) -> Any:
            self.calls.append((name, arguments))
            self.contexts.append(ctxt)
            if self.proceed is not None:
                self.proceed.wait(20)
            if self.error is not None:
                raise self.error
            return self.answer

        return record

    def secret(self, ctxt: RequestContext) -> str:
        raise AssertionError("not part of the contract")


@pytest.fixture(
    scope="module", params=["memory", pytest.param("rabbit", marks=pytest.mark.services)]
)
def bus_and_recorder(request: pytest.FixtureRequest) -> Iterator[tuple[Bus, Recorder]]:
    """One server for all tests: oslo.messaging takes a second to stop one."""
    url = MEMORY if request.param == "memory" else request.getfixturevalue("rabbit_url")
    endpoint = Recorder()
    with (
        open_bus(url, conductor={"max_report_bytes": REPORT_LIMIT}) as bus,
        bus.serving("conductor", endpoint),
    ):
        yield bus, endpoint


@pytest.fixture
def bus(bus_and_recorder: tuple[Bus, Recorder]) -> Bus:
    return bus_and_recorder[0]


@pytest.fixture
def recorder(bus_and_recorder: tuple[Bus, Recorder]) -> Recorder:
    bus_and_recorder[1].reset()
    return bus_and_recorder[1]


def test_call_transfers_plain_values(bus: Bus, recorder: Recorder) -> None:
    recorder.answer = {"uuid": "u", "deep": [{"null": None, "é": 1.5, "yes": True}]}
    assert bus.conductor().discovery_create(host="h", driver=None) == recorder.answer
    assert recorder.calls == [("discovery_create", {"host": "h", "driver": None})]


def test_call_transfers_tuples_as_lists(bus: Bus, recorder: Recorder) -> None:
    bus.conductor().device_profile_delete(("a", "b"))
    assert recorder.calls == [("device_profile_delete", {"keys": ["a", "b"]})]


def test_call_raises_the_error_of_the_method(bus: Bus, recorder: Recorder) -> None:
    recorder.error = NoHandle("none is free", reasons={"r": [{"reason": "taken"}]})
    with pytest.raises(NoHandle, match="none is free") as raised:
        bus.conductor().arq_bind([], None)
    assert raised.value.details == {"reasons": {"r": [{"reason": "taken"}]}}


def test_unexpected_error_reveals_only_the_request_id(bus: Bus, recorder: Recorder) -> None:
    recorder.error = RuntimeError("SELECT password FROM users")
    with pytest.raises(CyborgError) as raised:
        bus.conductor().device_set_status("u", "enabled")
    assert type(raised.value) is CyborgError
    assert raised.value.message == (
        f"internal error: see the log, request id {recorder.contexts[0].request_id}"
    )


def test_call_sends_the_context_without_the_token(bus: Bus, recorder: Recorder) -> None:
    context = RequestContext(
        auth_token="secret-token", user_id="u1", project_id="p1", roles=["member"], is_admin=False
    )
    bus.conductor().device_set_status("u", "enabled")
    received = recorder.contexts[0]
    assert (received.request_id, received.user_id) == (context.request_id, "u1")
    assert (received.project_id, received.roles) == ("p1", ["member"])
    assert received.auth_token is None


def test_call_is_logged_at_debug_with_its_request_id(
    bus: Bus, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    context = RequestContext(user_id="u1")
    with caplog.at_level(logging.DEBUG, "cyborg.rpc"):
        bus.conductor().device_set_status("u", "enabled")
    calling, serving = (r for r in caplog.records if r.name.startswith("cyborg.rpc."))
    assert calling.getMessage() == "Calling conductor.device_set_status"
    assert calling.context.request_id == context.request_id  # type: ignore[attr-defined]
    assert serving.getMessage().startswith("Serving conductor.device_set_status from ")
    assert serving.getMessage().endswith(context.request_id)


def test_expected_error_is_one_line(
    bus: Bus, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.error = NoHandle("none is free")
    with caplog.at_level(logging.INFO), pytest.raises(NoHandle):
        bus.conductor().arq_bind([], None)
    (record,) = caplog.records
    assert record.getMessage().startswith("Refused call conductor.arq_bind from ")
    assert record.exc_info is None


def test_report_has_its_own_size_limit(bus: Bus, recorder: Recorder) -> None:
    recorder.answer = {"accepted": True}
    client = bus.conductor()
    client.report({"fill": "x" * (REPORT_LIMIT - 100)})
    with pytest.raises(Invalid, match=r"conductor\.report: .* more than the limit of 65536"):
        client.report({"fill": "x" * REPORT_LIMIT})
    client.device_profile_delete(["x" * REPORT_LIMIT])
    with pytest.raises(Invalid, match="limit of 1048576"):
        client.device_profile_delete(["x" * 1048576])
    assert len(recorder.calls) == 2


def test_server_checks_the_size_too(bus: Bus, recorder: Recorder) -> None:
    unchecked = Contract("conductor", "1.0", {"report": Method(("report",)), "secret": Method(())})
    with pytest.raises(Invalid, match="limit of 65536"):
        Client(unchecked, bus.transport, bus.conf).call("report", report="x" * REPORT_LIMIT)
    assert recorder.calls == []


def test_too_large_or_malformed_answer_is_an_internal_error(bus: Bus, recorder: Recorder) -> None:
    recorder.answer = "x" * REPORT_LIMIT
    for answer in ("x" * REPORT_LIMIT, {"at": object()}):
        recorder.answer = answer
        with pytest.raises(CyborgError, match="internal error") as raised:
            bus.conductor().arq_create("p", None)
        assert type(raised.value) is CyborgError, "the error is not the caller's"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"uuid": "u"}, "the argument status is missing"),
        ({"uuid": "u", "status": "s", "more": 1}, "the argument more is unknown"),
    ],
)
def test_missing_and_unknown_arguments_are_refused(
    bus: Bus, recorder: Recorder, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        Client(CONDUCTOR, bus.transport, bus.conf).call("device_set_status", **arguments)
    assert recorder.calls == []


@pytest.mark.slow
def test_method_outside_the_contract_cannot_be_called(bus: Bus, recorder: Recorder) -> None:
    contract = Contract("conductor", "1.0", {"secret": Method(())})
    with pytest.raises(Unavailable, match="NoSuchMethod"):
        Client(contract, bus.transport, bus.conf).call("secret")


def test_newer_major_version_is_refused(bus: Bus, recorder: Recorder) -> None:
    newer = Contract("conductor", "2.0", CONDUCTOR.methods)
    with pytest.raises(Unavailable, match="UnsupportedVersion"):
        Client(newer, bus.transport, bus.conf).call("arq_create", device_profile_name="p")


@pytest.mark.slow
def test_call_without_an_answer_times_out(bus: Bus, recorder: Recorder) -> None:
    recorder.proceed = threading.Event()
    bus.conf.set_override("timeout", 0.2, group="rpc")
    client = bus.conductor()
    try:
        with (
            ends_within(9),  # less than the default timeout
            pytest.raises(TimedOut, match=r"conductor\.arq_create did not answer in 0\.2 s"),
        ):
            client.arq_create("p", None)
    finally:
        recorder.proceed.set()
        bus.conf.set_override("timeout", 10.0, group="rpc")


@pytest.mark.slow
def test_call_that_waits_when_its_connections_are_closed_times_out(
    bus: Bus, recorder: Recorder
) -> None:
    """The driver has forgotten the queue of the reply when the wait ends."""
    recorder.proceed = threading.Event()
    topic, url = bus.conf.rpc.topic, str(bus.conf.transport_url)
    with (
        open_bus(url, rpc={"topic": topic, "timeout": 1.0}) as caller,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(caller.conductor().arq_create, "p", None)
        try:
            wait_until("the call is served", lambda: recorder.calls)
            caller.transport.cleanup()
            with pytest.raises(TimedOut, match=r"arq_create has no answer: this process stops"):
                call.result(30)
        finally:
            recorder.proceed.set()


class Host:
    """Stub of an agent's endpoint, which returns its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def discovery(self, ctxt: Any, driver: Any = None, discovery_id: Any = None) -> dict[str, Any]:
        return {"status": self.name, "discovery_id": discovery_id}

    def hardware(self, ctxt: Any, driver: Any = None) -> dict[str, Any]:
        return {"hardware": [self.name]}

    def sync_backends(self, ctxt: Any, generation: Any) -> dict[str, Any]:
        return {"generation": generation}

    def find_driver(self, ctxt: Any, driver: Any) -> dict[str, Any]:
        return {"driver": None}

    def job(self, ctxt: Any, job: Any, kind: Any, arguments: Any, seconds: Any) -> dict[str, Any]:
        return {"state": "running", "error": None}

    def count_free_ports(self, ctxt: Any, instance: Any) -> dict[str, Any]:
        return {"free": None}


@pytest.mark.slow
def test_agent_client_calls_the_agent_of_the_host(bus: Bus) -> None:
    client = make_agent_client(bus.transport, bus.conf)
    with (
        bus.serving("agent", Host("one"), "one"),
        bus.serving("agent", Host("two.example.org"), "two.example.org"),
    ):
        for _ in range(3):
            assert client.hardware("two.example.org") == {"hardware": ["two.example.org"]}
            assert client.discovery("one", None, "d")["status"] == "one"


@pytest.mark.slow
def test_call_takes_milliseconds(bus: Bus, recorder: Recorder) -> None:
    client = bus.conductor()
    client.device_set_status("u", "enabled")
    times = []
    for _ in range(20):
        started = time.perf_counter()
        client.device_set_status("u", "enabled")
        times.append(time.perf_counter() - started)
    # The fastest: on a busy machine most calls wait for a core.
    assert min(times) < 0.025 * busy_factor(), "a transport polls: fake:// takes 50 ms a call"


@pytest.mark.slow
def test_buses_of_one_process_are_separate(memory_bus: Bus) -> None:
    own, other = Recorder(), Recorder()
    with (
        open_bus(MEMORY) as other_bus,
        memory_bus.serving("conductor", own),
        other_bus.serving("conductor", other),
    ):
        memory_bus.conductor().device_set_status("u", "enabled")
        assert (len(own.calls), len(other.calls)) == (1, 0)
