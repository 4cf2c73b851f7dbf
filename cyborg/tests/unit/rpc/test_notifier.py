# SPDX-License-Identifier: Apache-2.0
"""Notifier: delivery, outages of the broker, and time limits."""

import contextlib
import logging
import queue
import socket
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import oslo_messaging
import pytest
from oslo_config import cfg

from cyborg.core.errors import Misconfigured, TimedOut, Unavailable
from cyborg.rpc.notifications import GROUP, Notifier, is_enabled, make_notifier
from cyborg.rpc.transport import register_options
from cyborg.tests.fixtures.bus.broker import MEMORY
from cyborg.tests.fixtures.bus.notification_listeners import run_listener
from cyborg.tests.fixtures.bus.tcp_relay import relay
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import ends_within, wait_until

LONG = 120.0


def options(url: str, topic: str | None = None, **groups: Any) -> cfg.ConfigOpts:
    conf = make_conf(**{"rpc": {"timeout": 10.0}, **groups})
    register_options(conf)
    is_enabled(conf)
    conf.set_override("driver", ["messagingv2"], group=GROUP)
    conf.set_override("topics", [topic or f"test-{uuid4().hex[:12]}"], group=GROUP)
    conf.set_override("transport_url", url, group=GROUP)
    conf.set_override("transport_url", "rabbit://nobody:wrong@127.0.0.1:1/")
    conf.set_override("host", "controller-1")
    # Exchange and queues belong to the test and are deleted with it.
    conf.set_override("control_exchange", conf[GROUP].topics[0])
    oslo_messaging.get_notification_transport(conf).cleanup()
    conf.set_override("amqp_auto_delete", True, group="oslo_messaging_rabbit")
    return conf


def message(event: str = "device.enable.end", priority: str = "INFO", **data: Any) -> Any:
    return {"event_type": event, "priority": priority, "payload": {"data": data}}


@contextlib.contextmanager
def listening(conf: cfg.ConfigOpts) -> Iterator["queue.Queue[tuple[Any, ...]]"]:
    received: queue.Queue[tuple[Any, ...]] = queue.Queue()

    class Endpoint:
        def info(self, ctxt: Any, publisher: str, event: str, payload: Any, metadata: Any) -> None:
            received.put(("INFO", publisher, event, payload))

        def error(self, ctxt: Any, publisher: str, event: str, payload: Any, metadata: Any) -> None:
            received.put(("ERROR", publisher, event, payload))

    (topic,) = conf[GROUP].topics
    with run_listener(conf, topic, Endpoint()):
        yield received


@pytest.fixture(params=["memory", pytest.param("rabbit", marks=pytest.mark.services)])
def url(request: pytest.FixtureRequest) -> str:
    memory = request.param == "memory"
    return MEMORY if memory else str(request.getfixturevalue("rabbit_url"))


@pytest.mark.slow
def test_send_delivers_by_priority_in_order(url: str) -> None:
    conf = options(url)
    with listening(conf) as received:
        notifier = Notifier(conf)
        try:
            messages = [
                message(n=1),
                message("deployable.program.error", "ERROR", n=2),
                message(n=3),
            ]
            assert notifier.send(messages) == [None, None, None]
            deliveries = [received.get(timeout=LONG) for _ in messages]
        finally:
            notifier.cleanup()
    publisher_id = "cyborg-conductor:controller-1"
    infos = [item for item in deliveries if item[0] == "INFO"]
    assert infos == [
        ("INFO", publisher_id, "device.enable.end", {"data": {"n": n}}) for n in (1, 3)
    ]
    (error,) = [item for item in deliveries if item[0] == "ERROR"]
    assert error == ("ERROR", publisher_id, "deployable.program.error", {"data": {"n": 2}})


@pytest.mark.services
def test_send_during_an_outage_raises_and_loses_nothing(
    rabbit_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    parsed = oslo_messaging.TransportURL.parse(make_conf(), rabbit_url)
    topic = f"test-{uuid4().hex[:12]}"
    with (
        relay(parsed.hosts[0].port or 5672) as wire,
        listening(options(rabbit_url, topic)) as received,
    ):
        parsed.hosts[0].hostname, parsed.hosts[0].port = "127.0.0.1", wire.port
        notifier = Notifier(options(str(parsed), topic))
        try:
            with ends_within(60), pytest.raises(Unavailable, match="accepts no message"):
                notifier.send([message(n=1), message(n=2)])
            wire.restore()
            assert send_until_accepted(notifier, message(n=1)) == [None]
            wire.cut()
            with pytest.raises(Unavailable):
                notifier.send([message(n=2)])
            wire.restore()
            assert send_until_accepted(notifier, message(n=2)) == [None]
            assert [received.get(timeout=LONG)[3]["data"]["n"] for _ in range(2)] == [1, 2]
            assert "Could not send notification" not in caplog.text
        finally:
            notifier.cleanup()


def send_until_accepted(notifier: Notifier, item: Any) -> Any:
    def send() -> Any:
        with contextlib.suppress(Unavailable):
            return notifier.send([item])
        return None

    return wait_until("the message is accepted", send, LONG)


@pytest.mark.services
def test_send_to_a_hanging_broker_times_out(rabbit_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        url = f"rabbit://guest:guest@127.0.0.1:{port}/"
        notifier = Notifier(options(url, rpc={"timeout": 0.2}))
        with ends_within(5):
            with pytest.raises(TimedOut, match=r"did not answer in 0\.2 s"):
                notifier.send([message()])
            with pytest.raises(Unavailable, match="an earlier notification"):
                notifier.send([message()])
        assert notifier.timeout == 0.2
        notifier.cleanup()
        accepted, _ = server.accept()
    accepted.close()
    assert notifier._thread is not None
    notifier._thread.join(LONG)
    assert not notifier._thread.is_alive()


@pytest.mark.parametrize(
    ("failure", "answers", "all_tried"),
    [
        (ValueError("no such thing"), [None, "ValueError: no such thing", None], [1, 2, 3]),
        (
            OSError("gone"),
            [None, *["the notification broker accepts no message: OSError: gone"] * 2],
            [1, 2],
        ),
    ],
    ids=["its own", "the broker's"],
)
def test_send_with_one_failure_returns_the_error(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, answers: list[Any], all_tried: list[int]
) -> None:
    notifier = Notifier(options(MEMORY))
    driver = notifier._transport._driver
    send, attempts = driver.send_notification, []

    def fail_second(target: Any, ctxt: Any, body: Any, *args: Any, **kwargs: Any) -> None:
        attempts.append(body["payload"]["data"]["n"])
        if attempts[-1] == 2:
            raise failure
        send(target, ctxt, body, *args, **kwargs)

    monkeypatch.setattr(driver, "send_notification", fail_second)
    try:
        assert notifier.send([message(n=n) for n in (1, 2, 3)]) == answers
        assert attempts == all_tried
    finally:
        notifier.cleanup()


def test_make_notifier_without_a_driver_returns_none() -> None:
    for drivers in ([], [""], ["noop"]):
        conf = options(MEMORY)
        conf.set_override("driver", drivers, group=GROUP)
        assert not is_enabled(conf)
        assert make_notifier(conf) is None
    assert not is_enabled(make_conf())


def test_log_driver_needs_no_broker(caplog: pytest.LogCaptureFixture) -> None:
    conf = options(MEMORY)
    conf.set_override("driver", ["log"], group=GROUP)
    notifier = make_notifier(conf)
    assert notifier is not None
    with caplog.at_level(logging.INFO):
        assert notifier.send([message(n=7)]) == [None]
    assert '"n": 7' in caplog.text
    notifier.cleanup()


def test_make_notifier_with_invalid_configuration_is_refused() -> None:
    conf = options(MEMORY)
    conf.set_override("driver", ["mesaging"], group=GROUP)
    with pytest.raises(Misconfigured, match=r"driver: found 'mesaging'; expected one of .*log"):
        make_notifier(conf)
    conf = options(MEMORY)
    conf.set_override("transport_url", "nonsense://me:secret@there/", group=GROUP)
    with pytest.raises(Misconfigured, match="scheme 'nonsense'") as raised:
        make_notifier(conf)
    assert "secret" not in raised.value.message
