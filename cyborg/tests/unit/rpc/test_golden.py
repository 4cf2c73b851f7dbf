# SPDX-License-Identifier: Apache-2.0
"""Every message as version 1.0 of the contract has it on the wire, kept in files.

Today's code makes them and reads them. ``CYBORG_TEST_WRITE_GOLDEN=1`` writes those of new messages;
one that is there already is never written again: whoever changes it breaks the contract.
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

from cyborg.core import catalogue, hardware, job, wanted, wire
from cyborg.fixtures.broker import MEMORY, Bus, open_bus
from cyborg.fixtures.messages import EXAMPLES, HARDWARE, HOST
from cyborg.rpc import gate
from cyborg.rpc.agent import AgentClient
from cyborg.rpc.contract import CONTRACTS

FOLDER = Path(__file__).parent / "golden"
NAMES = [(contract, method) for contract in EXAMPLES for method in EXAMPLES[contract]]
# What differs from one message to the next.
PASSING = ("_unique_id", "_msg_id", "_reply_q")
CONTEXT = {"_context_request_id": "req-1", "_context_user": "user-1", "_context_roles": ["reader"]}


class Canned:
    """Answers each method of a contract as the examples have it."""

    def __init__(self, contract: str) -> None:
        self.contract = contract
        self.heard: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    def __getattr__(self, name: str) -> Any:
        if name not in EXAMPLES[self.contract]:
            raise AttributeError(name)

        def answer(ctxt: Any, **arguments: Any) -> Any:
            self.heard.put((name, arguments))
            return EXAMPLES[self.contract][name][1]

        return answer


class Wire:
    """A bus whose servers are canned, and all that went over it."""

    def __init__(self, bus: Bus, canned: dict[str, Canned]) -> None:
        self.bus, self.canned = bus, canned
        self.seen: list[dict[str, Any]] = []

    def call(self, contract: str, method: str) -> Any:
        """Call a method with the arguments of its example, by its client."""
        arguments = dict(EXAMPLES[contract][method][0])
        if contract == "conductor":
            return getattr(self.bus.conductor(), method)(**arguments)
        agent = AgentClient(self.bus.transport, self.bus.conf)
        return getattr(agent, method)(HOST, **arguments)

    def throw(self, contract: str, message: dict[str, Any]) -> None:
        """Put a message that a file holds onto a server's queue."""
        topic = f"{self.bus.conf.rpc.topic}.{contract}"
        envelope = {**message, "oslo.message": json.dumps(message["oslo.message"])}
        with kombu.Connection("memory://") as connection:
            connection.Producer().publish(envelope, serializer="json", routing_key=topic)


@pytest.fixture(scope="module")
def traffic() -> Iterator[Wire]:
    """One bus with both servers; what passes a gate is noted."""
    canned = {name: Canned(name) for name in EXAMPLES}
    read = gate._read
    with open_bus(MEMORY) as bus, pytest.MonkeyPatch.context() as patch:
        made = Wire(bus, canned)

        def note(message: Any, most: int) -> dict[str, Any]:
            envelope = json.loads(message.body)
            made.seen.append({**envelope, "oslo.message": json.loads(envelope["oslo.message"])})
            return read(message, most)

        patch.setattr(gate, "_read", note)
        with (
            bus.serving("conductor", canned["conductor"]),
            bus.serving("agent", canned["agent"], HOST),
        ):
            yield made


def path(contract: str, method: str) -> Path:
    """Return the file of a message."""
    return FOLDER / f"{contract}-1.0" / f"{method}.json"


def golden(contract: str, method: str) -> dict[str, Any]:
    """Return a message and its answer as version 1.0 has them."""
    kept: dict[str, Any] = json.loads(path(contract, method).read_text())
    return kept


def still(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with what passes replaced."""
    inner = {k: ("..." if k in PASSING else v) for k, v in message["oslo.message"].items()}
    inner = {k: v for k, v in inner.items() if not k.startswith("_context_")}
    return {**message, "oslo.message": inner}


def extended(value: Any) -> Any:
    """Return a body with a key more in each of its objects that has fields of ours."""
    if isinstance(value, list):
        return [extended(one) for one in value]
    if isinstance(value, dict):
        return {key: extended(one) for key, one in value.items()} | {"new": {"from": "1.1"}}
    return value


@pytest.mark.parametrize(("contract", "method"), NAMES)
def test_it_is_made_as_ever(traffic: Wire, contract: str, method: str) -> None:
    traffic.seen.clear()
    traffic.call(contract, method)
    asked, answered = map(still, traffic.seen)
    made = {"request": asked, "answer": answered}
    file = path(contract, method)
    if os.environ.get("CYBORG_TEST_WRITE_GOLDEN") == "1" and not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(made, indent=1) + "\n")
    assert made == golden(contract, method)


@pytest.mark.parametrize(("contract", "method"), NAMES)
def test_it_is_read_as_ever(traffic: Wire, contract: str, method: str) -> None:
    message = golden(contract, method)["request"]
    inner = message["oslo.message"]
    inner |= {"_unique_id": f"{contract}-{method}", "_msg_id": None, "_reply_q": None} | CONTEXT
    message["new"], inner["new"], inner["_context_new"] = 1, {"from": "1.1"}, ["x"]
    heard = traffic.canned[contract].heard
    while not heard.empty():
        heard.get()
    traffic.throw(contract, message)
    assert heard.get(timeout=10) == (method, dict(EXAMPLES[contract][method][0]))


@pytest.mark.parametrize(("contract", "method"), NAMES)
def test_its_answer_is_read_as_ever(traffic: Wire, contract: str, method: str) -> None:
    body = golden(contract, method)["answer"]["oslo.message"]
    assert body["failure"] is None
    assert body["result"] == {"ok": EXAMPLES[contract][method][1]}
    assert traffic.call(contract, method) == body["result"]["ok"]


def test_there_is_a_file_for_every_message_and_no_other() -> None:
    kept = {(f.parent.name, f.stem) for f in FOLDER.glob("*/*.json")}
    assert kept == {
        (f"{contract.name}-{contract.version}", method)
        for contract in CONTRACTS.values()
        for method in contract.methods
    }


def test_every_example_has_every_argument() -> None:
    for contract, method in NAMES:
        arguments = EXAMPLES[contract][method][0]
        assert set(arguments) == set(CONTRACTS[contract].methods[method].arguments), method


def argument(contract: str, method: str, name: str) -> Any:
    """Return an argument as a file has it."""
    return golden(contract, method)["request"]["oslo.message"]["args"][name]


def result(contract: str, method: str) -> Any:
    """Return an answer as a file has it."""
    return golden(contract, method)["answer"]["oslo.message"]["result"]["ok"]


def extended_report() -> Any:
    """Return a report of a newer agent, whose maps of free names stay as they were."""
    report = argument("conductor", "report", "report")
    made = extended(report)
    for mine, its in zip(report["devices"], made["devices"], strict=True):
        for key in ("std_board_info", "vendor_board_info"):
            its[key] = mine[key]
        its["deployables"][0]["attributes"] = mine["deployables"][0]["attributes"]
        handle = its["deployables"][0]["handles"][0]
        handle["info"] = mine["deployables"][0]["handles"][0]["info"]
    return made


def test_keys_of_a_newer_version_are_passed_over_at_any_depth() -> None:
    report = argument("conductor", "report", "report")
    assert wire.load_report(extended_report()) == wire.load_report(report)
    entries = report["drivers"]
    assert catalogue.load(extended(entries)) == catalogue.load(entries)
    for backend in argument("conductor", "hello", "drivers"):
        assert wire.load_backend(extended(backend)) == wire.load_backend(backend)
    outcomes = argument("conductor", "backends_applied", "outcomes")
    assert wanted.load_applied(extended(outcomes)) == wanted.load_applied(outcomes)
    wish = result("conductor", "backends_wanted")
    newer = extended(copy.deepcopy(wish))
    newer["backends"][0]["config"] = wish["backends"][0]["config"]
    assert wanted.load_host(newer) == wanted.load_host(wish)
    args = golden("agent", "job")["request"]["oslo.message"]["args"]
    work = extended(args["arguments"])
    work["items"][0]["accel"] = args["arguments"]["items"][0]["accel"]
    plain = [args["job"], args["kind"], args["seconds"]]
    assert job.load_work(plain[0], plain[1], work, plain[2]) == job.load_work(
        plain[0], plain[1], args["arguments"], plain[2]
    )
    seen = result("agent", "hardware")
    assert hardware.load(extended(seen)) == hardware.load(seen)
    assert HARDWARE in seen["hardware"]
