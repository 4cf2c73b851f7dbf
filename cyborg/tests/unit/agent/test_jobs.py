# SPDX-License-Identifier: Apache-2.0
"""Jobs: each done once, those of one handle in order, the others beside each other."""

import pytest

from cyborg.agent.backend import Backend
from cyborg.agent.checkpoint import Step
from cyborg.core.errors import DriverFailed
from cyborg.core.job import Item, JobKind, Work
from cyborg.fixtures.agent_jobs import (
    CANCELLED,
    CARD,
    DONE,
    PREPARE,
    PROGRAM,
    RELEASE,
    RUNNING,
    Host,
    name,
    work,
)
from cyborg.fixtures.drivers import LONG, Able, card


def test_a_job_is_answered_at_once_and_told_when_it_ends(host: Host) -> None:
    host.hand.hold("h1")
    asked = work("p")
    assert host.jobs.start(asked) == RUNNING
    host.hand.wait_for(("prepare", "h1"))
    assert host.file("p") is Step.STARTED, "before the driver acts"
    assert host.told.calls == []
    host.hand.free("h1")
    assert host.told.wait_for() == [(asked.job, "done", None)]
    assert host.file("p") is Step.COMPLETED


def test_asking_again_does_nothing_twice(host: Host) -> None:
    host.hand.hold("h1")
    asked = work("p")
    host.jobs.start(asked)
    host.hand.wait_for(("prepare", "h1"))
    assert host.jobs.start(asked) == RUNNING
    host.hand.free("h1")
    host.told.wait_for()
    assert host.jobs.start(asked) == DONE
    assert host.another().start(asked) == DONE, "nor in the next life"
    assert host.hand.acts == [("prepare", "h1")]


@pytest.mark.parametrize("kind", [PREPARE, PROGRAM])
def test_what_failed_stays_failed(host: Host, kind: JobKind) -> None:
    host.hand.errors[str(kind)] = DriverFailed("no air")
    what = "h1"
    failed = {"state": "failed", "error": f"{kind} of {what}: no air"}
    host.start()
    assert host.do(work("p", kind)) == ("failed", failed["error"])
    assert host.file("p") is Step.FAILED
    host.hand.errors.clear()
    assert host.jobs.start(work("p", kind)) == failed
    assert host.another().start(work("p", kind)) == failed
    assert host.hand.acts == [(str(kind), what)]
    host.stop()


def test_a_release_that_failed_is_done_again(host: Host) -> None:
    host.hand.errors["release"] = ZeroDivisionError("oh")
    assert host.do(work("r", RELEASE)) == ("failed", "release of h1: ZeroDivisionError: oh")
    host.hand.errors.clear()
    assert host.do(work("r", RELEASE)) == ("done", None)
    assert host.hand.acts == [("release", "h1")] * 2
    assert host.jobs.start(work("r", RELEASE)) == DONE


def test_what_was_begun_in_another_life_is_done_again(host: Host) -> None:
    host.checkpoint.note(name("p"), "prepare", Step.STARTED)
    host.checkpoint.flush()
    host.another()
    assert host.do(work("p")) == ("done", None)


def test_after_a_boot_everything_is_done_again(host: Host) -> None:
    host.do(work("p"))
    host.boot.write_text("boot-2")
    host.another()
    assert host.do(work("p")) == ("done", None)
    assert host.hand.acts == [("prepare", "h1")] * 2


def test_what_is_cancelled_before_it_comes_never_begins(host: Host) -> None:
    assert host.do(work("r", RELEASE, cancels=("p",))) == ("done", None)
    assert host.file("p") is Step.CANCELLED
    assert host.jobs.start(work("p")) == CANCELLED
    assert host.another().start(work("p")) == CANCELLED
    assert host.hand.acts == [("release", "h1")]


def test_what_was_begun_in_another_life_can_be_cancelled(host: Host) -> None:
    host.checkpoint.note(name("p"), "prepare", Step.STARTED)
    host.do(work("r", RELEASE, cancels=("p",)))
    assert host.jobs.start(work("p")) == CANCELLED


def test_what_waits_is_taken_out(host: Host) -> None:
    host.hand.hold("h1")
    host.jobs.start(work("p1"))
    host.jobs.start(work("p2"))
    host.jobs.start(work("r", RELEASE, cancels=("p2",)))
    assert host.jobs.start(work("p2")) == CANCELLED
    host.hand.free("h1")
    host.told.wait_until((name("p1"), "done", None), (name("r"), "done", None))
    assert host.hand.acts == [("prepare", "h1"), ("release", "h1")]


def test_what_acts_is_waited_for_and_begins_no_other_item(host: Host) -> None:
    host.hand.hold("h1")
    host.jobs.start(work("p", PREPARE, "h1", "h2"))
    host.hand.wait_for(("prepare", "h1"))
    host.jobs.start(work("r", RELEASE, "h3", cancels=("p",)))
    assert host.jobs.start(work("p")) == CANCELLED
    assert host.do(work("other", PREPARE, "h4")) == ("done", None)
    assert ("release", "h3") not in host.hand.acts, "though no handle of its own is held"
    host.hand.free("h1")
    host.told.wait_until((name("r"), "done", None))
    assert host.hand.acts == [("prepare", "h1"), ("prepare", "h4"), ("release", "h3")]
    assert name("p") not in {job for job, *_ in host.told.calls}
    assert host.file("p") is Step.CANCELLED


def test_those_of_one_handle_go_in_order(host: Host) -> None:
    host.hand.hold("h1")
    host.jobs.start(work("p"))
    for number in range(5):
        host.jobs.start(work(f"r{number}", RELEASE))
        host.jobs.start(work(f"p{number}"))
    assert host.do(work("other", PREPARE, "h2")) == ("done", None), "others are not held up"
    host.hand.free("h1")
    host.told.wait_for(12)
    of_one = [act for act, handle in host.hand.acts if handle == "h1"]
    assert of_one == ["prepare", *["release", "prepare"] * 5]
    assert host.hand.overlaps == []


def test_a_job_of_many_waits_for_each_and_is_waited_for(host: Host) -> None:
    host.hand.hold("h2")
    host.jobs.start(work("a", PREPARE, "h2"))
    host.hand.wait_for(("prepare", "h2"))
    host.jobs.start(work("b", PREPARE, "h1", "h2"))
    host.jobs.start(work("c", PREPARE, "h1"))
    host.do(work("other", PREPARE, "h9"))
    assert host.hand.acts == [("prepare", "h2"), ("prepare", "h9")], "c came after b"
    host.hand.free("h2")
    host.told.wait_for(4)
    assert host.hand.acts[2:] == [("prepare", "h1"), ("prepare", "h2"), ("prepare", "h1")]


def test_programming_has_the_whole_deployable(host: Host) -> None:
    host.start()
    host.hand.hold("h1")
    host.jobs.start(work("p"))
    program = Work(name("x"), PROGRAM, (Item("b0", CARD, CARD),), LONG, image=name("image"))
    host.jobs.start(program)
    host.jobs.start(work("late", PREPARE, "h2"))
    elsewhere = Work(name("e"), PREPARE, (Item("b0", "o", "o", "h1"),), LONG)
    host.hand.free("h1")
    host.told.wait_for(3)
    assert host.do(elsewhere) == ("done", None)
    assert host.hand.acts[:3] == [("prepare", "h1"), ("program", CARD), ("prepare", "h2")]
    host.stop()


def test_only_so_many_at_once(host: Host) -> None:
    jobs = host.another(at_once=2)
    for handle in ("h1", "h2", "h3"):
        host.hand.hold(handle)
        jobs.start(work(handle, PREPARE, handle))
    host.hand.wait_for(("prepare", "h1"), ("prepare", "h2"))
    assert len(jobs.acting()) == 2
    host.hand.free("h2")
    host.hand.wait_for(("prepare", "h3"))
    assert sorted(jobs.acting()) == sorted([name("h1"), name("h3")])


def test_a_job_goes_on_with_the_driver_it_began_with(host: Host) -> None:
    """A backend may be changed or given up while it works."""
    host.hand.hold("h1")
    asked = work("p")
    host.jobs.start(asked)
    host.hand.wait_for(("prepare", "h1"))
    other = Able(devices=[card()])
    host.backends[0] = Backend(other, 3600, 3600)
    assert host.do(work("q", PREPARE, "h2")) == ("done", None)
    assert other.hand.acts == [("prepare", "h2")]
    del host.backends[0]
    assert host.do(work("x", PREPARE, "h3")) == (
        "failed",
        "prepare of h3: this host has no backend 'b0'; it has plain",
    )
    host.hand.free("h1")
    assert host.told.wait_for(3)[2] == (asked.job, "done", None)
    assert host.hand.acts == [("prepare", "h1")]


def test_a_backend_that_is_replaced_while_it_prepares(host: Host) -> None:
    old, new = host.driver, Able(devices=[card()])
    old.hand.hold("h1")
    prepare, release = work("p"), work("r", RELEASE)
    host.jobs.start(prepare)
    old.hand.wait_for(("prepare", "h1"))
    host.backends[0] = Backend(new, 3600, 3600)
    host.jobs.start(release)
    assert new.hand.acts == [], "it is not cut off"
    old.hand.free("h1")
    # Each is told by its own thread, in whichever order these come to it.
    told = {told[:2] for told in host.told.wait_for(2)}
    assert told == {(prepare.job, "done"), (release.job, "done")}
    assert (old.hand.acts, new.hand.acts) == ([("prepare", "h1")], [("release", "h1")])
