# SPDX-License-Identifier: Apache-2.0
"""The message bus over TLS: both sides authenticate, and nothing is sent unencrypted.

RabbitMQ is behind a relay that terminates TLS and requires certificates.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import kombu
import oslo_messaging
import pytest

from cyborg.core.errors import TimedOut, Unavailable
from cyborg.rpc.contract import CONDUCTOR
from cyborg.rpc.notifications import Notifier
from cyborg.tests.fixtures.bus.broker import Bus, open_bus
from cyborg.tests.fixtures.bus.certificates import Authority, Pair
from cyborg.tests.fixtures.bus.tls_relay import TlsRelay, tls_relay
from cyborg.tests.fixtures.machine.tiers import sample

pytestmark = pytest.mark.services

GROUP = "oslo_messaging_rabbit"
HELLO = b"\x16\x03\x01"  # first bytes of TLS; unencrypted AMQP begins with its name
PASSWORD = "correct-horse-battery"


class ConductorEndpoint:
    """An endpoint with every method of the conductor's contract."""

    def __getattr__(self, name: str) -> Any:
        if name not in CONDUCTOR.methods:
            raise AttributeError(name)
        return lambda ctxt, **_: {"heard": name}


@dataclass(frozen=True)
class Certificates:
    """Two authorities: both sides trust the first, and no side the second."""

    trusted: Authority
    foreign: Authority
    server: Pair
    client: Pair


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Return valid certificates for both sides."""
    folder = tmp_path_factory.mktemp("papers")
    authority, foreign_authority = Authority(folder, "trusted"), Authority(folder, "foreign")
    return Certificates(
        authority, foreign_authority, authority.sign("server"), authority.sign("client")
    )


@contextmanager
def bus_by(
    rabbit_url: str, papers: Certificates, server: Pair, client: Pair | None, password: str = ""
) -> Iterator[tuple[Bus, TlsRelay]]:
    """Yield a bus with a broker certificate and a daemon certificate, or none."""
    params = kombu.Connection(rabbit_url.replace("rabbit://", "amqp://", 1))
    secret = password or params.password
    with tls_relay(params.port or 5672, server, papers.trusted.certificate) as relay:
        url = f"rabbit://{params.userid}:{secret}@127.0.0.1:{relay.port}/"
        with open_bus(url, rpc={"timeout": 3.0}) as bus:
            bus.conf.set_override("ssl", True, group=GROUP)
            bus.conf.set_override("ssl_ca_file", str(papers.trusted.certificate), group=GROUP)
            if client is not None:
                bus.conf.set_override("ssl_cert_file", str(client.certificate), group=GROUP)
                bus.conf.set_override("ssl_key_file", str(client.key), group=GROUP)
            yield bus, relay


def test_rpc_call_over_tls_succeeds(rabbit_url: str, papers: Certificates) -> None:
    with bus_by(rabbit_url, papers, papers.server, papers.client) as (bus, relay):
        with bus.serving("conductor", ConductorEndpoint()):
            assert bus.conductor().arq_create("p", None) == {"heard": "arq_create"}
        assert relay.connections >= 2
        assert relay.handshake_errors == []
        assert set(relay.first_bytes) == {HELLO}


@pytest.mark.parametrize(
    ("server", "client", "message"),
    sample(
        [
            ("of another authority", "good", "certificate verify failed"),
            ("expired", "good", "certificate has expired"),
            ("of another host", "good", "certificate is not valid for '127.0.0.1'"),
            ("good", "none", "certificate required"),
            ("good", "of another authority", "unknown ca"),
            ("good", "expired", "certificate expired"),
        ],
        ("of another host", "good", "certificate is not valid for '127.0.0.1'"),
        ("good", "none", "certificate required"),
    ),
)
def test_peer_without_valid_certificate_is_rejected(
    rabbit_url: str,
    papers: Certificates,
    server: str,
    client: str,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        bus_by(rabbit_url, papers, paper(papers, server), paper(papers, client)) as (bus, relay),
        pytest.raises(Unavailable, match=f"(?i){message}") as raised,
    ):
        bus.conductor().device_set_status("u", "enabled")
    assert f"broker at 127.0.0.1:{relay.port}" in raised.value.message
    assert any(raised.value.message.split(": ")[1] in r.message for r in caplog.records)
    assert relay.handshake_errors, "it was tried"
    assert relay.connections == 0, "and nothing reached the broker"
    assert set(relay.first_bytes) == {HELLO}, "not even in the clear"


def paper(papers: Certificates, kind: str) -> Any:
    """Return a valid certificate, one with the given defect, or None."""
    name = kind.replace(" ", "-")
    makers: dict[str, Callable[[], Any]] = {
        "good": lambda: papers.server,
        "none": lambda: None,
        "expired": lambda: papers.trusted.sign(name, days=-1),
        "of another authority": lambda: papers.foreign.sign(name),
        "of another host": lambda: papers.trusted.sign(name, address="127.0.0.9"),
    }
    return makers[kind]()


def test_broker_without_tls_is_rejected(rabbit_url: str, papers: Certificates) -> None:
    with open_bus(rabbit_url, rpc={"timeout": 3.0}) as bus:
        bus.conf.set_override("ssl", True, group=GROUP)
        bus.conf.set_override("ssl_ca_file", str(papers.trusted.certificate), group=GROUP)
        with pytest.raises(Unavailable, match=r"(?i)ssl|EOF|reset"):
            bus.conductor().device_set_status("u", "enabled")


def test_tls_without_ca_file_logs_a_warning(
    rabbit_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_bus(rabbit_url, rpc={"timeout": 0.2}) as bus:
        bus.conf.set_override("ssl", True, group=GROUP)
        with pytest.raises(Unavailable):
            bus.conductor().device_set_status("u", "enabled")
    assert "[oslo_messaging_rabbit] ssl_ca_file is not set" in caplog.text


def test_wrong_password_is_logged_without_the_password(
    rabbit_url: str, papers: Certificates, caplog: pytest.LogCaptureFixture
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
            bus.serving("conductor", ConductorEndpoint()),
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
def test_notifications_use_tls(rabbit_url: str, papers: Certificates, server: str) -> None:
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
        assert bool(relay.connections) is (server == "good")
        assert set(relay.first_bytes) == {HELLO}
