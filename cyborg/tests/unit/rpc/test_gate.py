# SPDX-License-Identifier: Apache-2.0
"""What the gate of the bus lets in, what it refuses, and what it says of it."""

import json
import zlib
from types import SimpleNamespace
from typing import Any

import kombu
import pytest

from cyborg.core.errors import Invalid
from cyborg.fixtures.broker import Bus, open_bus
from cyborg.fixtures.malformed import wrapped
from cyborg.fixtures.processes import until
from cyborg.rpc import gate
from cyborg.rpc.client import Client
from cyborg.rpc.contract import CONDUCTOR, Contract, Method

MOST = 1000
CALL = {"method": "hello", "args": {}, "version": "1.0", "_unique_id": "u"}
ANSWER = {"_msg_id": "m", "result": {"ok": 1}, "failure": None, "ending": True}


class Channel:
    """Turns raw messages into kombu's; notes what was refused and what was acknowledged."""

    no_ack_consumers = None

    def __init__(self) -> None:
        self.rejected: list[tuple[str, bool]] = []
        self.acknowledged: list[str] = []

    def message_to_python(self, raw: Any) -> Any:
        return kombu.Message(
            body=raw.body,
            delivery_tag=raw.delivery_tag,
            content_type=raw.properties.get("content_type"),
            content_encoding="utf-8",
            headers=raw.headers,
            channel=self,
        )

    def basic_reject(self, tag: str, requeue: bool) -> None:
        self.rejected.append((tag, requeue))

    def basic_ack(self, tag: str, multiple: bool = False) -> None:
        self.acknowledged.append(tag)


class Door:
    """One gate, and all that came through."""

    def __init__(self, check: Any = gate.check_call, **options: Any) -> None:
        self.channel = Channel()
        self.taken: list[gate.Message] = []
        queue = SimpleNamespace(channel=self.channel)
        consumer = SimpleNamespace(queue=queue, queue_name="q", callback=self.taken.append)
        self.gate = gate.Gate(consumer, check, MOST, **options)

    def push(self, body: bytes, headers: Any = None, **properties: Any) -> None:
        said = {"content_type": "application/json", **properties}
        raw = SimpleNamespace(body=body, headers=headers, properties=said, delivery_tag="t")
        self.gate(raw)


def call(**changes: Any) -> bytes:
    return wrapped({**CALL, **changes})


def test_a_call_passes_with_its_sender(caplog: pytest.LogCaptureFixture) -> None:
    door = Door()
    door.push(
        call(_context_sender="cyborg-conductor@liar", _timeout=5, new=1),
        app_id="cyborg-agent@compute-1",
        user_id="cyborg",
    )
    (message,) = door.taken
    assert message["method"] == "hello"
    assert message["_context_sender"] == "cyborg-agent@compute-1, broker user cyborg"
    assert message["new"] == 1
    assert "_timeout" not in message
    message.acknowledge()
    assert (door.channel.acknowledged, door.channel.rejected) == (["t"], [])
    assert caplog.records == []


@pytest.mark.parametrize(
    ("body", "properties", "told"),
    [
        (b"", {}, "the body is no JSON"),
        (b"\xff\xfe\x00", {}, "the body is no JSON"),
        (b"[]", {}, "the body is list, not an object"),
        (b"[" * 100_000, {}, "100000 bytes are more than the limit of 1000"),
        (b"{}", {}, "envelope has version 'None'; expected 2.0"),
        (b'{"oslo.version": "2.0", "oslo.message": {}}', {}, "the envelope holds dict"),
        (b'{"oslo.version": "2.0", "oslo.message": "1"}', {}, "is int, not an object"),
        (call(), {"content_type": "application/x-python-serialize"}, "its content type is"),
        (call(), {"headers": {"compression": "application/x-gzip"}}, "it is compressed"),
        (call(method=None), {}, "method is None; expected a name"),
        (call(method="a\nb"), {}, "method is 'a"),
        (call(args=[]), {}, "args are list, not an object"),
        (call(version="one"), {}, "its version is 'one'"),
        (call(namespace=7), {}, "namespace is 7"),
        (call(_msg_id="m"), {}, "one of _msg_id and _reply_q"),
        (call(_msg_id="m", _reply_q="cyborg.conductor"), {}, "which is no reply queue"),
        (call(_msg_id={}, _reply_q="reply_x"), {}, "_msg_id is {}"),
    ],
)
def test_what_is_no_call_is_refused_once(
    body: bytes, properties: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door()
    door.push(body, message_id="17", **properties)
    assert door.taken == []
    assert door.channel.rejected == [("t", False)]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("Refused a message to q from an unknown sender, message")
    assert told in record.getMessage()
    assert "\n" not in record.getMessage()


def test_the_sender_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    Door().push(b"", app_id="agent\n2026-01-01 ERROR forged", user_id="\x1b[31m")
    assert "\n" not in caplog.records[0].getMessage()
    assert "\x1b" not in caplog.records[0].getMessage()


def test_a_message_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    door = Door()
    door.push(call())
    door.push(call())
    door.push(call(_unique_id="v"))
    assert [message["_unique_id"] for message in door.taken] == ["u", "v"]
    assert "it came before" in caplog.text


def test_only_named_users_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    door = Door(users=frozenset({"conductor"}))
    door.push(call())
    door.push(call(), user_id="agent")
    door.push(call(), user_id="conductor")
    assert len(door.taken) == 1
    assert caplog.text.count("is not one of [rpc] callers") == 2


def test_what_is_packed_has_a_limit_too(caplog: pytest.LogCaptureFixture) -> None:
    door = Door(unpack=True)
    packed = {"compression": "application/x-gzip"}
    door.push(zlib.compress(call()), packed)
    door.push(zlib.compress(call(args={"x": "y" * MOST})), packed)
    door.push(b"no gzip", packed)
    assert len(door.taken) == 1
    assert "unpacked it has more bytes than the limit" in caplog.text
    assert "it cannot be unpacked" in caplog.text


def test_what_breaks_behind_the_gate_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    door = Door()
    door.gate._consumer.callback = lambda _: 1 / 0
    door.push(call())
    assert "A message to q is lost" in caplog.text


def test_an_answer_passes() -> None:
    door = Door(gate.check_answer)
    door.push(wrapped(ANSWER))
    assert {key: door.taken[0][key] for key in ANSWER} == ANSWER


@pytest.mark.parametrize(
    "changes",
    [
        {"_msg_id": None},
        {"_msg_id": {}},
        {"failure": 1},
        {"failure": "x"},
        {"failure": "[]"},
        {"failure": "{}"},
    ],
)
def test_an_answer_of_no_form_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        gate.check_answer({**ANSWER, **changes})


def test_a_failure_builds_no_exception_here() -> None:
    failure = {
        "class": "SystemError",
        "module": "builtins",
        "message": "x" * 5000,
        "tb": ["File secret.py"],
        "args": ["a"],
        "kwargs": {"b": 1},
    }
    said = {**ANSWER, "failure": json.dumps(failure)}
    gate.check_answer(said)
    assert json.loads(said["failure"]) == {
        "class": "SystemError",
        "message": "x" * 1000,
        "module": "",
        "tb": [],
    }


class Everything:
    """Answers each method."""

    def __getattr__(self, name: str) -> Any:
        if name not in CONDUCTOR.methods:
            raise AttributeError(name)
        return lambda ctxt, **arguments: ctxt.sender


def test_who_calls_is_known_on_the_other_side(bus: Bus) -> None:
    with bus.serving("conductor", Everything()):
        heard = bus.conductor().arq_create("p", None)
    assert heard.split(",")[0].endswith(f"@{bus.conf.host}")
    # The bus inside the process has no users.
    memory = str(bus.conf.transport_url).startswith("kombu+memory")
    assert ("broker user" in heard) is not memory


@pytest.mark.parametrize(
    "name", ["__class__", "__init__", "_x", "_check", "run", "target", "stop", "__dict__"]
)
def test_only_methods_of_the_contract_can_be_called(
    bus: Bus, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    curious = Contract("conductor", "1.0", {name: Method(())})
    with (
        bus.serving("conductor", Everything()),
        pytest.raises(Exception, match="NoSuchMethod"),
    ):
        Client(curious, bus.transport, bus.conf).call(name)
    lines = [r for r in caplog.records if "refused a call" in r.getMessage()]
    assert len(lines) == 1
    assert f"does not support RPC method {name}" in lines[0].getMessage()
    assert lines[0].exc_info is None


@pytest.mark.services
def test_answers_to_nobody_hold_nobody_up(rabbit_url: str) -> None:
    with open_bus(rabbit_url, rpc={"timeout": 8.0}) as bus:
        bus.transport.oslo._driver.missing_destination_retry_timeout = 1
        with bus.serving("conductor", Everything()):
            connection = kombu.Connection(rabbit_url.replace("rabbit://", "amqp://", 1))
            with connection:
                producer = connection.Producer()
                for n in range(80):
                    lost = {"_msg_id": str(n), "_reply_q": f"reply_{n}", "_unique_id": str(n)}
                    inner = {**CALL, "method": "outbox_retry", "args": {"uuid": "u"}, **lost}
                    body = {"oslo.version": "2.0", "oslo.message": json.dumps(inner)}
                    key = f"{bus.conf.rpc.topic}.conductor"
                    producer.publish(body, serializer="json", routing_key=key)
            until("a good call is answered", lambda: bus.conductor().arq_create("p", None), 20)
