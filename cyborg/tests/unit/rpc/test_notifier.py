# SPDX-License-Identifier: Apache-2.0
"""Notifications on their way: to a listener, past a broker that is away, bounded in time."""

import contextlib
import logging
import queue
import socket
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import oslo_messaging
import pytest
from oslo_config import cfg

from cyborg.core.errors import Misconfigured, TimedOut, Unavailable
from cyborg.fixtures.broker import MEMORY
from cyborg.fixtures.options import make_conf
from cyborg.fixtures.relay import relay
from cyborg.rpc.notifier import GROUP, Notifier, is_wanted, make_notifier
from cyborg.rpc.transport import register_options

LONG = 30.0


def options(url: str, topic: str | None = None, **more: Any) -> cfg.ConfigOpts:
    conf = make_conf(**{"rpc": {"timeout": 10.0}, **more})
    register_options(conf)
    is_wanted(conf)
    conf.set_override("driver", ["messagingv2"], group=GROUP)
    conf.set_override("topics", [topic or f"test-{uuid4().hex[:12]}"], group=GROUP)
    conf.set_override("transport_url", url, group=GROUP)
    conf.set_override("transport_url", "rabbit://nobody:wrong@127.0.0.1:1/")
    conf.set_override("host", "controller-1")
    # Exchange and queues are the test's own and go with it.
    conf.set_override("control_exchange", conf[GROUP].topics[0])
    oslo_messaging.get_notification_transport(conf).cleanup()
    conf.set_override("amqp_auto_delete", True, group="oslo_messaging_rabbit")
    return conf


def message(event: str = "device.enable.end", priority: str = "INFO", **data: Any) -> Any:
    return {"event_type": event, "priority": priority, "payload": {"data": data}}


@contextlib.contextmanager
def listening(conf: cfg.ConfigOpts) -> Iterator["queue.Queue[tuple[Any, ...]]"]:
    heard: queue.Queue[tuple[Any, ...]] = queue.Queue()

    class Endpoint:
        def info(self, ctxt: Any, publisher: str, event: str, payload: Any, more: Any) -> None:
            heard.put(("INFO", publisher, event, payload))

        def error(self, ctxt: Any, publisher: str, event: str, payload: Any, more: Any) -> None:
            heard.put(("ERROR", publisher, event, payload))

    transport = oslo_messaging.get_notification_transport(conf)
    (topic,) = conf[GROUP].topics
    listener = oslo_messaging.get_notification_listener(
        transport, [oslo_messaging.Target(topic=topic)], [Endpoint()], executor="threading"
    )
    listener.start()
    try:
        yield heard
    finally:
        listener.stop()
        listener.wait()
        transport.cleanup()


@pytest.fixture(params=["memory", pytest.param("rabbit", marks=pytest.mark.services)])
def url(request: pytest.FixtureRequest) -> str:
    memory = request.param == "memory"
    return MEMORY if memory else str(request.getfixturevalue("rabbit_url"))


def test_a_listener_hears_by_priority_in_order(url: str) -> None:
    conf = options(url)
    with listening(conf) as heard:
        notifier = Notifier(conf)
        try:
            sent = [message(n=1), message("deployable.program.error", "ERROR", n=2), message(n=3)]
            assert notifier.send(sent) == [None, None, None]
            found = [heard.get(timeout=LONG) for _ in sent]
        finally:
            notifier.cleanup()
    who = "cyborg-conductor:controller-1"
    infos = [item for item in found if item[0] == "INFO"]
    assert infos == [("INFO", who, "device.enable.end", {"data": {"n": n}}) for n in (1, 3)]
    (error,) = [item for item in found if item[0] == "ERROR"]
    assert error == ("ERROR", who, "deployable.program.error", {"data": {"n": 2}})


@pytest.mark.services
def test_a_broker_that_is_away_is_said_and_loses_nothing(
    rabbit_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    parsed = oslo_messaging.TransportURL.parse(make_conf(), rabbit_url)
    topic = f"test-{uuid4().hex[:12]}"
    with (
        relay(parsed.hosts[0].port or 5672) as wire,
        listening(options(rabbit_url, topic)) as heard,
    ):
        parsed.hosts[0].hostname, parsed.hosts[0].port = "127.0.0.1", wire.port
        notifier = Notifier(options(str(parsed), topic))
        try:
            began = time.monotonic()
            with pytest.raises(Unavailable, match="takes none"):
                notifier.send([message(n=1), message(n=2)])
            assert time.monotonic() - began < 10
            wire.mend()
            assert in_the_end(notifier, message(n=1)) == [None]
            wire.cut()
            with pytest.raises(Unavailable):
                notifier.send([message(n=2)])
            wire.mend()
            assert in_the_end(notifier, message(n=2)) == [None]
            assert [heard.get(timeout=LONG)[3]["data"]["n"] for _ in range(2)] == [1, 2]
            assert "Could not send notification" not in caplog.text
        finally:
            notifier.cleanup()


def in_the_end(notifier: Notifier, one: Any) -> Any:
    end = time.monotonic() + LONG
    while True:
        try:
            return notifier.send([one])
        except Unavailable:
            assert time.monotonic() < end


@pytest.mark.services
def test_a_broker_that_hangs_is_not_waited_for(rabbit_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        url = f"rabbit://guest:guest@127.0.0.1:{port}/"
        notifier = Notifier(options(url, rpc={"timeout": 0.2}))
        began = time.monotonic()
        with pytest.raises(TimedOut, match=r"did not answer in 0\.2 s"):
            notifier.send([message()])
        with pytest.raises(Unavailable, match="an earlier notification"):
            notifier.send([message()])
        assert time.monotonic() - began < 5
        assert notifier.seconds == 0.2
        notifier.cleanup()
        taken, _ = mute.accept()
    taken.close()
    assert notifier._thread is not None
    notifier._thread.join(LONG)
    assert not notifier._thread.is_alive()


@pytest.mark.parametrize(
    ("bad", "answers", "all_tried"),
    [
        (ValueError("no such thing"), [None, "ValueError: no such thing", None], [1, 2, 3]),
        (
            OSError("gone"),
            [None, *["the broker of notifications takes none: OSError: gone"] * 2],
            [1, 2],
        ),
    ],
    ids=["its own", "the broker's"],
)
def test_one_of_several_fails(
    monkeypatch: pytest.MonkeyPatch, bad: Exception, answers: list[Any], all_tried: list[int]
) -> None:
    notifier = Notifier(options(MEMORY))
    driver = notifier._transport._driver
    send, tried = driver.send_notification, []

    def fail_second(target: Any, ctxt: Any, body: Any, *more: Any, **named: Any) -> None:
        tried.append(body["payload"]["data"]["n"])
        if tried[-1] == 2:
            raise bad
        send(target, ctxt, body, *more, **named)

    monkeypatch.setattr(driver, "send_notification", fail_second)
    try:
        assert notifier.send([message(n=n) for n in (1, 2, 3)]) == answers
        assert tried == all_tried
    finally:
        notifier.cleanup()


def test_without_a_driver_there_is_nothing() -> None:
    for drivers in ([], [""], ["noop"]):
        conf = options(MEMORY)
        conf.set_override("driver", drivers, group=GROUP)
        assert not is_wanted(conf)
        assert make_notifier(conf) is None
    assert not is_wanted(make_conf())


def test_a_driver_that_needs_no_broker(caplog: pytest.LogCaptureFixture) -> None:
    conf = options(MEMORY)
    conf.set_override("driver", ["log"], group=GROUP)
    notifier = make_notifier(conf)
    assert notifier is not None
    with caplog.at_level(logging.INFO):
        assert notifier.send([message(n=7)]) == [None]
    assert '"n": 7' in caplog.text
    notifier.cleanup()


def test_what_cannot_work_is_refused_at_the_start() -> None:
    conf = options(MEMORY)
    conf.set_override("driver", ["mesaging"], group=GROUP)
    with pytest.raises(Misconfigured, match=r"driver: found 'mesaging'; expected one of .*log"):
        make_notifier(conf)
    conf = options(MEMORY)
    conf.set_override("transport_url", "nonsense://me:secret@there/", group=GROUP)
    with pytest.raises(Misconfigured, match="scheme 'nonsense'") as raised:
        make_notifier(conf)
    assert "secret" not in raised.value.message
