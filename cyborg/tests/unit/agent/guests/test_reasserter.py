# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from cyborg import os_acc
from cyborg.agent.guests.reassertion import Reasserter
from cyborg.core.errors import DriverFailed, Stale, Unavailable
from cyborg.tests.fixtures.hosts.fake_hypervisor import (
    SERVER,
    FakeHypervisor,
    make_arq,
    make_devices,
)

EPOCH = "0b6f1d9e-53a3-4f5c-8d1c-2f3e4d5c6b7a"


class Conductor:
    """The answers of a conductor."""

    def __init__(self) -> None:
        self.answer: Any = {"devices": []}
        self.error: Exception | None = None
        self.calls: list[tuple[str, str]] = []
        self.reports: list[Any] = []
        self.report_error: Exception | None = None

    def get_guest_devices(self, host: str, epoch: str) -> Any:
        """Return the devices of the host."""
        self.calls.append((host, epoch))
        if self.error is not None:
            raise self.error
        return self.answer

    def report_guest_devices(self, host: str, epoch: str, devices: Any) -> None:
        """Record a report as the conductor does: the next answer has it."""
        assert (host, epoch) == ("h", EPOCH)
        if self.report_error is not None:
            raise self.report_error
        self.reports.append([device["error"] for device in devices])
        known = {device["arq"]: device["error"] for device in devices}
        for found in self.answer["devices"]:
            if found["arq"]["uuid"] in known:
                error = known[found["arq"]["uuid"]]
                found |= {"attached": error is None, "error": error}


class Host:
    """A host with one running guest, and its reasserter."""

    def __init__(self) -> None:
        self.hypervisor = FakeHypervisor()
        self.hypervisor.start(SERVER)
        self.conductor = Conductor()
        self.watched = 0
        self.now = 0.0
        self.reasserter = Reasserter(
            "h",
            EPOCH,
            self.conductor,  # type: ignore[arg-type]
            make_devices(self.hypervisor),
            self._watch,
            60.0,
            clock=lambda: self.now,
        )

    def _watch(self) -> None:
        self.watched += 1


@pytest.fixture
def host() -> Host:
    return Host()


def item(ready: bool = True) -> dict[str, Any]:
    return {"instance": SERVER, "ready": ready, "arq": make_arq(1)}


def test_missing_device_is_attached(host: Host) -> None:
    host.conductor.answer = {"devices": [item()]}
    assert host.reasserter.run_once() == 60.0
    assert host.hypervisor.count(SERVER) == 1
    assert (host.conductor.calls, host.watched) == ([("h", EPOCH)], 1)


def test_device_that_is_not_ready_is_tried_again_soon(host: Host) -> None:
    host.conductor.answer = {"devices": [item(ready=False)]}
    assert [host.reasserter.run_once() for _ in range(3)] == [2.0, 4.0, 8.0]
    host.conductor.answer = {"devices": [item()]}
    assert host.reasserter.run_once() == 60.0
    host.conductor.answer = {"devices": [item(ready=False)]}
    assert host.reasserter.run_once() == 2.0


@pytest.mark.parametrize(
    "answer",
    [None, {}, {"devices": [1]}, {"devices": [{"instance": "x", "arq": {}, "ready": True}]}],
)
def test_malformed_answer_is_no_crash(host: Host, answer: Any) -> None:
    host.conductor.answer = answer
    assert host.reasserter.run_once() == 2.0


def test_malformed_device_does_not_hide_the_others(host: Host) -> None:
    host.conductor.answer = {"devices": [{**item(), "arq": {"uuid": "x"}}, item()]}
    assert host.reasserter.run_once() == 2.0
    assert host.hypervisor.count(SERVER) == 1


def test_start_of_a_guest_resets_the_delay(host: Host) -> None:
    host.conductor.answer = {"devices": [item(ready=False)]}
    assert [host.reasserter.run_once() for _ in range(3)] == [2.0, 4.0, 8.0]
    host.reasserter.notice_start()
    assert host.reasserter.run_once() == 2.0


def test_unknown_agent_is_no_recovery(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    host.conductor.error = Unavailable("no conductor")
    host.reasserter.run_once()
    host.conductor.error = Stale("unknown agent epoch")
    host.reasserter.run_once()
    assert "works again" not in caplog.text
    host.conductor.error = None
    host.reasserter.run_once()
    assert "Checking the devices of guests works again" in caplog.text


def test_conductor_and_hypervisor_that_do_not_answer_are_retried(host: Host) -> None:
    host.conductor.error = Unavailable("no conductor")
    assert host.reasserter.run_once() == 2.0
    host.conductor.error = Stale("unknown agent epoch")
    assert host.reasserter.run_once() == 4.0
    host.conductor.error, host.hypervisor.error = None, Unavailable("no libvirt")
    host.conductor.answer = {"devices": [item()]}
    assert host.reasserter.run_once() == 8.0
    host.hypervisor.error = None
    assert host.reasserter.run_once() == 60.0
    assert host.hypervisor.count(SERVER) == 1


def refuse(error: Exception) -> Any:
    """Return an ``attach`` that always fails."""

    def attach(instance: str, device: str) -> None:
        raise error

    return attach


def test_guest_that_gets_its_device_is_reported_at_each_start(host: Host) -> None:
    host.conductor.answer = {"devices": [item()]}
    host.reasserter.run_once()
    host.reasserter.run_once()
    assert host.conductor.reports == [[None]]
    host.hypervisor.start(SERVER)
    host.reasserter.run_once()
    host.reasserter.run_once()
    assert (host.hypervisor.attached, host.conductor.reports) == (2, [[None], [None]])


def test_device_that_an_earlier_agent_has_attached_is_not_reported_again(host: Host) -> None:
    host.hypervisor.attach(SERVER, os_acc.attach(make_arq(1)))
    host.conductor.answer = {"devices": [{**item(), "attached": True, "error": None}]}
    assert host.reasserter.run_once() == 60.0
    assert host.conductor.reports == []


def test_guest_without_its_device_is_an_error_at_the_deadline(host: Host) -> None:
    host.conductor.answer = {"devices": [item()]}
    attach = host.hypervisor.attach
    host.hypervisor.attach = refuse(DriverFailed("No more available PCI slots"))  # type: ignore[method-assign]
    assert host.reasserter.run_once() == 2.0
    host.now = 59.0
    # Not after the delay of the next try, which is later.
    assert [host.reasserter.run_once() for _ in range(2)] == [1.0, 1.0]
    assert host.conductor.reports == []
    host.now = 60.0
    assert host.reasserter.run_once() == 16.0
    assert host.reasserter.run_once() == 32.0
    assert host.conductor.reports == [["No more available PCI slots"]]
    host.hypervisor.attach = attach  # type: ignore[method-assign]
    assert host.reasserter.run_once() == 60.0
    assert host.conductor.reports[1:] == [[None]]


@pytest.mark.parametrize(
    ("ready", "error"),
    [(False, "the host has not prepared the device yet"), (True, "libvirt has not answered")],
)
def test_guest_that_waits_for_its_host_is_an_error_at_the_deadline(
    host: Host, ready: bool, error: str
) -> None:
    host.conductor.answer = {"devices": [item(ready=ready)]}
    host.hypervisor.error = Unavailable(error) if ready else None
    host.reasserter.run_once()
    host.now = 60.0
    host.reasserter.run_once()
    assert host.conductor.reports == [[error]]


def test_silent_hypervisor_is_no_error_of_a_guest_that_has_its_device(host: Host) -> None:
    host.conductor.answer = {"devices": [item()]}
    host.reasserter.run_once()
    host.hypervisor.error = Unavailable("libvirt has not answered")
    for host.now in (0.0, 100.0, 200.0):
        host.reasserter.run_once()
    assert host.conductor.reports == [[None]]


def test_report_that_failed_is_repeated(host: Host) -> None:
    host.conductor.answer = {"devices": [{**item(), "attached": True, "error": None}]}
    host.conductor.report_error = Unavailable("no conductor")
    assert host.reasserter.run_once() == 2.0
    assert host.hypervisor.count(SERVER) == 1
    host.conductor.report_error = None
    assert host.reasserter.run_once() == 60.0
    assert host.conductor.reports == [[None]]


def test_end_of_a_job_matters_only_while_a_guest_waits_for_host_work(host: Host) -> None:
    host.conductor.answer = {"devices": [item(ready=False)]}
    assert [host.reasserter.run_once() for _ in range(3)] == [2.0, 4.0, 8.0]
    host.reasserter.notice_job()
    assert host.reasserter.run_once() == 2.0
    host.conductor.answer = {"devices": [{**item(), "arq": {"uuid": "x"}}]}
    assert [host.reasserter.run_once() for _ in range(2)] == [4.0, 8.0]
    host.reasserter.notice_job()
    assert host.reasserter.run_once() == 16.0
