# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from cyborg.agent.guests.reassertion import Reasserter
from cyborg.core.errors import Stale, Unavailable
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

    def get_guest_devices(self, host: str, epoch: str) -> Any:
        """Return the devices of the host."""
        self.calls.append((host, epoch))
        if self.error is not None:
            raise self.error
        return self.answer


class Host:
    """A host with one running guest, and its reasserter."""

    def __init__(self) -> None:
        self.hypervisor = FakeHypervisor()
        self.hypervisor.start(SERVER)
        self.conductor = Conductor()
        self.watched = 0
        self.reasserter = Reasserter(
            "h",
            EPOCH,
            self.conductor,  # type: ignore[arg-type]
            make_devices(self.hypervisor),
            self._watch,
            60.0,
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
