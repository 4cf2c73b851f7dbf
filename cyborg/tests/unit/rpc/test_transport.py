# SPDX-License-Identifier: Apache-2.0
"""Transport: invalid URLs, and outages of the broker."""

import threading

import pytest

from cyborg.compat import rabbit
from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.rpc.server import count_threads
from cyborg.rpc.transport import MAX_RETRY_DELAY, Transport, register_options
from cyborg.tests.fixtures.bus.broker import MEMORY, open_bus
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import ends_within, free_port


@pytest.mark.slow
def test_broker_outage_is_reported_in_time_without_the_password() -> None:
    # Threads of earlier tests end up to a second after the transports that they connected.
    earlier = set(threading.enumerate())
    url = f"rabbit://guest:hunter2@127.0.0.1:{free_port()}/"
    with open_bus(url, rpc={"timeout": 0.3}) as bus:
        client = bus.conductor()
        for _ in range(2):
            with (
                ends_within(9),  # less than the default timeout
                pytest.raises(Unavailable, match=r"broker at 127\.0\.0\.1:\d+ does not") as raised,
            ):
                client.device_set_status("u", "enabled")
            assert "hunter2" not in raised.value.message
        with pytest.raises(Unavailable), bus.serving("conductor", _UnusedEndpoint()):
            pass
        openers = [t for t in set(threading.enumerate()) - earlier if t.name == "bus"]
        assert len(openers) == 1, "one thread connects for all calls"
    openers[0].join(10)
    assert not openers[0].is_alive(), "it ends when the transport is closed"


def test_connection_that_opens_after_the_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    is_opening, is_closed = threading.Event(), threading.Event()

    def open_late(_: object) -> None:
        is_opening.set()
        assert is_closed.wait(10)

    monkeypatch.setattr(rabbit, "open_reply_queue", open_late)
    conf = make_conf()
    register_options(conf)
    conf.set_override("transport_url", MEMORY)
    transport = Transport(conf)
    closed: list[bool] = []
    monkeypatch.setattr(transport.oslo, "cleanup", lambda: closed.append(True))
    opener = threading.Thread(target=transport.ensure_open)
    opener.start()
    assert is_opening.wait(10)
    transport.cleanup()
    assert closed == []
    is_closed.set()
    opener.join(10)
    assert closed == [True]


@pytest.mark.slow
def test_call_without_a_server_is_unavailable() -> None:
    with open_bus(MEMORY, rpc={"timeout": 0.2}) as bus, pytest.raises(Unavailable):
        bus.conductor().device_set_status("u", "enabled")


@pytest.mark.parametrize("url", ["nonsense://u:hunter2@h/", "rabbit://u:hunter2@h:notaport/"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(Misconfigured, match=r"\[DEFAULT\] transport_url") as raised, open_bus(url):
        pass
    assert "hunter2" not in raised.value.message


class _UnusedEndpoint:
    """Endpoint with every method, none of which is called."""

    def __getattr__(self, name: str) -> object:
        return lambda *_, **__: None


def test_reconnect_interval_is_short_and_configurable() -> None:
    with open_bus(f"rabbit://guest:guest@127.0.0.1:{free_port()}/") as bus:
        assert bus.conf.oslo_messaging_rabbit.rabbit_interval_max == MAX_RETRY_DELAY
        bus.conf.set_override("rabbit_interval_max", 9, group="oslo_messaging_rabbit")
        assert bus.conf.oslo_messaging_rabbit.rabbit_interval_max == 9, (
            "the operator's value is used"
        )


def test_number_of_threads_is_known_before_and_with_a_server() -> None:
    with open_bus(MEMORY) as bus:
        assert count_threads(bus.conf) == 64
        bus.conf.set_override("executor_thread_pool_size", 4)
        with bus.serving("conductor", _UnusedEndpoint()):
            assert count_threads(bus.conf) == 4
