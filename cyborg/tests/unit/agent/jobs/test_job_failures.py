# SPDX-License-Identifier: Apache-2.0
"""Jobs whose driver hangs, whose disk breaks, and whose agent stops."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from cyborg.agent.jobs.checkpoint import CheckpointState
from cyborg.agent.jobs.queue import JobQueue
from cyborg.core.errors import Unavailable
from cyborg.tests.fixtures.hosts.agent_jobs import (
    DONE,
    PREPARE,
    PROGRAM,
    RELEASE,
    RUNNING,
    Host,
    job_uuid,
    work,
)
from cyborg.tests.fixtures.hosts.scripted_driver import LONG

SOON = 0.05


def test_job_driver_hangs_times_out(host: Host) -> None:
    late = f"prepare did not end in {LONG:g} s"
    jobs = host.new_queue(at_once=1)
    host.script.block("h1")
    jobs.start(work("p", PREPARE, "h1", "h2"))
    host.script.wait_for(("prepare", "h1"))
    host.timers.expire("p")
    assert host.outcomes.wait_for() == [(job_uuid("p"), "failed", late)]
    assert host.file("p") is CheckpointState.FAILED
    assert jobs.start(work("p")) == {"state": "failed", "error": late}
    assert jobs.start(work("r", RELEASE, "h1", "h2", cancels=("p",))) == RUNNING
    assert host.run(work("other", PREPARE, "h3")) == ("done", None), "it takes no place"
    assert jobs.start(work("r", RELEASE, "h1", "h2", cancels=("p",))) == RUNNING
    assert ("release", "h1") not in host.script.calls
    host.script.unblock("h1")
    host.outcomes.wait_until((job_uuid("r"), "done", None))
    assert host.script.calls == [
        ("prepare", "h1"),
        ("prepare", "h3"),
        ("release", "h1"),
        ("release", "h2"),
    ], "what was given up begins no other item"
    assert [job for job, *_ in host.outcomes.calls].count(job_uuid("p")) == 1


def test_job_timed_out_and_cancelled_uses_no_slot(host: Host) -> None:
    jobs = host.new_queue(at_once=1)
    host.script.block("h1")
    jobs.start(work("p"))
    host.script.wait_for(("prepare", "h1"))
    jobs.start(work("r", RELEASE, cancels=("p",)))
    host.timers.expire("p")
    assert host.run(work("other", PREPARE, "h2")) == ("done", None)
    host.script.unblock("h1")
    host.outcomes.wait_until((job_uuid("r"), "done", None))
    assert host.file("p") is CheckpointState.CANCELLED
    assert [job for job, *_ in host.outcomes.calls] == [job_uuid("other"), job_uuid("r")]


def test_job_timer_cannot_start_does_not_run(host: Host) -> None:
    host.timers.broken = True
    outcome = ("failed", "unexpected error in the agent: RuntimeError: can't start new thread")
    assert host.run(work("p")) == outcome
    assert host.script.calls == []


def test_release_finishing_late_is_completed(host: Host) -> None:
    host.script.block("h1")
    host.jobs = JobQueue(host.backends, host.checkpoint, 8, host.outcomes)
    host.jobs.start(work("r", RELEASE, "h1", "h2", seconds=SOON))
    assert host.outcomes.wait_for() == [(job_uuid("r"), "failed", "release did not end in 0.05 s")]
    answer = host.jobs.start(work("r", RELEASE, "h1", "h2"))
    assert answer == {**RUNNING, "activity": {"step": "release h1", "done": 0, "total": 2}}
    host.script.unblock("h1")
    assert host.outcomes.wait_for(2)[1] == (job_uuid("r"), "done", None)
    assert host.script.calls == [("release", "h1"), ("release", "h2")]
    assert host.jobs.start(work("r", RELEASE)) == DONE


def test_job_checkpoint_unwritable_does_not_run(host: Host) -> None:
    host.path.parent.write_text("no folder")
    state, error = host.run(work("p"))
    assert state == "failed"
    assert str(error).startswith("the agent cannot write its checkpoint: ")
    assert host.script.calls == []
    assert host.run(work("r", RELEASE))[0] == "failed"
    host.path.parent.unlink()
    assert host.run(work("r", RELEASE)) == ("done", None)


def test_job_checkpoint_fails_at_end_outcome_is_reported(host: Host) -> None:
    host.script.block("h1")
    host.jobs.start(work("p"))
    host.script.wait_for(("prepare", "h1"))
    host.path.unlink()
    host.path.mkdir()
    host.script.unblock("h1")
    assert host.outcomes.wait_for() == [(job_uuid("p"), "done", None)]
    assert host.jobs.start(work("p")) == DONE


def test_program_rediscovers_before_outcome(host: Host) -> None:
    host.start()
    discover_count = host.driver.discover_calls
    host.driver.block()
    host.jobs.start(work("x", PROGRAM))
    host.driver.wait_for(discover_count + 1)
    assert host.outcomes.calls == []
    host.driver.unblock()
    assert host.outcomes.wait_for() == [(job_uuid("x"), "done", None)]
    host.stop()


def test_program_finishing_late_rediscovers(host: Host) -> None:
    host.start()
    host.script.block("h1")
    host.jobs.start(work("x", PROGRAM))
    host.script.wait_for(("program", "h1"))
    host.timers.expire("x")
    host.outcomes.wait_for()
    discover_count = host.driver.discover_calls
    host.script.unblock("h1")
    host.driver.wait_for(discover_count + 1)
    assert host.file("x") is CheckpointState.FAILED
    host.stop()


def test_stop_starts_no_more_items(host: Host) -> None:
    host.script.block("h1")
    host.jobs.start(work("p", PREPARE, "h1", "h2"))
    host.jobs.start(work("q"))
    host.script.wait_for(("prepare", "h1"))
    host.jobs.stop()
    with pytest.raises(Unavailable, match="stopping"):
        host.jobs.start(work("r", PREPARE, "h3"))
    assert not host.jobs.join(0.01), "what hangs is left behind"
    assert host.jobs.running() == [job_uuid("p")]
    host.script.unblock("h1")
    assert host.jobs.join(LONG)
    assert host.script.calls == [("prepare", "h1")]
    assert host.file("p") is CheckpointState.STARTED
    assert host.outcomes.calls == []
    host.new_queue()
    assert host.run(work("p", PREPARE, "h1", "h2")) == ("done", None)


def test_job_thread_cannot_start_is_retried(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert host.jobs.start(work("p")) == RUNNING
    monkeypatch.setattr(threading.Thread, "start", real)
    assert host.script.calls == []
    assert host.jobs.start(work("p")) == RUNNING
    assert host.outcomes.wait_for() == [(job_uuid("p"), "done", None)]
