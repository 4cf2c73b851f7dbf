# SPDX-License-Identifier: Apache-2.0
"""Message filter: accepted and rejected messages, and the log of rejections."""

import json
import zlib
from types import SimpleNamespace
from typing import Any

import kombu
import pytest

from cyborg.core.errors import Invalid
from cyborg.rpc import filters as message_filter
from cyborg.rpc.client import Client
from cyborg.rpc.contract import CONDUCTOR, Contract, Method
from cyborg.tests.fixtures.bus.broker import Bus, open_bus
from cyborg.tests.fixtures.bus.malformed import wrapped
from cyborg.tests.fixtures.machine.processes import wait_until

MAX_BYTES = 1000
CALL = {"method": "hello", "args": {}, "version": "1.0", "_unique_id": "u"}
ANSWER = {"_msg_id": "m", "result": {"ok": 1}, "failure": None, "ending": True}


class Channel:
    """Stub of a channel: decodes messages, records rejections and acknowledgements."""

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


class FilterEnv:
    """A message filter and the messages that it accepted."""

    def __init__(self, check: Any = message_filter.check_call, **options: Any) -> None:
        self.channel = Channel()
        self.accepted: list[message_filter.Message] = []
        queue = SimpleNamespace(channel=self.channel)
        consumer = SimpleNamespace(queue=queue, queue_name="q", callback=self.accepted.append)
        self.filter = message_filter.MessageFilter(consumer, check, MAX_BYTES, **options)

    def push(self, body: bytes, headers: Any = None, **properties: Any) -> None:
        properties_ = {"content_type": "application/json", **properties}
        raw = SimpleNamespace(body=body, headers=headers, properties=properties_, delivery_tag="t")
        self.filter(raw)


def call(**changes: Any) -> bytes:
    return wrapped({**CALL, **changes})


def test_valid_call_passes_with_its_sender(caplog: pytest.LogCaptureFixture) -> None:
    env = FilterEnv()
    env.push(
        call(_context_sender="cyborg-conductor@liar", _timeout=5, new=1),
        app_id="cyborg-agent@compute-1",
        user_id="cyborg",
    )
    (message,) = env.accepted
    assert message["method"] == "hello"
    assert message["_context_sender"] == "cyborg-agent@compute-1, broker user cyborg"
    assert message["new"] == 1
    assert "_timeout" not in message
    message.acknowledge()
    assert (env.channel.acknowledged, env.channel.rejected) == (["t"], [])
    assert caplog.records == []


@pytest.mark.parametrize(
    ("body", "properties", "message"),
    [
        (b"", {}, "the body is not JSON"),
        (b"\xff\xfe\x00", {}, "the body is not JSON"),
        (b"[]", {}, "the body is list, not an object"),
        (b"[" * 100_000, {}, "100000 bytes are more than the limit of 1000"),
        (b"{}", {}, "envelope version is 'None'; expected 2.0"),
        (
            b'{"oslo.version": "2.0", "oslo.message": {}}',
            {},
            "oslo.message is dict, not a JSON string",
        ),
        (b'{"oslo.version": "2.0", "oslo.message": "1"}', {}, "oslo.message is int, not an object"),
        (call(), {"content_type": "application/x-python-serialize"}, "content type is"),
        (call(), {"headers": {"compression": "application/x-gzip"}}, "the message is compressed"),
        (call(method=None), {}, "method: invalid value 'None'"),
        (call(method="a\nb"), {}, "method: invalid value 'a"),
        (call(args=[]), {}, "args are list, not an object"),
        (call(version="one"), {}, "invalid version 'one'"),
        (call(namespace=7), {}, "namespace: invalid value '7'"),
        (call(_msg_id="m"), {}, "only one of _msg_id and _reply_q is set"),
        (
            call(_msg_id="m", _reply_q="cyborg.conductor"),
            {},
            "invalid reply queue 'cyborg.conductor'",
        ),
        (call(_msg_id={}, _reply_q="reply_x"), {}, "_msg_id: invalid value 'dict'"),
    ],
)
def test_invalid_call_is_rejected_and_logged_once(
    body: bytes, properties: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    env = FilterEnv()
    env.push(body, message_id="17", **properties)
    assert env.accepted == []
    assert env.channel.rejected == [("t", False)]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("Refused a message to q from an unknown sender, message")
    assert message in record.getMessage()
    assert "\n" not in record.getMessage()


def test_sender_cannot_forge_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    FilterEnv().push(b"", app_id="agent\n2026-01-01 ERROR forged", user_id="\x1b[31m")
    assert "\n" not in caplog.records[0].getMessage()
    assert "\x1b" not in caplog.records[0].getMessage()


def test_duplicate_message_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    env = FilterEnv()
    env.push(call())
    env.push(call())
    env.push(call(_unique_id="v"))
    assert [message["_unique_id"] for message in env.accepted] == ["u", "v"]
    assert "duplicate message" in caplog.text


def test_only_configured_users_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    env = FilterEnv(users=frozenset({"conductor"}))
    env.push(call())
    env.push(call(), user_id="agent")
    env.push(call(), user_id="conductor")
    assert len(env.accepted) == 1
    assert caplog.text.count("is not one of [rpc] allowed_users") == 2


def test_decompressed_size_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    env = FilterEnv(decompress=True)
    compressed = {"compression": "application/x-gzip"}
    env.push(zlib.compress(call()), compressed)
    env.push(zlib.compress(call(args={"x": "y" * MAX_BYTES})), compressed)
    env.push(b"no gzip", compressed)
    assert len(env.accepted) == 1
    assert "the decompressed body has more bytes than the limit" in caplog.text
    assert "decompression failed" in caplog.text


def test_error_of_the_consumer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    env = FilterEnv()
    env.filter.consumer.callback = lambda _: 1 / 0
    env.push(call())
    assert "Failed to process message on q, discarded" in caplog.text
    assert caplog.records[0].exc_info


def test_lost_connection_of_the_consumer_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Any) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    env = FilterEnv()
    env.filter.consumer.callback = fail
    env.push(call())
    (record,) = caplog.records
    assert "Lost a message on q" in record.getMessage()
    assert "Connection reset by peer" in record.getMessage()
    assert not record.exc_info


def test_valid_answer_passes() -> None:
    env = FilterEnv(message_filter.check_answer)
    env.push(wrapped(ANSWER))
    assert {key: env.accepted[0][key] for key in ANSWER} == ANSWER


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
def test_malformed_answer_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        message_filter.check_answer({**ANSWER, **changes})


def test_failure_is_reduced_to_class_and_message() -> None:
    failure = {
        "class": "SystemError",
        "module": "builtins",
        "message": "x" * 5000,
        "tb": ["File secret.py"],
        "args": ["a"],
        "kwargs": {"b": 1},
    }
    answer: dict[str, Any] = {**ANSWER, "failure": json.dumps(failure)}
    message_filter.check_answer(answer)
    assert json.loads(answer["failure"]) == {
        "class": "SystemError",
        "message": "x" * 1000,
        "module": "",
        "tb": [],
    }


class SenderEndpoint:
    """Endpoint that returns the sender of each call."""

    def __getattr__(self, name: str) -> Any:
        if name not in CONDUCTOR.methods:
            raise AttributeError(name)
        return lambda ctxt, **arguments: ctxt.sender


@pytest.mark.slow
def test_server_receives_the_sender_of_a_call(bus: Bus) -> None:
    with bus.serving("conductor", SenderEndpoint()):
        sender: Any = bus.conductor().arq_create("p", None)
    assert sender.split(",")[0].endswith(f"@{bus.conf.host}")
    # The in-process bus has no users.
    memory = str(bus.conf.transport_url).startswith("kombu+memory")
    assert ("broker user" in sender) is not memory


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["__class__", "__init__", "_x", "_check", "run", "target", "stop", "__dict__"]
)
def test_method_outside_the_contract_is_refused_and_logged(
    bus: Bus, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    contract = Contract("conductor", "1.0", {name: Method(())})
    with (
        bus.serving("conductor", SenderEndpoint()),
        pytest.raises(Exception, match="NoSuchMethod"),
    ):
        Client(contract, bus.transport, bus.conf).call(name)
    lines = [r for r in caplog.records if "refused a call" in r.getMessage()]
    assert len(lines) == 1
    assert f"does not support RPC method {name}" in lines[0].getMessage()
    assert lines[0].exc_info is None


@pytest.mark.matrix
@pytest.mark.services
def test_calls_with_missing_reply_queues_do_not_block_others(rabbit_url: str) -> None:
    with open_bus(rabbit_url, rpc={"timeout": 8.0}) as bus:
        bus.transport.oslo._driver.missing_destination_retry_timeout = 1
        with bus.serving("conductor", SenderEndpoint()):
            connection = kombu.Connection(rabbit_url.replace("rabbit://", "amqp://", 1))
            with connection:
                producer = connection.Producer()
                for n in range(80):
                    ids = {"_msg_id": str(n), "_reply_q": f"reply_{n}", "_unique_id": str(n)}
                    inner = {**CALL, "method": "outbox_retry", "args": {"uuid": "u"}, **ids}
                    body = {"oslo.version": "2.0", "oslo.message": json.dumps(inner)}
                    key = f"{bus.conf.rpc.topic}.conductor"
                    producer.publish(body, serializer="json", routing_key=key)
            wait_until("a good call is answered", lambda: bus.conductor().arq_create("p", None))
