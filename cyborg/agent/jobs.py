# SPDX-License-Identifier: Apache-2.0
"""The jobs of this host: each done once, whoever asks how often, and those of one handle in order.

A job waits while an earlier one has one of its handles, then acts in a thread of its own. A driver
that hangs cannot be ended: its job is told failed when its time is over, and it keeps its thread
and its handles until it returns. Only a release counts after that; what else was given up late is
undone by the release that the conductor has sent meanwhile and that waits for the handle.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oslo_log import log

from cyborg.agent.acting import Halted, Retired, carry_out
from cyborg.agent.backend import Backend, words
from cyborg.agent.checkpoint import Checkpoint, Step
from cyborg.core.errors import Unavailable
from cyborg.core.job import Heard, Item, JobKind, Work

LOG = log.getLogger(__name__)

CANCELLED = "cancelled"
Answer = dict[str, str | None]
Done = Callable[[str, str, str | None], None]


@dataclass(eq=False, slots=True)
class _Task:
    """A job that has not ended, or whose driver has not returned."""

    work: Work
    thread: threading.Thread | None = None  # once it acts
    late: str | None = None  # what was told when its time was over
    cancelled: bool = False

    @property
    def dropped(self) -> bool:
        """Tell whether nothing that it comes to counts any more."""
        return self.cancelled or (self.late is not None and self.work.kind is not JobKind.RELEASE)


class Jobs:
    """What is asked of this host, in order of arrival."""

    def __init__(
        self,
        backends: Sequence[Backend],
        checkpoint: Checkpoint,
        at_once: int,
        done: Done,
        timer: Callable[..., threading.Timer] = threading.Timer,
        retired: Retired = lambda _: None,
    ) -> None:
        """``at_once`` jobs act at the same time, not counting those that hang.

        ``done`` is told, from any thread, how each job ended: its uuid, ``done`` or ``failed``, and
        the error. ``timer`` makes what watches a job. ``retired`` returns the driver of a backend
        that was given up, whose handles must still be released.
        """
        self._backends = backends
        self._checkpoint = checkpoint
        self._at_once = at_once
        self._done = done
        self._timer = timer
        self._retired = retired
        self._lock = threading.Lock()
        self._stopped = False
        self._tasks: dict[str, _Task] = {}

    def start(self, work: Work) -> Answer:
        """Have a job done; return at once how it is: ``{"state", "error"}``.

        Raises Unavailable when the agent is stopping.
        """
        with self._lock:
            if self._stopped:
                raise Unavailable("the agent is stopping")
            answer = self._known(work)
            if answer is None:
                self._cancel(work)
                self._tasks[work.job] = _Task(work)
                answer = _answer(Heard.RUNNING)
            self._begin()
        return answer

    def stop(self) -> None:
        """Begin nothing more, nor the next item of a job; such a job is begun again when asked."""
        with self._lock:
            self._stopped = True

    def join(self, seconds: float) -> bool:
        """Wait for what acts; tell whether it ended in time."""
        end = time.monotonic() + seconds
        with self._lock:
            threads = [task.thread for task in self._tasks.values() if task.thread is not None]
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def acting(self) -> list[str]:
        """Return the jobs whose driver has not returned."""
        with self._lock:
            return [job for job, task in self._tasks.items() if task.thread is not None]

    def _known(self, work: Work) -> Answer | None:
        """Return how the job is, None when it is to be done."""
        task = self._tasks.get(work.job)
        if task is not None:
            if task.cancelled:
                return _answer(Heard.FAILED, CANCELLED)
            return _answer(Heard.FAILED, task.late) if task.dropped else _answer(Heard.RUNNING)
        entry = self._checkpoint.get(work.job)
        if entry is None or entry.state is Step.STARTED:
            return None
        if entry.state is Step.COMPLETED:
            return _answer(Heard.DONE)
        if entry.state is Step.CANCELLED:
            return _answer(Heard.FAILED, CANCELLED)
        return None if work.kind is JobKind.RELEASE else _answer(Heard.FAILED, entry.error)

    def _cancel(self, work: Work) -> None:
        for job in work.cancels:
            if job == work.job:
                continue
            self._checkpoint.note(job, JobKind.PREPARE, Step.CANCELLED)
            task = self._tasks.get(job)
            if task is not None:
                task.cancelled = True
                if task.thread is None:
                    del self._tasks[job]

    def _begin(self) -> None:
        """Have every job act whose turn it is."""
        if self._stopped:
            return
        tasks = self._tasks.values()
        room = self._at_once - sum(t.thread is not None and t.late is None for t in tasks)
        ahead = _Held()
        for task in tasks:
            waits = ahead.meets(task.work) or any(map(self._acts, task.work.cancels))
            if task.thread is None and room > 0 and not waits and self._launch(task):
                room -= 1
            ahead.add(task.work)

    def _acts(self, job: str) -> bool:
        task = self._tasks.get(job)
        return task is not None and task.thread is not None

    def _launch(self, task: _Task) -> bool:
        work = task.work
        thread = threading.Thread(
            target=self._run, args=(task,), name=f"job-{work.job}", daemon=True
        )
        self._checkpoint.note(work.job, work.kind, Step.STARTED)
        task.thread = thread
        try:
            thread.start()
        except RuntimeError as bad:
            # The next job that ends, or the conductor when it asks again, has it tried once more.
            LOG.warning("Job %s cannot begin: %s", work.job, bad)
            task.thread = None
        return task.thread is not None

    def _run(self, task: _Task) -> None:
        work = task.work
        LOG.info("Job %s: %s, %d items", work.job, work.kind, len(work.items))
        watch = self._timer(work.seconds, self._give_up, (task,))
        watch.daemon = True
        halted, error = False, None
        try:
            watch.start()
            self._checkpoint.flush()
            # Those of now: a job goes on with the drivers that it began with.
            drivers = {backend.name: backend.driver for backend in self._backends}
            error = carry_out(
                work, drivers, lambda: not (self._stopped or task.dropped), self._retired
            )
        except Halted:
            halted = True
        except OSError as bad:
            error = f"the agent cannot write its check-point: {bad}"
        except Exception as bad:
            LOG.exception("Job %s failed for a reason nobody foresaw", work.job)
            error = f"the agent failed: {words(bad)}"
        watch.cancel()
        with self._lock:
            # A job that was cut off by a stop stays started: it acts again when it is asked for.
            told = not halted and not task.dropped
            if told:
                state = Step.COMPLETED if error is None else Step.FAILED
                self._checkpoint.note(work.job, work.kind, state, error)
            del self._tasks[work.job]
            self._begin()
        if told:
            self._tell(work, error)
        elif task.dropped:
            LOG.info("Job %s, which was given up, has ended: %s", work.job, error or "well")
            self._look_again(work)

    def _give_up(self, task: _Task) -> None:
        """Tell that a job takes too long."""
        work = task.work
        with self._lock:
            if self._tasks.get(work.job) is not task:
                return
            error = task.late = f"{work.kind} did not end in {work.seconds:g} s"
            told = not task.cancelled
            if told:
                self._checkpoint.note(work.job, work.kind, Step.FAILED, error)
            self._begin()
        if told:
            self._tell(work, error)

    def _tell(self, work: Work, error: str | None) -> None:
        """Say how a job ended, in the file and to the conductor."""
        if error is not None:
            LOG.warning("Job %s: %s", work.job, error)
        try:
            self._checkpoint.flush()
        except OSError as bad:
            LOG.warning("Job %s: the check-point cannot be written: %s", work.job, bad)
        state = Heard.DONE if error is None else Heard.FAILED
        # What an image made of the device is reported before the job is said to have ended.
        self._look_again(work, lambda: self._done(work.job, str(state), error))

    def _look_again(self, work: Work, then: Callable[[], None] = lambda: None) -> None:
        """Have the backends of a programmed device discover; ``then`` is called in any case."""
        names = {item.backend for item in work.items}
        concerned = [backend for backend in self._backends if backend.name in names]
        if work.kind is not JobKind.PROGRAM or not concerned:
            then()
            return
        first, *others = concerned
        first.rediscover(lambda _: then())
        for backend in others:
            backend.rediscover()


class _Held:
    """The handles, and the deployables as a whole, that some jobs have."""

    def __init__(self) -> None:
        self._handles: set[tuple[str, str]] = set()
        self._parts: set[str] = set()  # of which there is a handle among them
        self._wholes: set[str] = set()

    def meets(self, work: Work) -> bool:
        """Tell whether a job has any of these."""
        return any(
            item.deployable in self._wholes
            or (item.deployable, item.handle) in self._handles
            or (item.deployable in self._parts and _whole(work, item))
            for item in work.items
        )

    def add(self, work: Work) -> None:
        """Add what a job has."""
        for item in work.items:
            self._parts.add(item.deployable)
            if _whole(work, item):
                self._wholes.add(item.deployable)
            else:
                self._handles.add((item.deployable, item.handle))


def _whole(work: Work, item: Item) -> bool:
    return work.kind is JobKind.PROGRAM or not item.handle


def _answer(state: Heard, error: str | None = None) -> Answer:
    return {"state": str(state), "error": error}
