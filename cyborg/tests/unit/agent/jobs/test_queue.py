# SPDX-License-Identifier: Apache-2.0
"""The job queue: each job runs once, jobs on one handle in order, others in parallel."""

from dataclasses import replace

import pytest

from cyborg.agent.backends.backend import Backend
from cyborg.agent.jobs.checkpoint import MAX_PENDING, CheckpointState
from cyborg.agent.jobs.queue import JobQueue
from cyborg.core.errors import DriverFailed, Unavailable
from cyborg.core.jobs.job import JobKind, JobSpec, WorkItem
from cyborg.tests.fixtures.hosts.agent_jobs import (
    CANCELLED,
    CARD,
    DONE,
    PREPARE,
    PROGRAM,
    RELEASE,
    RUNNING,
    Host,
    job_uuid,
    work,
)
from cyborg.tests.fixtures.hosts.scripted_driver import LONG, ScriptedWorkDriver, card


def test_start_answers_running_and_reports_outcome(host: Host) -> None:
    host.script.block("h1")
    spec = work("p")
    assert host.jobs.start(spec) == RUNNING
    host.script.wait_for(("prepare", "h1"))
    assert host.file("p") is CheckpointState.STARTED, "before the driver acts"
    assert host.outcomes.calls == []
    host.script.unblock("h1")
    assert host.outcomes.wait_for() == [(spec.job_uuid, "done", None)]
    assert host.file("p") is CheckpointState.COMPLETED


def test_start_repeated_runs_once(host: Host) -> None:
    host.script.block("h1")
    spec = work("p")
    host.jobs.start(spec)
    host.script.wait_for(("prepare", "h1"))
    activity = {"step": "prepare h1", "done": None, "total": None}
    assert host.jobs.start(spec) == {**RUNNING, "activity": activity}
    host.script.unblock("h1")
    host.outcomes.wait_for()
    assert host.jobs.start(spec) == DONE
    assert host.new_queue().start(spec) == DONE, "nor in the next life"
    assert host.script.calls == [("prepare", "h1")]


@pytest.mark.parametrize("kind", [PREPARE, PROGRAM])
def test_start_failed_job_returns_failed(host: Host, kind: JobKind) -> None:
    host.script.errors[str(kind)] = DriverFailed("no air")
    handle = "h1"
    failed = {"state": "failed", "error": f"{kind} of {handle}: no air"}
    host.start()
    assert host.run(work("p", kind)) == ("failed", failed["error"])
    assert host.file("p") is CheckpointState.FAILED
    host.script.errors.clear()
    assert host.jobs.start(work("p", kind)) == failed
    assert host.new_queue().start(work("p", kind)) == failed
    assert host.script.calls == [(str(kind), handle)]
    host.stop()


def test_start_failed_release_runs_again(host: Host) -> None:
    host.script.errors["release"] = ZeroDivisionError("oh")
    assert host.run(work("r", RELEASE)) == ("failed", "release of h1: ZeroDivisionError: oh")
    host.script.errors.clear()
    assert host.run(work("r", RELEASE)) == ("done", None)
    assert host.script.calls == [("release", "h1")] * 2
    assert host.jobs.start(work("r", RELEASE)) == DONE


def test_start_failed_restore_prepares_again(host: Host) -> None:
    host.script.errors["prepare"] = ZeroDivisionError("oh")
    restore = work("x", JobKind.RESTORE)
    assert host.run(restore) == ("failed", "restore of h1: ZeroDivisionError: oh")
    host.script.errors.clear()
    assert host.run(restore) == ("done", None)
    assert host.script.calls == [("prepare", "h1")] * 2
    assert host.jobs.start(restore) == DONE


def test_start_failed_program_runs_again_only_if_it_is_retried(host: Host) -> None:
    host.start()
    host.script.errors["program"] = ZeroDivisionError("oh")
    spec = work("x", PROGRAM, "")
    failed = host.run(replace(spec, retried=True))
    assert failed[0] == "failed"
    host.script.errors.clear()
    assert host.jobs.start(spec)["state"] == "failed"
    assert host.run(replace(spec, retried=True)) == ("done", None)


def test_start_job_interrupted_by_restart_runs_again(host: Host) -> None:
    host.checkpoint.record(job_uuid("p"), "prepare", CheckpointState.STARTED)
    host.checkpoint.flush()
    host.new_queue()
    assert host.run(work("p")) == ("done", None)


def test_start_after_reboot_runs_again(host: Host) -> None:
    host.run(work("p"))
    host.boot.write_text("boot-2")
    host.new_queue()
    assert host.run(work("p")) == ("done", None)
    assert host.script.calls == [("prepare", "h1")] * 2


def test_start_job_cancelled_before_arrival_fails(host: Host) -> None:
    assert host.run(work("r", RELEASE, cancels=("p",))) == ("done", None)
    assert host.file("p") is CheckpointState.CANCELLED
    assert host.jobs.start(work("p")) == CANCELLED
    assert host.new_queue().start(work("p")) == CANCELLED
    assert host.script.calls == [("release", "h1")]


def test_start_restore_cancels_restore_that_arrives_later(host: Host) -> None:
    """Another conductor may deliver it while the first heartbeat after a reboot cancels it."""
    restored = host.run(work("new", JobKind.RESTORE, cancels=("old",)))
    assert restored == ("done", None)
    calls = list(host.script.calls)
    assert host.jobs.start(replace(work("old", JobKind.RESTORE), retried=True)) == CANCELLED
    assert host.script.calls == calls


def test_start_cancel_of_job_interrupted_by_restart_fails_it(host: Host) -> None:
    host.checkpoint.record(job_uuid("p"), "prepare", CheckpointState.STARTED)
    host.run(work("r", RELEASE, cancels=("p",)))
    assert host.jobs.start(work("p")) == CANCELLED


def test_start_cancel_of_waiting_job_removes_it(host: Host) -> None:
    host.script.block("h1")
    host.jobs.start(work("p1"))
    host.jobs.start(work("p2"))
    host.jobs.start(work("r", RELEASE, cancels=("p2",)))
    assert host.jobs.start(work("p2")) == CANCELLED
    host.script.unblock("h1")
    host.outcomes.wait_until((job_uuid("p1"), "done", None), (job_uuid("r"), "done", None))
    assert host.script.calls == [("prepare", "h1"), ("release", "h1")]


def test_start_cancel_of_running_job_stops_after_item(host: Host) -> None:
    host.script.block("h1")
    host.jobs.start(work("p", PREPARE, "h1", "h2"))
    host.script.wait_for(("prepare", "h1"))
    host.jobs.start(work("r", RELEASE, "h3", cancels=("p",)))
    assert host.jobs.start(work("p")) == CANCELLED
    assert host.run(work("other", PREPARE, "h4")) == ("done", None)
    assert ("release", "h3") not in host.script.calls, "though no handle of its own is held"
    host.script.unblock("h1")
    host.outcomes.wait_until((job_uuid("r"), "done", None))
    assert host.script.calls == [("prepare", "h1"), ("prepare", "h4"), ("release", "h3")]
    assert job_uuid("p") not in {job for job, *_ in host.outcomes.calls}
    assert host.file("p") is CheckpointState.CANCELLED


def test_jobs_same_handle_run_in_order(host: Host) -> None:
    host.script.block("h1")
    host.jobs.start(work("p"))
    for number in range(5):
        host.jobs.start(work(f"r{number}", RELEASE))
        host.jobs.start(work(f"p{number}"))
    assert host.run(work("other", PREPARE, "h2")) == ("done", None), "others are not held up"
    host.script.unblock("h1")
    host.outcomes.wait_for(12)
    of_one = [act for act, handle in host.script.calls if handle == "h1"]
    assert of_one == ["prepare", *["release", "prepare"] * 5]
    assert host.script.overlaps == []


def test_jobs_overlapping_handles_run_in_order(host: Host) -> None:
    host.script.block("h2")
    host.jobs.start(work("a", PREPARE, "h2"))
    host.script.wait_for(("prepare", "h2"))
    host.jobs.start(work("b", PREPARE, "h1", "h2"))
    host.jobs.start(work("c", PREPARE, "h1"))
    host.run(work("other", PREPARE, "h9"))
    assert host.script.calls == [("prepare", "h2"), ("prepare", "h9")], "c came after b"
    host.script.unblock("h2")
    host.outcomes.wait_for(4)
    assert host.script.calls[2:] == [("prepare", "h1"), ("prepare", "h2"), ("prepare", "h1")]


def test_program_locks_whole_deployable(host: Host) -> None:
    host.start()
    host.script.block("h1")
    host.jobs.start(work("p"))
    program = JobSpec(
        job_uuid("x"), PROGRAM, (WorkItem("b0", CARD, CARD),), LONG, image=job_uuid("image")
    )
    host.jobs.start(program)
    host.jobs.start(work("late", PREPARE, "h2"))
    elsewhere = JobSpec(job_uuid("e"), PREPARE, (WorkItem("b0", "o", "o", "h1"),), LONG)
    host.script.unblock("h1")
    host.outcomes.wait_for(3)
    assert host.run(elsewhere) == ("done", None)
    assert host.script.calls[:3] == [("prepare", "h1"), ("program", CARD), ("prepare", "h2")]
    host.stop()


def test_jobs_over_limit_wait(host: Host) -> None:
    jobs = host.new_queue(at_once=2)
    for handle in ("h1", "h2", "h3"):
        host.script.block(handle)
        jobs.start(work(handle, PREPARE, handle))
    host.script.wait_for(("prepare", "h1"), ("prepare", "h2"))
    assert len(jobs.running()) == 2
    host.script.unblock("h2")
    host.script.wait_for(("prepare", "h3"))
    assert sorted(jobs.running()) == sorted([job_uuid("h1"), job_uuid("h3")])


def test_job_backend_replaced_keeps_old_driver(host: Host) -> None:
    """A backend may be replaced or removed while it works."""
    host.script.block("h1")
    spec = work("p")
    host.jobs.start(spec)
    host.script.wait_for(("prepare", "h1"))
    other = ScriptedWorkDriver(devices=[card()])
    host.backends[0] = Backend(other, 3600, 3600)
    assert host.run(work("q", PREPARE, "h2")) == ("done", None)
    assert other.script.calls == [("prepare", "h2")]
    del host.backends[0]
    assert host.run(work("x", PREPARE, "h3")) == (
        "failed",
        "prepare of h3: this host has no backend 'b0'; it has plain",
    )
    host.script.unblock("h1")
    assert host.outcomes.wait_for(3)[2] == (spec.job_uuid, "done", None)
    assert host.script.calls == [("prepare", "h1")]


def test_prepare_backend_replaced_release_uses_new_driver(host: Host) -> None:
    old, new = host.driver, ScriptedWorkDriver(devices=[card()])
    old.script.block("h1")
    prepare, release = work("p"), work("r", RELEASE)
    host.jobs.start(prepare)
    old.script.wait_for(("prepare", "h1"))
    host.backends[0] = Backend(new, 3600, 3600)
    host.jobs.start(release)
    assert new.script.calls == [], "it is not cut off"
    old.script.unblock("h1")
    # Each outcome is reported by its own thread, in any order.
    outcomes = {outcomes[:2] for outcomes in host.outcomes.wait_for(2)}
    assert outcomes == {(prepare.job_uuid, "done"), (release.job_uuid, "done")}
    assert (old.script.calls, new.script.calls) == ([("prepare", "h1")], [("release", "h1")])


def test_start_too_many_undelivered_outcomes_raises_unavailable(host: Host) -> None:
    waiting = [MAX_PENDING]
    jobs = JobQueue(
        host.backends, host.checkpoint, 8, host.outcomes, count_undelivered=lambda: waiting[0]
    )
    with pytest.raises(Unavailable, match="retry when some have ended"):
        jobs.start(work("p"))
    assert host.file("p") is None
    waiting[0] -= 1
    assert jobs.start(work("p")) == RUNNING
    host.outcomes.wait_for()
    waiting[0] += 1
    assert jobs.start(work("p")) == DONE, "one that is known is answered"
    jobs.stop()
    assert jobs.join(LONG)
