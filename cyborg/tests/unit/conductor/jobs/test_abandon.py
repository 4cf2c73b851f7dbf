# SPDX-License-Identifier: Apache-2.0
"""Handles that can no longer be cleaned, since their backend was uninstalled."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.jobs.dispatcher import JobDispatcher
from cyborg.core.errors import InUse, NotFound
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.host_work import UNREACHABLE, AgentsDouble
from cyborg.tests.fixtures.hosts.hosts import card
from cyborg.tests.fixtures.hosts.rollouts import Cloud
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.unit.conductor.drivers.test_rollout_controller import (
    bind,
    devices,
    install,
    uninstall,
)

RunJobs = Callable[[], None]


@pytest.fixture
def cloud(engine: sa.Engine) -> Cloud:
    new_cloud = Cloud(engine, ["c1"])
    new_cloud.enable("c1", "fake")
    return new_cloud


@pytest.fixture
def workers() -> AgentsDouble:
    return AgentsDouble()


@pytest.fixture
def run_jobs(cloud: Cloud, workers: AgentsDouble) -> RunJobs:
    """Advance the clock and run the jobs of a conductor."""

    def work() -> None:
        cloud.advance(700)
        jobs = build(JobDispatcher, cloud.conf, cloud.uow, workers, now=cloud.now, max_hosts=1)
        jobs.sweep()
        jobs.run_once()

    return work


def set_prepared(cloud: Cloud, *, owned: bool, index: int = 0) -> int:
    """Set a handle of c1 to prepared; return its row id."""
    handle = rows.read(cloud.engine, schema.attach_handles)[index]
    values = {} if owned else {"arq_id": None}
    rows.update(cloud.engine, schema.attach_handles, handle["id"], needs_cleaning=True, **values)
    return int(handle["id"])


def handles(cloud: Cloud) -> list[tuple[str, bool, bool]]:
    handle_rows = rows.read(cloud.engine, schema.attach_handles)
    return [(row["address"], row["needs_cleaning"], row["draining"]) for row in handle_rows]


def release(cloud: Cloud, handle: int) -> None:
    rows.update(cloud.engine, schema.attach_handles, handle, arq_id=None)


@pytest.mark.parametrize("answer", ["failed", UNREACHABLE])
def test_release_after_forced_uninstall_removes_the_device(
    cloud: Cloud, workers: AgentsDouble, run_jobs: RunJobs, answer: str
) -> None:
    bind(cloud, "c1")
    handle = set_prepared(cloud, owned=True)
    if answer == UNREACHABLE:
        cloud.mark_down("c1")
    uninstall(cloud, force=True)
    cloud.run()
    assert devices(cloud, "c1") == [("fake", True, True)], "the device of an instance stays"
    release(cloud, handle)
    removed = handles(cloud)
    workers.answers["release"] = answer
    run_jobs()
    assert (devices(cloud, "c1"), handles(cloud)) == ([], []), "device and handles are removed"
    (address, _, _), *_ = removed
    (record,) = rows.read(cloud.engine, schema.custody_records, event="cleaning_abandoned")
    assert record["details"]["handle_address"] == address
    (record,) = rows.read(cloud.engine, schema.custody_records, event="device_removed")
    run_jobs()
    assert {row["state"] for row in rows.read(cloud.engine, schema.jobs, kind="release")} == {
        "failed"
    }


@pytest.mark.slow
def test_forced_uninstall_on_a_down_host_removes_dirty_handles(cloud: Cloud) -> None:
    set_prepared(cloud, owned=False)
    cloud.mark_down("c1")
    uninstall(cloud, force=True)
    cloud.run()
    assert (devices(cloud, "c1"), handles(cloud)) == ([], [])


@pytest.mark.parametrize("two_bound", [False, True])
def test_sweep_removes_released_devices_of_a_down_host(cloud: Cloud, two_bound: bool) -> None:
    """A down host sends no report, so the sweep removes the device."""
    bind(cloud, "c1")
    (request,) = rows.read(cloud.engine, schema.arqs)
    if two_bound:
        profile = request["profile_id"]
        rows.insert_arq(cloud.engine, profile, state="Bound", hostname="c1")
        *_, other = rows.read(cloud.engine, schema.arqs)
        handle = rows.read(cloud.engine, schema.attach_handles)[1]
        rows.update(cloud.engine, schema.attach_handles, handle["id"], arq_id=other["id"])
    cloud.mark_down("c1")
    uninstall(cloud, force=True)
    cloud.run()
    cloud.hosts.sweep()
    assert devices(cloud, "c1") == [("fake", True, True)], "the device of an instance stays"
    Arqs(cloud.conf, cloud.uow, now=cloud.now).delete([request["uuid"]], None, None, True)
    cloud.hosts.sweep()
    if two_bound:
        assert handles(cloud) == [("0001", False, True)]
        Arqs(cloud.conf, cloud.uow, now=cloud.now).delete([other["uuid"]], None, None, True)
        cloud.hosts.sweep()
    assert (devices(cloud, "c1"), handles(cloud)) == ([], [])
    (provider,) = rows.read(cloud.engine, schema.providers)
    assert provider["stale_since"] is not None, "the provider is to be published"
    assert rows.read(cloud.engine, schema.device_tombstones) != [], "a tombstone is kept"
    assert cloud.hosts.sweep() == 0


def drop_from_file(cloud: Cloud, workers: AgentsDouble, run_jobs: RunJobs) -> None:
    """Remove the backend fake of c1 from the configuration file while an instance uses it."""
    bind(cloud, "c1")
    handle = set_prepared(cloud, owned=True)
    cloud.agents["c1"].running.clear()
    cloud.send_report("c1")
    release(cloud, handle)
    workers.answers["release"] = "failed"
    run_jobs()
    assert handles(cloud) == [("0000", True, True)]


@pytest.mark.parametrize("driver", sample(["fake", "driver-of-no-host"], "fake"))
@pytest.mark.parametrize("down", [False, True])
def test_forced_uninstall_of_a_backend_that_left_devices_abandons_them(
    cloud: Cloud, workers: AgentsDouble, run_jobs: RunJobs, driver: str, down: bool
) -> None:
    drop_from_file(cloud, workers, run_jobs)
    if down:
        cloud.mark_down("c1")
    uuid = cloud.drivers.uninstall(driver, "fake", ["c1"], drain=False, force=True)["uuid"]
    cloud.run()
    assert cloud.job(uuid)[0] == "done"
    run_jobs()
    assert (devices(cloud, "c1"), handles(cloud)) == ([], [])
    (record,) = rows.read(cloud.engine, schema.custody_records, event="cleaning_abandoned")
    assert record["details"]["handle_address"] == "0000"
    (job,) = rows.read(cloud.engine, schema.jobs, kind="release")
    assert (job["state"], job["error"][:9]) == ("failed", "abandoned"), "it is not retried"


def test_uninstall_of_a_backend_that_left_devices_needs_force_and_its_name(
    cloud: Cloud, workers: AgentsDouble, run_jobs: RunJobs
) -> None:
    drop_from_file(cloud, workers, run_jobs)
    for driver, backend, hosts, force in (
        ("fake", "fake", ["c1"], False),
        ("fake", "fake", None, True),
        ("fake", None, ["c1"], True),
        ("fake", "other", ["c1"], True),
        ("fakke", "other", ["c1"], True),
    ):
        with pytest.raises(NotFound):
            cloud.drivers.uninstall(driver, backend, hosts, drain=False, force=force)
    cloud.enable("c1", "fake", "other")
    with pytest.raises(NotFound):
        uninstall(cloud, backend="fake", hosts=["c1"], force=True)


def test_sweep_keeps_draining_handles_of_a_desired_backend(cloud: Cloud) -> None:
    bind(cloud, "c1")
    (request,) = rows.read(cloud.engine, schema.arqs)
    for handle in rows.read(cloud.engine, schema.attach_handles):
        rows.update(cloud.engine, schema.attach_handles, handle["id"], draining=True)
    cloud.mark_down("c1")
    Arqs(cloud.conf, cloud.uow, now=cloud.now).delete([request["uuid"]], None, None, True)
    cloud.hosts.sweep()
    assert len(handles(cloud)) == 2


def test_reinstalled_backend_cleans_abandoned_handles(
    cloud: Cloud, workers: AgentsDouble, run_jobs: RunJobs
) -> None:
    set_prepared(cloud, owned=False)
    cloud.mark_down("c1")
    uninstall(cloud, force=True)
    cloud.run()
    cloud.bring_back("c1")
    cloud.sync_agent("c1")
    assert devices(cloud, "c1") == []
    install(cloud)
    cloud.run()
    assert handles(cloud) == [("0000", True, False), ("0001", False, False)]
    run_jobs()
    assert handles(cloud) == [("0000", False, False), ("0001", False, False)]
    assert [item["handle"] for item in workers.calls[-1]["items"]] == ["0000"]


def test_dirty_handle_stays_while_its_device_is_bound(
    cloud: Cloud, workers: AgentsDouble, run_jobs: RunJobs
) -> None:
    bind(cloud, "c1")
    owned = set_prepared(cloud, owned=True)
    set_prepared(cloud, owned=False, index=1)
    cloud.mark_down("c1")
    uninstall(cloud, force=True)
    cloud.run()
    workers.answers["release"] = UNREACHABLE
    run_jobs()
    assert handles(cloud) == [("0000", True, True), ("0001", True, True)]
    release(cloud, owned)
    run_jobs()
    assert handles(cloud) == []


def test_release_of_a_desired_backend_is_retried_until_it_succeeds(
    cloud: Cloud, workers: AgentsDouble, run_jobs: RunJobs
) -> None:
    set_prepared(cloud, owned=False)
    workers.answers["release"] = "failed"
    run_jobs()
    run_jobs()
    assert handles(cloud) == [("0000", True, False), ("0001", False, False)]
    with pytest.raises(InUse, match="1 accelerators are in use or being cleaned; drain waits"):
        uninstall(cloud)
    job = uninstall(cloud, drain=True)
    cloud.run(rounds=2)
    assert cloud.job(job)[2] == {"c1": "draining"}
    workers.answers = {}
    run_jobs()
    cloud.run()
    assert (cloud.job(job)[0], handles(cloud)) == ("done", [])


def test_hardware_release_while_cleaning_is_refused(cloud: Cloud) -> None:
    set_prepared(cloud, owned=False)
    (device,) = rows.read(cloud.engine, schema.devices)
    with pytest.raises(InUse, match="1 of its handles are being cleaned"):
        cloud.drivers.release(device["uuid"])


def test_forced_uninstall_removes_only_the_unbound_deployable(cloud: Cloud) -> None:
    """One deployable is bound, the other dirty: only the dirty one is removed, with a tombstone."""
    pattern = card(0, backend="fake")
    other = replace(pattern.deployables[0], address="0000:00:00.1")
    device = replace(pattern, deployables=(pattern.deployables[0], other))
    cloud.agents["c1"].host.send(cloud.hosts, device)
    profile = rows.insert_profile(cloud.engine, "p")
    uuid = rows.insert_arq(cloud.engine, profile, state="Bound", hostname="c1")
    (request,) = rows.read(cloud.engine, schema.arqs, uuid=uuid)
    first, *_, last = rows.read(cloud.engine, schema.attach_handles)
    rows.update(cloud.engine, schema.attach_handles, first["id"], arq_id=request["id"])
    rows.update(cloud.engine, schema.attach_handles, last["id"], needs_cleaning=True)
    cloud.mark_down("c1")
    uninstall(cloud, force=True)
    cloud.run()
    assert handles(cloud) == [("0000", False, True)]
    (left,) = rows.read(cloud.engine, schema.device_tombstones)
    assert left["deployables"]["0000:00:00.1"]["dirty"] == ["0001"]
