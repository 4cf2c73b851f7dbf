# SPDX-License-Identifier: Apache-2.0
"""Jobs that change running guests."""

import threading
from typing import Any

import pytest

from cyborg.agent.guests.devices import GuestDevices
from cyborg.agent.jobs.checkpoint import CheckpointState
from cyborg.agent.jobs.executor import NO_LIVE_ATTACH
from cyborg.agent.jobs.queue import JobQueue
from cyborg.core.errors import Invalid
from cyborg.core.jobs.job import JobKind, JobSpec, load_job_spec
from cyborg.tests.fixtures.hosts.agent_jobs import CANCELLED, CARD, DONE, Host, job_uuid
from cyborg.tests.fixtures.hosts.fake_hypervisor import (
    OTHER,
    SERVER,
    FakeHypervisor,
    make_arq,
    make_devices,
)
from cyborg.tests.fixtures.hosts.scripted_driver import LONG

INFO = "attach_handle_info"
ITEM = {"backend": "b0", "device": CARD, "deployable": CARD, "handle": "h1"}


def arguments(**more: Any) -> dict[str, Any]:
    return {"items": [ITEM], "instance": SERVER, "devices": [make_arq(1)], **more}


def spec(job: str, kind: JobKind, **more: Any) -> JobSpec:
    return load_job_spec(job_uuid(job), kind, arguments(**more), 600.0)


@pytest.fixture
def hypervisor(host: Host) -> FakeHypervisor:
    """Return the guests of the host, whose agent attaches devices to them."""
    hypervisor = FakeHypervisor()
    hypervisor.start(SERVER)
    host.jobs = JobQueue(
        host.backends,
        host.checkpoint,
        8,
        host.outcomes,
        host.timers,
        guests=make_devices(hypervisor),
    )
    return hypervisor


def test_plug_and_unplug_call_no_driver(host: Host, hypervisor: FakeHypervisor) -> None:
    assert host.run(spec("plug", JobKind.PLUG)) == ("done", None)
    assert hypervisor.count(SERVER) == 1
    assert host.jobs.start(spec("plug", JobKind.PLUG)) == DONE
    assert host.run(spec("unplug", JobKind.UNPLUG)) == ("done", None)
    assert (hypervisor.count(SERVER), hypervisor.attached) == (0, 1)
    assert host.file("unplug") is CheckpointState.COMPLETED


def test_unplug_that_failed_runs_again_on_request(host: Host, hypervisor: FakeHypervisor) -> None:
    host.run(spec("plug", JobKind.PLUG))
    hypervisor.keeps = True
    state, error = host.run(spec("unplug", JobKind.UNPLUG))
    assert state == "failed"
    assert "must confirm the removal" in str(error)
    hypervisor.keeps = False
    assert host.run(spec("unplug", JobKind.UNPLUG)) == ("done", None)


def test_plug_that_arrives_after_its_unplug_is_refused(
    host: Host, hypervisor: FakeHypervisor
) -> None:
    unplug = spec("unplug", JobKind.UNPLUG, cancels=[job_uuid("plug")])
    assert host.run(unplug) == ("done", None)
    assert host.jobs.start(spec("plug", JobKind.PLUG)) == CANCELLED
    assert hypervisor.attached == 0


def test_agent_without_live_attach_names_the_option(host: Host) -> None:
    assert host.run(spec("plug", JobKind.PLUG)) == ("failed", NO_LIVE_ATTACH)


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        (JobKind.PLUG, {"devices": []}, "devices"),
        (JobKind.PREPARE, {}, "devices"),
        (JobKind.UNPLUG, {"instance": None}, "instance"),
        (JobKind.UNPLUG, {"devices": [1]}, "arguments"),
        (JobKind.UNPLUG, {"devices": [{}]}, "devices['uuid']"),
        (JobKind.PLUG, {"devices": [{**make_arq(1), "attach_handle_info": 1}]}, INFO),
        (JobKind.PLUG, {"devices": [{**make_arq(1), "attach_handle_type": 1}]}, "devices"),
        (JobKind.PLUG, {"devices": [make_arq(1)] * 1025}, "devices"),
    ],
)
def test_malformed_job_is_refused(kind: JobKind, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as found:
        load_job_spec(job_uuid("j"), kind, arguments(**changes), 600.0)
    assert found.value.details["field"] == field


def test_malformed_device_is_a_failure_of_the_job(host: Host, hypervisor: FakeHypervisor) -> None:
    broken = {**make_arq(1), "attach_handle_info": {"domain": "<"}}
    state, error = host.run(spec("plug", JobKind.PLUG, devices=[broken]))
    assert state == "failed"
    assert "attach_handle_info" in str(error)
    assert hypervisor.attached == 0


def test_guests_that_keep_their_devices_leave_slots_for_other_jobs(
    host: Host, hypervisor: FakeHypervisor
) -> None:
    """Of two slots, unplug jobs get one."""
    hypervisor.start(OTHER)
    hypervisor.keeps, asked, release = True, threading.Event(), threading.Event()

    def wait(seconds: float) -> None:
        asked.set()
        assert release.wait(LONG)

    guests = GuestDevices(hypervisor, 600.0, sleep=wait)
    guests.plug(SERVER, [make_arq(1), make_arq(2)])
    host.jobs = JobQueue(
        host.backends, host.checkpoint, 2, host.outcomes, host.timers, guests=guests
    )
    for number in (1, 2):
        items = [{**ITEM, "handle": f"h{number}"}]
        host.jobs.start(spec(f"u{number}", JobKind.UNPLUG, items=items, devices=[make_arq(number)]))
    assert asked.wait(LONG)
    other = {"items": [{**ITEM, "handle": "h3"}], "instance": OTHER, "devices": [make_arq(3)]}
    assert host.run(spec("plug", JobKind.PLUG, **other)) == ("done", None)
    assert host.jobs.running() == [job_uuid("u1")]
    hypervisor.keeps = False
    hypervisor.start(SERVER)
    release.set()
    ended = host.outcomes.wait_for(3)
    assert {job for job, *_ in ended} == {job_uuid(job) for job in ("plug", "u1", "u2")}
