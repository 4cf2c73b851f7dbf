# SPDX-License-Identifier: Apache-2.0
"""Execution of a job's items, with failures and unsupported kinds."""

from collections.abc import Sequence

import pytest

from cyborg.agent.jobs.executor import execute
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Ability, Device, Layout
from cyborg.core.jobs.job import JobKind, JobSpec, WorkItem
from cyborg.tests.fixtures.hosts.agent_jobs import (
    CARD,
    PREPARE,
    PROGRAM,
    RELEASE,
    Host,
    job_uuid,
    work,
)
from cyborg.tests.fixtures.hosts.scripted_driver import LONG, ScriptedWorkDriver


def test_prepare_item_fails_stops_without_undo(host: Host) -> None:
    host.script.errors["prepare"] = DriverFailed("no air")
    state, error = host.run(work("p", PREPARE, "h1", "h2"))
    assert (state, error) == ("failed", "prepare of h1: no air")
    assert host.script.calls == [("prepare", "h1")]


def test_release_item_fails_continues_with_others(host: Host) -> None:
    host.script.errors["release"] = DriverFailed("stuck")
    state, error = host.run(work("r", RELEASE, "h1", "h2"))
    assert (state, error) == ("failed", "release of h1: stuck; release of h2: stuck")


def test_release_of_a_set_fails_leaves_its_members(host: Host) -> None:
    # The first item is that of a device set: a guest still has its devices.
    host.script.errors["release"] = DriverFailed("in use")
    state, error = host.run(work("r", RELEASE, "", "h1"))
    assert state == "failed"
    assert error is not None
    assert error.endswith(": in use")
    assert host.script.calls == [("release", CARD)]


def test_execute_long_error_is_truncated(host: Host) -> None:
    host.script.errors["prepare"] = SystemExit("x" * 5000)
    state, error = host.run(work("p"))
    assert state == "failed"
    assert error is not None
    assert len(error) == 1000


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (work("p", backend="b9"), "prepare of h1: this host has no backend 'b9'; it has b0, plain"),
        (
            work("p", backend="plain"),
            "prepare of h1: backend plain (driver puppet) does not support prepare "
            "in its configuration",
        ),
        (
            work("x", PROGRAM, backend="plain"),
            "program of h1: backend plain (driver puppet) does not support program "
            "in its configuration",
        ),
    ],
)
def test_execute_missing_or_unable_driver_fails(host: Host, spec: JobSpec, expected: str) -> None:
    host.start()
    assert host.run(spec) == ("failed", expected)
    host.stop()


def test_release_driver_without_prepare_succeeds(host: Host) -> None:
    host.start()
    assert host.run(work("r", RELEASE, backend="plain")) == ("done", None)
    host.stop()


def test_prepare_one_item_unsupported_starts_none(host: Host) -> None:
    items = (WorkItem("b0", CARD, CARD, "h1"), WorkItem("plain", CARD, CARD, "h2"))
    state, error = host.run(JobSpec(job_uuid("p"), PREPARE, items, LONG))
    assert (state, str(error)[:16]) == ("failed", "prepare of h2: b")
    assert host.script.calls == []


def test_release_ability_removed_still_releases(host: Host) -> None:
    host.driver.supported = frozenset({Ability.PROGRAMS})
    assert host.run(work("p"))[0] == "failed"
    assert host.run(work("r", RELEASE)) == ("done", None)


def test_execute_removed_backend_only_releases() -> None:
    removed = ScriptedWorkDriver("b9")
    for kind, expected in (
        (RELEASE, None),
        (PREPARE, "prepare of h1: this host has no backend 'b9'"),
    ):
        error = execute(work("x", kind, backend="b9"), {}, removed_driver={"b9": removed}.get)
        assert (error or "").startswith(expected or "")
        assert (error is None) is (expected is None)
        assert "uninstall-driver" not in (error or "")
    assert removed.script.calls == [("release", "h1")]


def test_release_without_driver_says_what_to_do() -> None:
    error = execute(work("r", RELEASE, backend="b9"), {})
    assert error is not None
    assert error.startswith("release of h1: this host has no backend 'b9'; it has none; put the ")
    assert error.endswith("cyborg uninstall-driver DRIVER --host HOST --backend BACKEND --force")


def test_release_removed_driver_fails_reports_error() -> None:
    def fail(backend: str) -> ScriptedWorkDriver | None:
        raise DriverFailed(f"driver of {backend} cannot be loaded: it left")

    error = execute(work("r", RELEASE, "h1", "h2", backend="b9"), {}, removed_driver=fail)
    assert error is not None
    assert error.startswith("release of h1: driver of b9 cannot be loaded: it left; release of h2")


class LayoutDriver(ScriptedWorkDriver):
    """Driver that can apply some layouts only."""

    def __init__(self, *layouts: str) -> None:
        super().__init__("b0")
        self.possible = layouts
        self.applied: list[str] = []
        self.supported = frozenset({Ability.PARTITIONS})

    def layouts(self, device: Device) -> Sequence[Layout]:
        return [Layout(name, {}) for name in self.possible]

    def partition(self, item: WorkItem, layout: str) -> None:
        self.applied.append(layout)
        if layout not in self.possible:
            raise DriverFailed(f"no {layout}")


@pytest.mark.parametrize(
    ("possible", "previous", "error", "applied"),
    [
        (["2"], "1", None, ["2"]),
        (["1"], "1", "partition of 0000:01:00.0: no 2", ["2", "1"]),
        (["1"], None, "partition of 0000:01:00.0: no 2", ["2"]),
        (
            [],
            "1",
            "partition of 0000:01:00.0: no 2; the previous layout 1 cannot be restored: no 1",
            ["2", "1"],
        ),
    ],
)
def test_failed_partition_restores_the_previous_layout(
    possible: list[str], previous: str | None, error: str | None, applied: list[str]
) -> None:
    driver = LayoutDriver(*possible)
    item = WorkItem("b0", CARD, "")
    spec = JobSpec(job_uuid("l"), JobKind.PARTITION, (item,), LONG, None, None, "2", previous)
    assert execute(spec, {"b0": driver}) == error
    assert driver.applied == applied
