# SPDX-License-Identifier: Apache-2.0
"""What the host work of a job does at the moment, and what has failed before on a device.

An activity is a text such as ``40 % fetch image ...``. The agent shows it in its answer when the
conductor queries a running job. Nothing is sent or stored in between, so that code may report each
chunk of a file.

A device shows the last failed job of each kind until a job of this kind succeeds on it. After
several failed prepare jobs in a row it is *failing*: reserved in full in Placement, because the
next bind would probably fail too. The condition ends after a time, with the success of a job, or
when an operator enables the device. If it has ended after the time, one more failed prepare job
makes the device failing again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from cyborg.core.binding import profile
from cyborg.core.codec import Serializable
from cyborg.core.errors import Invalid
from cyborg.core.jobs.job import JobKind, WorkItem
from cyborg.core.text import sanitize, to_iso, to_text

# Characters of a step.
MAX_STEP = 255


@dataclass(frozen=True, slots=True)
class Activity(Serializable):
    """A step of the work of a job.

    ``done`` of ``total`` parts of the step are done: bytes of an image, or items of the job. They
    are None if this is not known.
    """

    step: str
    done: int | None = None
    total: int | None = None

    def __str__(self) -> str:
        """Return how much of the step is done, and the step."""
        if self.done is None or not self.total:
            return self.step
        # The number first: tables cut long texts.
        return f"{100 * self.done // self.total} % {self.step}"


class ActivityRecorder:
    """The current activity of one job."""

    def __init__(self) -> None:
        self.current: Activity | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the activities of this thread within the block."""
        token = _recorder.set(self)
        try:
            yield
        finally:
            _recorder.reset(token)


# A context variable, so that the code of a driver needs no parameter for the job.
_recorder: ContextVar[ActivityRecorder] = ContextVar("cyborg_activity")


@contextmanager
def show_activity(
    step: str, total: int | None = None, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """Show a step as the activity of the current job within the block, then the outer step again.

    Yield a function that sets how many parts are done, of ``total``. Outside of a job nothing is
    shown.
    """
    # Outside of a job a recorder that nobody reads takes it, so that callers need no condition.
    recorder = _recorder.get(None) or ActivityRecorder()
    previous = recorder.current
    shown = Activity(step, None if total is None else done, total)

    def set_done(done: int) -> None:
        nonlocal shown
        # Not if another step is shown: an abandoned thread would hide what the job does now.
        if recorder.current is shown:
            recorder.current = shown = replace(shown, done=done)

    recorder.current = shown
    try:
        yield set_done
    finally:
        # Another thread may show a later step of the job meanwhile.
        if recorder.current is shown:
            recorder.current = previous


def parse_activity(body: Any) -> Activity | None:
    """Parse the activity in the answer of an agent; None if it is missing or malformed.

    Only people read the activity, so a malformed activity is no error of the job.
    """
    try:
        activity = Activity.from_dict(body)
    except (KeyError, TypeError, ValueError, Invalid):
        return None
    step = sanitize(activity.step, MAX_STEP).replace("\n", " ").strip()
    numbers = (activity.done, activity.total)
    if not step or any(number is not None and not 0 <= number < 1 << 63 for number in numbers):
        return None
    return replace(activity, step=step)


@dataclass(frozen=True, slots=True)
class Failure(Serializable):
    """A failed job of a device. ``subject`` is the handle, the deployable or the device."""

    kind: JobKind
    job: str
    subject: str
    error: str
    at: str

    def describe(self) -> str:
        """Return a text for people."""
        at = to_text(self.at)
        return f"{self.kind} of {self.subject} failed at {at}, job {self.job}: {self.error}"


@dataclass(frozen=True, slots=True)
class WorkHistory:
    """Last failures of a device, the newest first, and the number of failed prepares in a row."""

    failures: tuple[Failure, ...] = ()
    failed_prepares: int = 0
    failing: bool = False


def describe_subject(item: WorkItem) -> str:
    """Return the address of what a driver works on."""
    return item.handle or item.deployable or item.device


def describe_failure(kind: JobKind, item: WorkItem, error: str) -> str:
    """Return the error of a job whose item failed."""
    return f"{kind} of {describe_subject(item)}: {error}"


class FailedItem(NamedTuple):
    """An item of a failed job, and its error without the item's name.

    ``is_named`` is whether the error names it. An error without a name is one of the agent, such as
    a full disk; the job has items of one device only.
    """

    item: WorkItem
    error: str
    is_named: bool


def find_failed_item(kind: JobKind, items: Sequence[WorkItem], error: str) -> FailedItem | None:
    """Return the item that a job's error names.

    If the error names no item, and all items are of one device, return the first item. If the items
    are of several devices, return None.
    """
    # The agent sends one text for the job: the prefix that it wrote is the only trace of the item.
    named = [item for item in items if error.startswith(describe_failure(kind, item, ""))]
    candidates = named or items
    if len({item.device for item in candidates}) != 1:
        return None
    text = error.removeprefix(describe_failure(kind, candidates[0], ""))
    return FailedItem(candidates[0], text, is_named=bool(named))


def build_failure(kind: JobKind, job: str, item: WorkItem, error: str, now: datetime) -> Failure:
    """Return the failure of an item of a job at ``now``, in UTC."""
    return Failure(kind, job, describe_subject(item), error, to_iso(now))


def is_evidence(item: WorkItem) -> bool:
    """Return whether a failed item of a prepare job is evidence against its device.

    With parameters of a profile, such as an image, the request can be the cause. Otherwise a wrong
    profile would make one device after the other failing.
    """
    return not item.accel.keys() - {profile.KEY}


def add_failure(
    history: WorkHistory, failure: Failure, *, counted: bool, close_after: int
) -> WorkHistory:
    """Return the history with a failure added.

    ``counted`` is whether the failure is evidence against the device. The device is failing after
    ``close_after`` failed prepare jobs in a row; 0 means never.
    """
    # One failure for each kind: a device that is retried for days must not fill its row.
    others = tuple(old for old in history.failures if old.kind is not failure.kind)
    is_failed_prepare = counted and failure.kind is JobKind.PREPARE
    number = history.failed_prepares + (1 if is_failed_prepare else 0)
    return WorkHistory(
        failures=(failure, *others),
        failed_prepares=number,
        failing=history.failing or (is_failed_prepare and 0 < close_after <= number),
    )


def add_success(history: WorkHistory, kind: JobKind) -> WorkHistory:
    """Return the history after a job that succeeded: the device works, whatever the kind."""
    # A restore job prepares a handle.
    done = JobKind.PREPARE if kind is JobKind.RESTORE else kind
    failures = tuple(old for old in history.failures if old.kind is not done)
    return replace(history, failures=failures, failed_prepares=0, failing=False)
