# SPDX-License-Identifier: Apache-2.0
"""The way to the broker: what is refused at once, and a broker that is away."""

import threading
import time

import pytest

from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.fixtures.broker import MEMORY, open_bus
from cyborg.fixtures.processes import free_port
from cyborg.rpc.transport import LONGEST_PAUSE


def test_a_broker_that_is_away_is_said_in_time_and_without_the_password() -> None:
    url = f"rabbit://guest:hunter2@127.0.0.1:{free_port()}/"
    with open_bus(url, rpc={"timeout": 0.3}) as bus:
        client = bus.conductor()
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(Unavailable, match=r"broker at 127\.0\.0\.1:\d+ does not") as raised:
                client.device_set_status("u", "enabled")
            assert time.monotonic() - began < 3
            assert "hunter2" not in raised.value.message
        with pytest.raises(Unavailable), bus.serving("conductor", _Everything()):
            pass
        tries = [t for t in threading.enumerate() if t.name == "bus"]
        assert len(tries) == 1, "one thread tries to connect, however many calls there are"


def test_nobody_there_to_answer_is_a_timeout() -> None:
    with open_bus(MEMORY, rpc={"timeout": 0.2}) as bus, pytest.raises(Unavailable):
        bus.conductor().device_set_status("u", "enabled")


@pytest.mark.parametrize("url", ["nonsense://u:hunter2@h/", "rabbit://u:hunter2@h:notaport/"])
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(Misconfigured, match=r"\[DEFAULT\] transport_url") as raised, open_bus(url):
        pass
    assert "hunter2" not in raised.value.message


class _Everything:
    """Has every method, none of which is called."""

    def __getattr__(self, name: str) -> object:
        return lambda *_, **__: None


def test_a_lost_broker_is_looked_for_every_few_seconds() -> None:
    with open_bus(f"rabbit://guest:guest@127.0.0.1:{free_port()}/") as bus:
        assert bus.conf.oslo_messaging_rabbit.rabbit_interval_max == LONGEST_PAUSE
        bus.conf.set_override("rabbit_interval_max", 9, group="oslo_messaging_rabbit")
        assert bus.conf.oslo_messaging_rabbit.rabbit_interval_max == 9, "the operator's counts"
