# SPDX-License-Identifier: Apache-2.0
"""The notifier of audit events: order, outages, bounds."""

from collections.abc import Sequence
from typing import Any

import pytest

from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.rpc import notifications as audit_notifier
from cyborg.rpc.notifications import GROUP, AuditNotifier, is_enabled
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import wait_until


class Broker:
    """Replacement of the notifier: raises while ``down``."""

    def __init__(self) -> None:
        self.down = False
        self.invalid: set[int] = set()
        self.sent: list[int] = []
        self.attempts = 0

    def send(self, messages: Sequence[Any]) -> list[str | None]:
        """Send one event."""
        self.attempts += 1
        if self.down:
            raise Unavailable("no broker")
        (message,) = messages
        number = message["payload"]["n"]
        if number in self.invalid:
            return ["ValueError: too large"]
        self.sent.append(number)
        return [None]


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def notifier(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> AuditNotifier:
    monkeypatch.setattr(audit_notifier, "RETRY_DELAY", 0.02)
    conf = make_conf()
    is_enabled(conf)
    conf.set_override("driver", ["noop", "log"], group=GROUP)
    conf.set_override("transport_url", "kombu+memory:////", group=GROUP)
    new_notifier = AuditNotifier(conf)
    monkeypatch.setattr(new_notifier, "_notifier", broker)
    return new_notifier


def test_events_arrive_in_order_and_the_thread_ends(
    notifier: AuditNotifier, broker: Broker
) -> None:
    for number in range(100):
        notifier.notify({}, "audit.http.request", {"n": number})
    assert notifier.flush(60)
    assert broker.sent == list(range(100))
    wait_until("the thread has ended", lambda: notifier._thread is None)


def test_outage_delays_events_and_loses_none(
    notifier: AuditNotifier, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.down = True
    for number in range(3):
        notifier.notify({}, "audit.http.request", {"n": number})
    wait_until("it is repeated", lambda: broker.attempts >= 3)
    broker.down = False
    wait_until("all events are sent", lambda: broker.sent == [0, 1, 2])
    warnings = [line for line in texts_of(caplog.records) if "Cannot send audit events" in line]
    assert len(warnings) == 1


def test_full_queue_loses_the_newest_events_and_logs_it(
    notifier: AuditNotifier,
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(audit_notifier, "MAX_QUEUED", 5)
    broker.down = True
    for number in range(9):
        notifier.notify({}, "audit.http.request", {"n": number})
    broker.down = False
    wait_until("the others are sent", lambda: broker.sent == [0, 1, 2, 3, 4])
    assert any("the next ones are lost" in line for line in texts_of(caplog.records))


def test_invalid_event_is_dropped_and_logged(
    notifier: AuditNotifier, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.invalid = {1}
    for number in range(3):
        notifier.notify({}, "audit.http.request", {"n": number})
    assert notifier.flush(60)
    assert broker.sent == [0, 2]
    assert any("cannot be sent and is lost" in line for line in texts_of(caplog.records))


def test_missing_driver_is_an_error() -> None:
    with pytest.raises(Misconfigured, match="driver is not"):
        AuditNotifier(make_conf())
