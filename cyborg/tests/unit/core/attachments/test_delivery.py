# SPDX-License-Identifier: Apache-2.0
"""What an agent reports of the devices that it attaches to guests."""

from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.attachments.delivery import (
    MAX_DELIVERIES,
    MAX_ERROR,
    NOT_RUNNING,
    STOPPED,
    Delivery,
    DeliveryRecord,
    Outcome,
    RecordedDelivery,
    load_deliveries,
)
from cyborg.core.errors import Invalid

ARQ = "c2f0c1b0-2c4b-4f59-8f39-0d6d1d2f7c11"
NOT_RECORDED = RecordedDelivery(is_attached=False, error=None)
ATTACHED = RecordedDelivery(is_attached=True, error=None)
HAS, NEW = Outcome(is_attached=True), Outcome(is_attached=True, is_new=True)
LACKS = Outcome(is_attached=False, error="No more available PCI slots")
UNKNOWN = Outcome(None, "libvirt does not answer")
TIMEOUT = 60.0


def update(
    record: DeliveryRecord,
    outcome: Outcome | None,
    now: float,
    recorded: RecordedDelivery = NOT_RECORDED,
) -> list[str | None]:
    """Return the errors that are reported after a check of one device."""
    outcomes = {} if outcome is None else {ARQ: outcome}
    found = record.update({ARQ: recorded}, outcomes, now)
    assert all(d.is_running == (outcome is not STOPPED) for d in found)
    return [delivery.error for delivery in found]


def test_update_device_that_the_guest_has_is_reported_until_it_is_recorded() -> None:
    record = DeliveryRecord(TIMEOUT)
    assert update(record, HAS, 0.0) == [None]
    assert update(record, HAS, 1.0) == [None]
    record.confirm()
    assert update(record, HAS, 2.0, ATTACHED) == []
    assert update(record, HAS, 3.0, RecordedDelivery(False, "an error")) == [None]


def test_update_device_that_was_attached_again_is_reported_although_it_is_recorded() -> None:
    record = DeliveryRecord(TIMEOUT)
    assert update(record, NEW, 0.0, ATTACHED) == [None]
    # The report was lost, and the next check finds the device.
    assert update(record, HAS, 1.0, ATTACHED) == [None]
    record.confirm()
    assert update(record, HAS, 2.0, ATTACHED) == []


@pytest.mark.parametrize("recorded", [NOT_RECORDED, ATTACHED])
def test_update_missing_device_is_an_error_after_the_timeout(
    recorded: RecordedDelivery,
) -> None:
    record = DeliveryRecord(TIMEOUT)
    assert update(record, LACKS, 10.0, recorded) == []
    assert record.next_deadline(30.0) == 40.0
    assert update(record, LACKS, 69.9, recorded) == []
    assert update(record, LACKS, 70.0, recorded) == [LACKS.error]
    assert record.next_deadline(70.0) is None
    record.confirm()
    assert update(record, LACKS, 80.0, RecordedDelivery(False, LACKS.error)) == []
    other = Outcome(is_attached=False, error="device is in use")
    assert update(record, other, 90.0, RecordedDelivery(False, LACKS.error)) == [other.error]


def test_update_guest_that_does_not_run_lacks_nothing() -> None:
    record = DeliveryRecord(TIMEOUT)
    assert update(record, LACKS, 0.0) == []
    assert update(record, LACKS, 60.0) == [LACKS.error]
    assert update(record, STOPPED, 61.0) == [], "the error was not recorded"
    # The next start has the whole time.
    assert update(record, LACKS, 100.0) == []
    assert update(record, LACKS, 160.0) == [LACKS.error]
    record.confirm()
    for now in (161.0, 162.0):  # the report may be lost
        assert update(record, STOPPED, now, RecordedDelivery(False, LACKS.error)) == [NOT_RUNNING]
    record.confirm()
    assert update(record, STOPPED, 163.0) == []
    assert update(record, STOPPED, 164.0, ATTACHED) == [], "it had the device"


def test_update_guest_that_runs_again_is_not_reported_as_stopped() -> None:
    record, failed = DeliveryRecord(TIMEOUT), RecordedDelivery(False, LACKS.error)
    assert update(record, LACKS, 0.0) == []
    assert update(record, LACKS, 60.0) == [LACKS.error]
    record.confirm()
    # This report is lost.
    assert update(record, STOPPED, 61.0, failed) == [NOT_RUNNING]
    assert update(record, LACKS, 62.0, failed) == []
    assert update(record, LACKS, 122.0, failed) == [], "the same error is recorded"
    assert update(record, STOPPED, 123.0, failed) == [NOT_RUNNING]
    assert update(record, UNKNOWN, 124.0, failed) == []


def test_update_device_that_was_detached_is_not_reported() -> None:
    record = DeliveryRecord(TIMEOUT)
    assert update(record, LACKS, 0.0) == []
    assert update(record, LACKS, 60.0) == [LACKS.error]
    assert update(record, None, 61.0, RecordedDelivery(False, LACKS.error)) == []
    assert update(record, LACKS, 100.0) == []


def test_update_silent_hypervisor_is_an_error_only_of_a_guest_without_its_device() -> None:
    record = DeliveryRecord(TIMEOUT)
    assert update(record, UNKNOWN, 0.0, ATTACHED) == []
    assert update(record, UNKNOWN, 1000.0, ATTACHED) == []
    assert update(record, UNKNOWN, 1001.0) == []
    assert update(record, UNKNOWN, 1061.0) == [UNKNOWN.error]


def test_update_unbound_arq_is_forgotten() -> None:
    record = DeliveryRecord(TIMEOUT)
    assert update(record, LACKS, 0.0) == []
    assert update(record, LACKS, 60.0) == [LACKS.error]
    assert record.update({}, {}, 61.0) == []
    assert record.next_deadline(61.0) is None
    assert update(record, LACKS, 62.0) == []


@given(st.lists(st.sampled_from([HAS, NEW, LACKS, UNKNOWN, STOPPED, None]), max_size=30), st.data())
def test_record_of_the_conductor_ends_with_the_state_of_the_guest(
    outcomes: list[Outcome | None], data: st.DataObject
) -> None:
    """Whatever reports are lost, and whenever the agent starts again."""

    def write(error: str | None, outcome: Outcome | None) -> RecordedDelivery:
        """Return the record after a report, as the conductor writes it."""
        return NOT_RECORDED if outcome is STOPPED else RecordedDelivery(error is None, error)

    record, now, recorded = DeliveryRecord(TIMEOUT), 0.0, NOT_RECORDED
    for outcome in [*outcomes, HAS, HAS, LACKS, LACKS, LACKS]:
        now += 61.0
        if data.draw(st.booleans()):
            record = DeliveryRecord(TIMEOUT)
        for error in update(record, outcome, now, recorded):
            if data.draw(st.booleans()):
                recorded = write(error, outcome)
                record.confirm()
    for outcome, expected in (
        (HAS, ATTACHED),
        (LACKS, RecordedDelivery(is_attached=False, error=LACKS.error)),
        (STOPPED, NOT_RECORDED),
        (HAS, ATTACHED),
        (STOPPED, ATTACHED),
    ):
        for _ in range(3):
            now += 61.0
            for error in update(record, outcome, now, recorded):
                recorded = write(error, outcome)
                record.confirm()
        assert recorded == expected


def test_delivery_error_is_sanitised_and_never_empty() -> None:
    assert Delivery(ARQ, "a\x00b").error == "a b"
    assert len(str(Delivery(ARQ, "x" * (2 * MAX_ERROR)).error)) == MAX_ERROR
    assert Delivery(ARQ, "\x00").error == "no reason is known"
    assert Delivery.from_dict(Delivery(ARQ).to_dict()) == Delivery(ARQ)


def test_delivery_of_a_guest_that_does_not_run_is_no_success_for_an_older_conductor() -> None:
    """It ignores the field that it does not know."""
    body = Delivery(ARQ, NOT_RUNNING, is_running=False).to_dict()
    assert body == {"arq": ARQ, "error": NOT_RUNNING, "is_running": False}
    assert load_deliveries([body]) == {ARQ: Delivery(ARQ, NOT_RUNNING, is_running=False)}


def test_load_deliveries_returns_the_delivery_of_each_arq() -> None:
    other = str(uuid4())
    body = [{"arq": ARQ.upper(), "error": None}, {"arq": other, "error": "lost"}, {"arq": ARQ}]
    assert load_deliveries(body) == {ARQ: Delivery(ARQ), other: Delivery(other, "lost")}


@pytest.mark.parametrize(
    "devices",
    [
        None,
        {},
        [None],
        [{}],
        [{"arq": "x", "error": None}],
        [{"arq": ARQ, "error": 5}],
        [{"arq": ARQ, "is_running": 5}],
        [{"arq": ARQ}] * (MAX_DELIVERIES + 1),
    ],
)
def test_load_deliveries_malformed_report_is_refused(devices: Any) -> None:
    with pytest.raises(Invalid) as found:
        load_deliveries(devices)
    assert found.value.details["field"]
