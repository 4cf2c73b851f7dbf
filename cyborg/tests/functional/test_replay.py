# SPDX-License-Identifier: Apache-2.0
"""Replayed hosts in the whole service: a short day, and devices of each family that break."""

import json
import posixpath
import re
from collections.abc import Iterator
from typing import Any

import pytest

from cyborg.cli import app
from cyborg.core.capture.model import select_device
from cyborg.db import schema
from cyborg.drivers.replay.recorder import unpack
from cyborg.testing import captures
from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.replayed_day import Day
from cyborg.tests.fixtures.hosts.replayed_hosts import Refused, ReplayedCloud, running
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample

pytestmark = pytest.mark.slow

GPU, OTHER_GPU = "0000:3b:00.0", "0000:af:00.0"
DRIVE, OTHER_DRIVE = "0000:5e:00.0", "0000:d9:00.0"
QAT, OTHER_QAT = "0000:6b:00.0", "0000:e8:00.0"
FAULTS = {
    "eio": "Input/output error",
    "ebusy": "Device or resource busy",
    "stuck_reset": "Connection timed out",
    "disappears": "No such device",
}
HOSTS = {name.replace("_", "-"): name for name in FAULTS}  # a host for each fault
DIRTY = "dirty"
NOVA = FakeNova()


def named_hosts(request: pytest.FixtureRequest) -> set[str]:
    """Return the hosts and faults of the selected tests of this module."""
    found: set[str] = set()
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            callspec = getattr(item, "callspec", None)
            found |= set(callspec.params.values()) if callspec is not None else set()
    return found


@pytest.fixture(scope="module")
def broken(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReplayedCloud]:
    """Yield a cloud with a host for each fault, which affects a card of each family.

    Only the hosts of the selected tests: an agent takes seconds of CPU time.
    """
    named = named_hosts(request)
    hosts = {host: fault for host, fault in HOSTS.items() if fault in named}
    more = [DIRTY] if DIRTY in named else []
    faults = {
        host: ",".join(f"{card}:{fault}" for card in (GPU, QAT)) for host, fault in hosts.items()
    }
    # A drive that has disappeared once comes back.
    counts = {"disappears": "=1"}
    faults |= {
        host: f"{faults[host]},{DRIVE}:{fault}{counts.get(fault, '')}@erase"
        for host, fault in hosts.items()
    }
    faults[DIRTY] = f"{DRIVE}:eio=2@erase,{GPU}:eio=3@create,{QAT}:ebusy=1@configure"
    folder = tmp_path_factory.mktemp("broken")
    with (
        serve_nova(NOVA),
        running(folder, [*hosts, *more], faults=faults, nova_url=NOVA.url) as cloud,
    ):
        yield cloud


@pytest.mark.matrix
def test_day_leaves_nothing_behind(tmp_path_factory: pytest.TempPathFactory) -> None:
    hosts = [f"compute-{n}" for n in range(3)]
    with running(tmp_path_factory.mktemp("day"), hosts) as cloud:
        day = Day(cloud, binds=45, threads=4)
        figures = day.run()
        wait_until("the last servers are cleaned up", lambda: not day.find_left_overs())
        assert figures.violations == []
        assert (len(figures.binds), len(figures.releases)) == (45, 45)
        assert set(figures.families) == set(captures.DRIVERS)
        assert figures.layouts
        assert cloud.audit() == []
        chains, records = cloud.verify_custody()
        assert chains > 20
        assert records > 120


@pytest.mark.parametrize("fault", sample(FAULTS, "stuck_reset", mark=pytest.mark.long))
def test_gpu_that_breaks_fails_the_bind_with_its_reason(broken: ReplayedCloud, fault: str) -> None:
    host = next(host for host, name in HOSTS.items() if name == fault)
    kernel = broken.kernel(host)
    with pytest.raises(Refused, match=f"could not be created at {GPU}: {FAULTS[fault]}"):
        broken.bind(host, GPU, "VGPU")
    assert kernel.sysfs.list_names("bus/mdev/devices") == []
    (job,) = [job for job in broken.jobs(host) if job["kind"] == "prepare"]
    wait_until("Nova has the event", lambda: job["subject"] in events_of(NOVA, "failed"))
    assert job["subject"] not in events_of(NOVA, "completed")
    if fault == "disappears":
        wait_until("it is removed", lambda: GPU not in addresses(broken, host))
        assert FAULTS[fault] in str(job["error"])
    else:
        (error,) = broken.device(host, GPU)["job_errors"]
        assert re.fullmatch(
            rf"prepare of {GPU}/nvidia-593/[0-9]+ failed at 20[0-9T:-]+Z, job {job['uuid']}: "
            rf"a device of type nvidia-593 could not be created at {GPU}: {FAULTS[fault]}",
            error,
        )
        assert broken.device(host, GPU)["state"] == "ready", "one failure does not close it"
    server = broken.bind(host, OTHER_GPU, "VGPU")
    assert len(kernel.sysfs.list_names("bus/mdev/devices")) == 1
    assert broken.device(host, OTHER_GPU)["job_errors"] == []
    broken.release(server)


@pytest.mark.parametrize("fault", sample(FAULTS, "stuck_reset", mark=pytest.mark.long))
def test_crypto_accelerator_that_breaks_fails_the_job_with_its_reason(
    broken: ReplayedCloud, fault: str
) -> None:
    host = next(host for host, name in HOSTS.items() if name == fault)
    job = broken.set_layout(host, QAT, "dc")
    assert job["state"] == "failed"
    assert FAULTS[fault] in str(job["error"])
    if fault != "disappears":
        (error,) = broken.device(host, QAT)["job_errors"]
        assert error.startswith(f"partition of {QAT} failed at ")
        assert FAULTS[fault] in error
    assert broken.set_layout(host, OTHER_QAT, "dc")["state"] == "done"
    assert broken.device(host, OTHER_QAT)["job_errors"] == []
    if fault == "stuck_reset":
        wait_until("it is unhealthy", lambda: broken.device(host, QAT)["health"] != "ok")
        assert "qat/state is down" in str(broken.device(host, QAT)["health_reason"])


@pytest.mark.parametrize(
    "fault", sample(("eio", "ebusy", "stuck_reset"), "stuck_reset", mark=pytest.mark.long)
)
def test_drive_that_cannot_be_erased_is_not_given_to_another_server(
    broken: ReplayedCloud, fault: str
) -> None:
    host = next(host for host, name in HOSTS.items() if name == fault)
    server = broken.bind(host, DRIVE, "CUSTOM_NVME")
    kernel = broken.kernel(host)
    kernel.data[DRIVE] = "secret"
    broken.release(server)
    wait_until("the erasure has failed", lambda: FAULTS[fault] in errors_of(broken, host))
    wait_until(
        "the drive is reserved", lambda: broken.free_units(host, DRIVE, "CUSTOM_NVME") == 0, 30
    )
    # One failure does not close the device, but the handle is not given to a server.
    shown = broken.call("GET", f"devices/{broken.device(host, DRIVE)['uuid']}")
    assert (shown["address"], shown["state"]) == (DRIVE, "ready")
    (error,) = shown["job_errors"]
    assert error.startswith(f"handle {DRIVE}, release job ")
    assert error.endswith(f": {DRIVE} could not be erased: {FAULTS[fault]}")
    with pytest.raises(Refused):
        broken.bind(host, DRIVE, "CUSTOM_NVME")
    assert kernel.data == {DRIVE: "secret"}
    assert is_dirty(broken, host)
    other = broken.bind(host, OTHER_DRIVE, "CUSTOM_NVME")
    broken.release(other)


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["disappears"])
def test_drive_that_disappears_while_it_is_erased_counts_as_clean_when_it_returns(
    broken: ReplayedCloud, fault: str
) -> None:
    host = fault
    device = str(broken.device(host, DRIVE)["uuid"])
    server = broken.bind(host, DRIVE, "CUSTOM_NVME")
    kernel = broken.kernel(host)
    kernel.data[DRIVE] = "secret"
    broken.release(server)
    wait_until("the drive is removed", lambda: DRIVE not in addresses(broken, host))
    wait_until("it is not offered", lambda: broken.free_units(host, DRIVE, "CUSTOM_NVME") == 0)
    with pytest.raises(Refused):
        broken.bind(host, DRIVE, "CUSTOM_NVME")
    (failure,) = custody_of(broken, device, "cleaning_failed")
    assert failure["error"].endswith(f": {DRIVE} could not be erased: {FAULTS[host]}")
    broken.release(broken.bind(host, OTHER_DRIVE, "CUSTOM_NVME"))

    # doc/source/limits.rst: it counts as clean, although nobody erased it.
    insert(broken, host, DRIVE)
    wait_until(
        "it is offered again", lambda: broken.free_units(host, DRIVE, "CUSTOM_NVME") == 1, 120
    )
    assert broken.device(host, DRIVE)["uuid"] == device
    server = broken.bind(host, DRIVE, "CUSTOM_NVME")
    assert kernel.data == {DRIVE: "secret"}
    broken.release(server)
    wait_until("it is erased", lambda: not is_dirty(broken, host))
    assert kernel.data == {}


@pytest.mark.matrix
@pytest.mark.parametrize("host", [DIRTY])
def test_drive_whose_erasure_fails_twice_is_free_after_the_third(
    broken: ReplayedCloud, host: str
) -> None:
    server = broken.bind(host, DRIVE, "CUSTOM_NVME")
    kernel = broken.kernel(host)
    kernel.data[DRIVE] = "secret"
    broken.release(server)
    wait_until("the erasure has failed", lambda: "Input/output" in errors_of(broken, host))
    assert kernel.data == {DRIVE: "secret"}
    wait_until("it is erased", lambda: not is_dirty(broken, host))
    assert kernel.data == {}
    wait_until(
        "it is offered again", lambda: broken.free_units(host, DRIVE, "CUSTOM_NVME") == 1, 30
    )
    broken.release(broken.bind(host, DRIVE, "CUSTOM_NVME"))


@pytest.mark.matrix
@pytest.mark.parametrize("host", [DIRTY])
def test_gpu_that_fails_repeatedly_is_closed_until_an_operator_enables_it(
    broken: ReplayedCloud, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> str:
        connection = ["--os-auth-type", "none", "--os-endpoint", broken.stack.endpoint]
        assert app.main([*connection, *words]) == 0, capsys.readouterr()
        return capsys.readouterr().out

    device = str(broken.device(host, GPU)["uuid"])
    units = broken.free_units(host, GPU, "VGPU")
    assert units > 0
    for _ in range(3):
        with pytest.raises(Refused, match="Input/output error"):
            broken.bind(host, GPU, "VGPU")
    wait_until("it is reserved", lambda: broken.free_units(host, GPU, "VGPU") == 0)
    # Placement has the change a moment before the conductor has recorded that.
    show = ("device-show", device, "-f", "json")
    wait_until(
        "it is shown as reserved",
        lambda: json.loads(run(*show))["Schedulable"] == "no: failing",
    )
    shown = json.loads(run(*show))
    assert shown["State"] == "failing"
    assert shown["Job errors"][0].endswith("because 3 prepare jobs failed in a row")
    assert shown["Job errors"][1].startswith(f"prepare of {GPU}/nvidia-593/")
    with pytest.raises(Refused):
        broken.bind(host, GPU, "VGPU")
    broken.release(broken.bind(host, OTHER_GPU, "VGPU"))

    run("device-enable", device)
    wait_until("it is offered", lambda: broken.free_units(host, GPU, "VGPU") == units)
    words = ("device-list", "--host", host, "--address", GPU, "-f", "json")
    wait_until(
        "it is shown as offered",
        lambda: [row["Schedulable"] for row in json.loads(run(*words))] == ["yes, see job_errors"],
    )
    broken.release(broken.bind(host, GPU, "VGPU"))
    assert broken.device(host, GPU)["job_errors"] == []


@pytest.mark.matrix
@pytest.mark.parametrize("host", [DIRTY])
def test_layout_that_is_applied_at_last_clears_the_error(broken: ReplayedCloud, host: str) -> None:
    assert broken.set_layout(host, QAT, "dc")["state"] == "failed"
    (error,) = broken.device(host, QAT)["job_errors"]
    assert "Device or resource busy" in error
    # It stays closed until the report that follows the job.
    wait_until("it is ready", lambda: broken.device(host, QAT)["state"] == "ready")
    assert broken.set_layout(host, QAT, "dc")["state"] == "done"
    assert broken.device(host, QAT)["job_errors"] == []


def events_of(nova: FakeNova, status: str) -> set[str]:
    """Return the instances for which Nova has an event of this status."""
    return {
        event["server_uuid"]
        for call in nova.calls
        for event in call["events"]
        if (event["name"], event["status"]) == ("accelerator-request-bound", status)
    }


def addresses(cloud: ReplayedCloud, host: str) -> set[str]:
    """Return the addresses of the devices of a host."""
    return {str(device["address"]) for device in cloud.devices(host)}


def errors_of(cloud: ReplayedCloud, host: str) -> str:
    """Return the errors of the jobs of a host."""
    return " ".join(str(row["error"]) for row in rows.read(cloud.engine, schema.jobs, host=host))


def custody_of(cloud: ReplayedCloud, device: str, event: str) -> list[dict[str, Any]]:
    """Return the details of the custody records of a device with this event."""
    body = cloud.call("GET", f"devices/{device}/custody?event={event}")
    return [record["details"] for record in body["custody"]]


def insert(cloud: ReplayedCloud, host: str, address: str) -> None:
    """Insert a function again that has disappeared, as its host had it at first."""
    replayed = cloud.agents[host].replayed
    assert replayed is not None
    link = replayed.capture.folders["sys/bus/pci/devices"].links[address]
    path = posixpath.normpath(f"sys/bus/pci/devices/{link}")
    with replayed.kernel.lock:
        unpack(select_device(replayed.capture, path), replayed.sysfs_root.parent)


def is_dirty(cloud: ReplayedCloud, host: str) -> bool:
    """Return whether the drive of a host must be erased before it can be bound again."""
    devices: list[dict[str, Any]] = rows.read(cloud.engine, schema.devices, host=host)
    (device,) = [row["id"] for row in devices if row["address"] == DRIVE]
    (part,) = rows.read(cloud.engine, schema.deployables, device_id=device)
    (handle,) = rows.read(cloud.engine, schema.attach_handles, deployable_id=part["id"])
    return bool(handle["needs_cleaning"])
