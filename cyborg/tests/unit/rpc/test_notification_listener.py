# SPDX-License-Identifier: Apache-2.0
"""The listener for Nova's notifications: options, and a broker that is away."""

import logging
from typing import Any

import pytest
from oslo_config import cfg

from cyborg.core.errors import Misconfigured
from cyborg.rpc.notifications import make_listener, queue_name
from cyborg.rpc.transport import register_options
from cyborg.tests.fixtures.bus.broker import MEMORY
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import free_port

RABBIT = "rabbit://guest:secret@127.0.0.1:1/"


def options(url: str = RABBIT, **nova: Any) -> cfg.ConfigOpts:
    conf = make_conf(rpc={"topic": "cloud-1"}, nova={"notifications": True, **nova})
    register_options(conf)
    conf.set_override("transport_url", url)
    return conf


def test_disabled_by_default() -> None:
    assert make_conf().nova.notifications is False
    assert make_listener(make_conf()) is None


def test_bus_in_the_process_has_no_notifications(caplog: pytest.LogCaptureFixture) -> None:
    assert make_listener(options(MEMORY)) is None
    (text,) = texts_of(caplog.records, logging.WARNING)
    assert "the message bus is kombu+memory:" in text


def test_own_url_is_used_with_the_bus_in_the_process() -> None:
    listener = make_listener(options(MEMORY, notification_url=RABBIT))
    assert listener is not None
    listener.cleanup()


@pytest.mark.parametrize("url", ["rabbit://guest:secret@127.0.0.1:port/", "rabbit://[secret"])
def test_malformed_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        make_listener(options(MEMORY, notification_url=url))
    assert "notification_url" in raised.value.message
    assert "secret" not in raised.value.message


@pytest.mark.parametrize(
    ("pool", "queue"),
    [
        (None, "cloud-1.nova_notifications"),
        ("mine", "mine"),
        ("", "versioned_notifications.info"),
    ],
)
def test_queue_is_a_pool_unless_that_is_empty(pool: str | None, queue: str) -> None:
    assert queue_name(options(**{} if pool is None else {"notification_pool": pool})) == queue


def test_start_and_stop_without_a_broker_return_at_once() -> None:
    url = f"rabbit://guest:secret@127.0.0.1:{free_port()}/"
    listener = make_listener(options(MEMORY, notification_url=url))
    assert listener is not None
    listener.start(lambda fields: None, lambda reason: None)
    listener.stop()
    listener.cleanup()
