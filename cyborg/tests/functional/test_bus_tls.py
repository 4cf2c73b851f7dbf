# SPDX-License-Identifier: Apache-2.0
"""The bus in TLS: both sides prove who they are, and nothing is ever said in the clear.

RabbitMQ stands behind a relay that ends TLS and asks for certificates, as a broker does that is
configured to.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import kombu
import oslo_messaging
import pytest

from cyborg.core.errors import TimedOut, Unavailable
from cyborg.fixtures.broker import Bus, open_bus
from cyborg.fixtures.certificates import Authority, Pair
from cyborg.fixtures.tls_relay import TlsRelay, tls_relay
from cyborg.rpc.contract import CONDUCTOR
from cyborg.rpc.notifier import Notifier

pytestmark = pytest.mark.services

GROUP = "oslo_messaging_rabbit"
HELLO = b"\x16\x03\x01"  # how TLS begins; AMQP in the clear begins with its name
PASSWORD = "correct-horse-battery"


class Ears:
    """Has every method of the conductor's contract."""

    def __getattr__(self, name: str) -> Any:
        if name not in CONDUCTOR.methods:
            raise AttributeError(name)
        return lambda ctxt, **_: {"heard": name}


@dataclass(frozen=True)
class Papers:
    """Two authorities: ours is trusted by both sides, theirs by nobody."""

    ours: Authority
    theirs: Authority
    server: Pair
    client: Pair


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    """Certificates that are good, on both sides."""
    folder = tmp_path_factory.mktemp("papers")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    return Papers(ours, theirs, ours.sign("server"), ours.sign("client"))


@contextmanager
def bus_by(
    rabbit_url: str, papers: Papers, server: Pair, client: Pair | None, password: str = ""
) -> Iterator[tuple[Bus, TlsRelay]]:
    """Give a bus whose broker shows one certificate and whose daemons show another, or none."""
    its = kombu.Connection(rabbit_url.replace("rabbit://", "amqp://", 1))
    secret = password or its.password
    with tls_relay(its.port or 5672, server, papers.ours.certificate) as relay:
        url = f"rabbit://{its.userid}:{secret}@127.0.0.1:{relay.port}/"
        with open_bus(url, rpc={"timeout": 3.0}) as bus:
            bus.conf.set_override("ssl", True, group=GROUP)
            bus.conf.set_override("ssl_ca_file", str(papers.ours.certificate), group=GROUP)
            if client is not None:
                bus.conf.set_override("ssl_cert_file", str(client.certificate), group=GROUP)
                bus.conf.set_override("ssl_key_file", str(client.key), group=GROUP)
            yield bus, relay


def test_a_call_in_tls(rabbit_url: str, papers: Papers) -> None:
    with bus_by(rabbit_url, papers, papers.server, papers.client) as (bus, relay):
        with bus.serving("conductor", Ears()):
            assert bus.conductor().arq_create("p", None) == {"heard": "arq_create"}
        assert relay.passed >= 2
        assert relay.faults == []
        assert set(relay.firsts) == {HELLO}


@pytest.mark.parametrize(
    ("server", "client", "told"),
    [
        ("of another authority", "good", "certificate verify failed"),
        ("expired", "good", "certificate has expired"),
        ("of another host", "good", "certificate is not valid for '127.0.0.1'"),
        ("good", "none", "certificate required"),
        ("good", "of another authority", "unknown ca"),
        ("good", "expired", "certificate expired"),
    ],
)
def test_whoever_cannot_prove_it_is_refused(
    rabbit_url: str,
    papers: Papers,
    server: str,
    client: str,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        bus_by(rabbit_url, papers, paper(papers, server), paper(papers, client)) as (bus, relay),
        pytest.raises(Unavailable, match=f"(?i){told}") as raised,
    ):
        bus.conductor().device_set_status("u", "enabled")
    assert f"broker at 127.0.0.1:{relay.port}" in raised.value.message
    assert any(raised.value.message.split(": ")[1] in r.message for r in caplog.records)
    assert relay.faults, "it was tried"
    assert relay.passed == 0, "and nothing reached the broker"
    assert set(relay.firsts) == {HELLO}, "not even in the clear"


def paper(papers: Papers, kind: str) -> Any:
    """Return a certificate that is good for both sides, or bad in one way; None for none."""
    name = kind.replace(" ", "-")
    return {
        "good": lambda: papers.server,
        "none": lambda: None,
        "expired": lambda: papers.ours.sign(name, days=-1),
        "of another authority": lambda: papers.theirs.sign(name),
        "of another host": lambda: papers.ours.sign(name, address="127.0.0.9"),
    }[kind]()


def test_a_broker_without_tls_is_not_spoken_to(rabbit_url: str, papers: Papers) -> None:
    with open_bus(rabbit_url, rpc={"timeout": 3.0}) as bus:
        bus.conf.set_override("ssl", True, group=GROUP)
        bus.conf.set_override("ssl_ca_file", str(papers.ours.certificate), group=GROUP)
        with pytest.raises(Unavailable, match=r"(?i)ssl|EOF|reset"):
            bus.conductor().device_set_status("u", "enabled")


def test_tls_without_an_authority_is_warned_of(
    rabbit_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_bus(rabbit_url, rpc={"timeout": 0.2}) as bus:
        bus.conf.set_override("ssl", True, group=GROUP)
        with pytest.raises(Unavailable):
            bus.conductor().device_set_status("u", "enabled")
    assert "[oslo_messaging_rabbit] ssl_ca_file is not set" in caplog.text


def test_a_wrong_password_is_said_and_shown_nowhere(
    rabbit_url: str, papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with bus_by(rabbit_url, papers, papers.server, papers.client, PASSWORD) as (bus, _):
        client = bus.conductor()
        for _ in range(2):
            with pytest.raises(Unavailable, match="Login was refused") as raised:
                client.device_set_status("u", "enabled")
            assert PASSWORD not in raised.value.message
        with (
            pytest.raises(Unavailable, match="Login was refused"),
            bus.serving("conductor", Ears()),
        ):
            pass
        bus.conf.log_opt_values(logging.getLogger("options"), logging.DEBUG)
    assert "Login was refused" in caplog.text
    assert "transport_url" in caplog.text
    assert PASSWORD not in caplog.text
    assert "Traceback" not in caplog.text


def notifier_of(bus: Bus) -> Notifier:
    """Return a notifier that uses the broker of a bus."""
    group = "oslo_messaging_notifications"
    oslo_messaging.get_notification_transport(bus.conf).cleanup()
    bus.conf.set_override("driver", ["messagingv2"], group=group)
    bus.conf.set_override("topics", [bus.conf.rpc.topic], group=group)
    return Notifier(bus.conf)


@pytest.mark.parametrize("server", ["good", "expired"])
def test_notifications_leave_in_tls_too(rabbit_url: str, papers: Papers, server: str) -> None:
    message = {"event_type": "accelerator.x", "payload": {}, "priority": "INFO"}
    with bus_by(rabbit_url, papers, paper(papers, server), papers.client) as (bus, relay):
        notifier = notifier_of(bus)
        try:
            if server == "good":
                assert notifier.send([message]) == [None]
            else:
                with pytest.raises((Unavailable, TimedOut)):
                    notifier.send([message])
        finally:
            notifier.cleanup()
        assert bool(relay.passed) is (server == "good")
        assert set(relay.firsts) == {HELLO}
