# SPDX-License-Identifier: Apache-2.0
"""Jobs whose driver hangs, whose disk breaks, and whose agent stops."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from cyborg.agent.checkpoint import Step
from cyborg.agent.jobs import Jobs
from cyborg.core.errors import Unavailable
from cyborg.fixtures.agent_jobs import (
    DONE,
    PREPARE,
    PROGRAM,
    RELEASE,
    RUNNING,
    Host,
    name,
    work,
)
from cyborg.fixtures.drivers import LONG

SOON = 0.05


def test_a_driver_that_hangs_is_given_up(host: Host) -> None:
    late = "prepare did not end in 20 s"
    jobs = host.another(at_once=1)
    host.hand.hold("h1")
    jobs.start(work("p", PREPARE, "h1", "h2"))
    host.hand.wait_for(("prepare", "h1"))
    host.timers.over("p")
    assert host.told.wait_for() == [(name("p"), "failed", late)]
    assert host.file("p") is Step.FAILED
    assert jobs.start(work("p")) == {"state": "failed", "error": late}
    assert jobs.start(work("r", RELEASE, "h1", "h2", cancels=("p",))) == RUNNING
    assert host.do(work("other", PREPARE, "h3")) == ("done", None), "it takes no place"
    assert jobs.start(work("r", RELEASE, "h1", "h2", cancels=("p",))) == RUNNING
    assert ("release", "h1") not in host.hand.acts
    host.hand.free("h1")
    host.told.wait_until((name("r"), "done", None))
    assert host.hand.acts == [
        ("prepare", "h1"),
        ("prepare", "h3"),
        ("release", "h1"),
        ("release", "h2"),
    ], "what was given up begins no other item"
    assert [job for job, *_ in host.told.calls].count(name("p")) == 1


def test_what_hangs_takes_no_place_though_it_was_cancelled(host: Host) -> None:
    jobs = host.another(at_once=1)
    host.hand.hold("h1")
    jobs.start(work("p"))
    host.hand.wait_for(("prepare", "h1"))
    jobs.start(work("r", RELEASE, cancels=("p",)))
    host.timers.over("p")
    assert host.do(work("other", PREPARE, "h2")) == ("done", None)
    host.hand.free("h1")
    host.told.wait_until((name("r"), "done", None))
    assert host.file("p") is Step.CANCELLED
    assert [job for job, *_ in host.told.calls] == [name("other"), name("r")]


def test_a_job_that_cannot_be_watched_does_not_begin(host: Host) -> None:
    host.timers.broken = True
    told = ("failed", "the agent failed: RuntimeError: can't start new thread")
    assert host.do(work("p")) == told
    assert host.hand.acts == []


def test_a_release_that_hangs_counts_when_it_ends(host: Host) -> None:
    host.hand.hold("h1")
    host.jobs = Jobs(host.backends, host.checkpoint, 8, host.told)
    host.jobs.start(work("r", RELEASE, "h1", "h2", seconds=SOON))
    assert host.told.wait_for() == [(name("r"), "failed", "release did not end in 0.05 s")]
    assert host.jobs.start(work("r", RELEASE, "h1", "h2")) == RUNNING
    host.hand.free("h1")
    assert host.told.wait_for(2)[1] == (name("r"), "done", None)
    assert host.hand.acts == [("release", "h1"), ("release", "h2")]
    assert host.jobs.start(work("r", RELEASE)) == DONE


def test_without_a_checkpoint_nothing_is_done(host: Host) -> None:
    host.path.parent.write_text("no folder")
    state, error = host.do(work("p"))
    assert state == "failed"
    assert str(error).startswith("the agent cannot write its check-point: ")
    assert host.hand.acts == []
    assert host.do(work("r", RELEASE))[0] == "failed"
    host.path.parent.unlink()
    assert host.do(work("r", RELEASE)) == ("done", None)


def test_a_disk_that_breaks_meanwhile_costs_no_outcome(host: Host) -> None:
    host.hand.hold("h1")
    host.jobs.start(work("p"))
    host.hand.wait_for(("prepare", "h1"))
    host.path.unlink()
    host.path.mkdir()
    host.hand.free("h1")
    assert host.told.wait_for() == [(name("p"), "done", None)]
    assert host.jobs.start(work("p")) == DONE


def test_what_an_image_made_is_seen_before_the_end_is_told(host: Host) -> None:
    host.start()
    seen = host.driver.began
    host.driver.hold()
    host.jobs.start(work("x", PROGRAM))
    host.driver.wait_for(seen + 1)
    assert host.told.calls == []
    host.driver.free()
    assert host.told.wait_for() == [(name("x"), "done", None)]
    host.stop()


def test_a_program_that_was_given_up_is_looked_at_when_it_ends(host: Host) -> None:
    host.start()
    host.hand.hold("h1")
    host.jobs.start(work("x", PROGRAM))
    host.hand.wait_for(("program", "h1"))
    host.timers.over("x")
    host.told.wait_for()
    seen = host.driver.began
    host.hand.free("h1")
    host.driver.wait_for(seen + 1)
    assert host.file("x") is Step.FAILED
    host.stop()


def test_a_stop_lets_nothing_more_begin(host: Host) -> None:
    host.hand.hold("h1")
    host.jobs.start(work("p", PREPARE, "h1", "h2"))
    host.jobs.start(work("q"))
    host.hand.wait_for(("prepare", "h1"))
    host.jobs.stop()
    with pytest.raises(Unavailable, match="stopping"):
        host.jobs.start(work("r", PREPARE, "h3"))
    assert not host.jobs.join(0.01), "what hangs is left behind"
    assert host.jobs.acting() == [name("p")]
    host.hand.free("h1")
    assert host.jobs.join(LONG)
    assert host.hand.acts == [("prepare", "h1")]
    assert host.file("p") is Step.STARTED
    assert host.told.calls == []
    host.another()
    assert host.do(work("p", PREPARE, "h1", "h2")) == ("done", None)


def test_a_host_without_threads_begins_later(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert host.jobs.start(work("p")) == RUNNING
    monkeypatch.setattr(threading.Thread, "start", real)
    assert host.hand.acts == []
    assert host.jobs.start(work("p")) == RUNNING
    assert host.told.wait_for() == [(name("p"), "done", None)]
