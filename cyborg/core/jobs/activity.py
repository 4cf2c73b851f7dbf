# SPDX-License-Identifier: Apache-2.0
"""Activity of a job: what its host does at the moment, such as ``40 % fetch image ...``.

The agent shows the activity in its answer when the conductor queries a running job. Nothing is sent
or stored in between, so that code may report each chunk of a file.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from cyborg.core.codec import Serializable
from cyborg.core.errors import Invalid
from cyborg.core.text import sanitize

MAX_STEP = 255  # characters


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


_recorder: ContextVar[ActivityRecorder] = ContextVar("cyborg_activity")


@contextmanager
def show_activity(
    step: str, total: int | None = None, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """Show a step as the activity of the current job within the block, then the outer step again.

    Yield a function that sets how many parts are done, of ``total``. Outside of a job nothing is
    shown.
    """
    recorder = _recorder.get(None) or ActivityRecorder()
    previous = recorder.current
    shown = Activity(step, None if total is None else done, total)

    def set_done(done: int) -> None:
        nonlocal shown
        # Otherwise an abandoned thread would hide what the job does now.
        if recorder.current is shown:
            recorder.current = shown = replace(shown, done=done)

    recorder.current = shown
    try:
        yield set_done
    finally:
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
