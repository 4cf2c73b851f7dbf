# SPDX-License-Identifier: Apache-2.0
"""Every message of version 1.0 of the contract on the wire, stored in files.

The current code must send and accept them. ``CYBORG_TEST_WRITE_GOLDEN=1`` writes the files of new
messages. An existing file is never overwritten: a change of it breaks the contract.
"""

import copy
import json
import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kombu
import pytest

from cyborg.core.drivers import desired_state, registry
from cyborg.core.inventory import report as hardware
from cyborg.core.inventory.report import BackendState, Report
from cyborg.core.jobs import job
from cyborg.rpc import filters as message_filter
from cyborg.rpc.client import make_agent_client
from cyborg.rpc.contract import CONTRACTS
from cyborg.tests.fixtures.bus.broker import MEMORY, Bus, open_bus
from cyborg.tests.fixtures.bus.messages import EXAMPLES, HARDWARE, HOST

FOLDER = Path(__file__).parent / "golden"
NAMES = [(contract, method) for contract in EXAMPLES for method in EXAMPLES[contract]]
# Keys whose values differ between messages.
VARIABLE_KEYS = ("_unique_id", "_msg_id", "_reply_q")
CONTEXT = {"_context_request_id": "req-1", "_context_user": "user-1", "_context_roles": ["reader"]}


class CannedEndpoint:
    """Endpoint that answers each method of a contract with its example."""

    def __init__(self, contract: str) -> None:
        self.contract = contract
        self.received: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    def __getattr__(self, name: str) -> Any:
        if name not in EXAMPLES[self.contract]:
            raise AttributeError(name)

        def answer(ctxt: Any, **arguments: Any) -> Any:
            self.received.put((name, arguments))
            return EXAMPLES[self.contract][name][1]

        return answer


class RecordedBus:
    """Bus with canned endpoints, which records all messages."""

    def __init__(self, bus: Bus, canned: dict[str, CannedEndpoint]) -> None:
        self.bus, self.canned = bus, canned
        self.messages: list[dict[str, Any]] = []

    def call(self, contract: str, method: str) -> Any:
        """Call a method with the arguments of its example, by its client."""
        arguments = dict(EXAMPLES[contract][method][0])
        if contract == "conductor":
            return getattr(self.bus.conductor(), method)(**arguments)
        agent = make_agent_client(self.bus.transport, self.bus.conf)
        return getattr(agent, method)(HOST, **arguments)

    def messages_of(self, method: str) -> list[dict[str, Any]]:
        """Return the recorded request of a method and its answer."""
        bodies = [message["oslo.message"] for message in self.messages]
        ids = {body["_msg_id"] for body in bodies if body.get("method") == method}
        return [m for m in self.messages if m["oslo.message"].get("_msg_id") in ids]

    def publish_raw(self, contract: str, message: dict[str, Any]) -> None:
        """Publish a message from a file to a server's queue."""
        topic = f"{self.bus.conf.rpc.topic}.{contract}"
        envelope = {**message, "oslo.message": json.dumps(message["oslo.message"])}
        with kombu.Connection("memory://") as connection:
            connection.Producer().publish(envelope, serializer="json", routing_key=topic)


@pytest.fixture(scope="module")
def recorded_bus() -> Iterator[RecordedBus]:
    """Bus with both servers, which records the accepted messages."""
    canned = {name: CannedEndpoint(name) for name in EXAMPLES}
    read = message_filter.decode
    with open_bus(MEMORY) as bus, pytest.MonkeyPatch.context() as patch:
        built = RecordedBus(bus, canned)

        def record(message: Any, max_bytes: int) -> dict[str, Any]:
            # A thread that an earlier test left may send other calls, over its own exchange.
            # Answers have no exchange.
            if message.delivery_info["exchange"] in ("", bus.conf.rpc.topic):
                envelope = json.loads(message.body)
                body = json.loads(envelope["oslo.message"])
                built.messages.append({**envelope, "oslo.message": body})
            return read(message, max_bytes)

        patch.setattr(message_filter, "decode", record)
        with (
            bus.serving("conductor", canned["conductor"]),
            bus.serving("agent", canned["agent"], HOST),
        ):
            yield built


def path(contract: str, method: str) -> Path:
    """Return the file of a message."""
    return FOLDER / f"{contract}-1.0" / f"{method}.json"


def golden(contract: str, method: str) -> dict[str, Any]:
    """Return the stored request and answer of version 1.0."""
    stored: dict[str, Any] = json.loads(path(contract, method).read_text())
    return stored


def normalize(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its variable values replaced."""
    inner = {k: ("..." if k in VARIABLE_KEYS else v) for k, v in message["oslo.message"].items()}
    inner = {k: v for k, v in inner.items() if not k.startswith("_context_")}
    return {**message, "oslo.message": inner}


def add_unknown_keys(value: Any) -> Any:
    """Return a body with an unknown key in each of its objects."""
    if isinstance(value, list):
        return [add_unknown_keys(item) for item in value]
    if isinstance(value, dict):
        return {key: add_unknown_keys(item) for key, item in value.items()} | {
            "new": {"from": "1.1"}
        }
    return value


@pytest.mark.parametrize(("contract", "method"), NAMES)
def test_client_sends_the_golden_message(
    recorded_bus: RecordedBus, contract: str, method: str
) -> None:
    recorded_bus.messages.clear()
    recorded_bus.call(contract, method)
    request, answer = map(normalize, recorded_bus.messages_of(method))
    built = {"request": request, "answer": answer}
    file = path(contract, method)
    if os.environ.get("CYBORG_TEST_WRITE_GOLDEN") == "1" and not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(built, indent=1) + "\n")
    assert built == golden(contract, method)


@pytest.mark.parametrize(("contract", "method"), NAMES)
def test_server_accepts_the_golden_message(
    recorded_bus: RecordedBus, contract: str, method: str
) -> None:
    message = golden(contract, method)["request"]
    inner = message["oslo.message"]
    inner |= {"_unique_id": f"{contract}-{method}", "_msg_id": None, "_reply_q": None} | CONTEXT
    message["new"], inner["new"], inner["_context_new"] = 1, {"from": "1.1"}, ["x"]
    received = recorded_bus.canned[contract].received
    while not received.empty():
        received.get()
    recorded_bus.publish_raw(contract, message)
    assert received.get(timeout=120) == (method, dict(EXAMPLES[contract][method][0]))


@pytest.mark.slow
@pytest.mark.parametrize(("contract", "method"), NAMES)
def test_client_accepts_the_golden_answer(
    recorded_bus: RecordedBus, contract: str, method: str
) -> None:
    body = golden(contract, method)["answer"]["oslo.message"]
    assert body["failure"] is None
    assert body["result"] == {"ok": EXAMPLES[contract][method][1]}
    assert recorded_bus.call(contract, method) == body["result"]["ok"]


@pytest.mark.static
def test_golden_files_match_the_contract() -> None:
    stored = {(f.parent.name, f.stem) for f in FOLDER.glob("*/*.json")}
    assert stored == {
        (f"{contract.name}-{contract.version}", method)
        for contract in CONTRACTS.values()
        for method in contract.methods
    }


def test_examples_have_every_argument() -> None:
    for contract, method in NAMES:
        arguments = EXAMPLES[contract][method][0]
        assert set(arguments) == set(CONTRACTS[contract].methods[method].arguments), method


def argument(contract: str, method: str, name: str) -> Any:
    """Return an argument of a stored request."""
    return golden(contract, method)["request"]["oslo.message"]["args"][name]


def result(contract: str, method: str) -> Any:
    """Return the result of a stored answer."""
    return golden(contract, method)["answer"]["oslo.message"]["result"]["ok"]


def extended_report() -> Any:
    """Return a report with unknown keys, except in maps with free names."""
    report = argument("conductor", "report", "report")
    built = add_unknown_keys(report)
    for original, extended_device in zip(report["devices"], built["devices"], strict=True):
        for key in ("std_board_info", "vendor_board_info"):
            extended_device[key] = original[key]
        extended_device["deployables"][0]["attributes"] = original["deployables"][0]["attributes"]
        handle = extended_device["deployables"][0]["handles"][0]
        handle["info"] = original["deployables"][0]["handles"][0]["info"]
    return built


@pytest.mark.slow
def test_keys_of_a_newer_version_are_ignored_at_any_depth() -> None:
    report = argument("conductor", "report", "report")
    assert Report.load(extended_report()) == Report.load(report)
    entries = report["drivers"]
    assert registry.load(add_unknown_keys(entries)) == registry.load(entries)
    for backend in argument("conductor", "hello", "drivers"):
        state = BackendState.load_without_details(backend)
        assert BackendState.load_without_details(add_unknown_keys(backend)) == state
    outcomes = argument("conductor", "report_backend_outcomes", "outcomes")
    assert desired_state.load_outcomes(add_unknown_keys(outcomes)) == desired_state.load_outcomes(
        outcomes
    )
    desired = result("conductor", "get_desired_backends")
    with_unknown_keys = add_unknown_keys(copy.deepcopy(desired))
    with_unknown_keys["backends"][0]["config"] = desired["backends"][0]["config"]
    assert desired_state.load_host(with_unknown_keys) == desired_state.load_host(desired)
    args = golden("agent", "job")["request"]["oslo.message"]["args"]
    work = add_unknown_keys(args["arguments"])
    work["items"][0]["accel"] = args["arguments"]["items"][0]["accel"]
    plain = [args["job"], args["kind"], args["timeout"]]
    assert job.load_job_spec(plain[0], plain[1], work, plain[2]) == job.load_job_spec(
        plain[0], plain[1], args["arguments"], plain[2]
    )
    answer = result("agent", "hardware")
    assert hardware.load_answer(add_unknown_keys(answer)) == hardware.load_answer(answer)
    assert HARDWARE in answer["hardware"]
