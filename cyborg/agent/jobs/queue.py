# SPDX-License-Identifier: Apache-2.0
"""Queue of this host's jobs. Each job runs once, and jobs on the same handle run in order.

A job waits while an earlier job locks one of its handles, then runs in its own thread.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cyborg import tracing
from cyborg.agent.backends.backend import Backend, error_text
from cyborg.agent.guests.devices import GuestDevices
from cyborg.agent.jobs.checkpoint import MAX_PENDING, Checkpoint, CheckpointState
from cyborg.agent.jobs.executor import Aborted, RemovedDriverLookup, execute
from cyborg.core import errors, log
from cyborg.core.jobs.job import INVENTORY_KINDS, AgentJobStatus, JobKind, JobSpec, WorkItem
from cyborg.core.jobs.progress import Activity, ActivityRecorder

LOG = log.get_logger(__name__)

CANCELLED = "cancelled"
JobAnswer = dict[str, Any]
JobCallback = Callable[[str, str, str | None], None]


@dataclass(eq=False, slots=True)
class _Task:
    """A job that has not ended, or whose driver has not returned."""

    spec: JobSpec
    thread: threading.Thread | None = None  # None until it starts
    timeout_error: str | None = None  # the error reported at its timeout
    cancelled: bool = False
    activity: ActivityRecorder = field(default_factory=ActivityRecorder)
    # The trace of the first call that requested it.
    trace_context: str | None = field(default_factory=tracing.current_context)

    @property
    def discarded(self) -> bool:
        """Return whether the result of the driver must be ignored."""
        # A late result is used only for jobs that the conductor retries. For others it has queued a
        # release, which runs when the handle is no longer locked.
        return self.cancelled or (self.timeout_error is not None and not self.spec.retried)


@dataclass(eq=False)
class JobQueue:
    """Queue of the jobs of this host, in order of arrival.

    Run up to ``max_concurrent`` jobs at a time, not counting jobs past their timeout.

    At most half of them are unplug jobs.

    ``on_done`` is called, from any thread, with the uuid, the state (``done`` or ``failed``)
    and the error of each job. ``timer`` creates the timeout of a job. ``removed_driver`` looks
    up the driver of a removed backend, which is still needed to release its handles.
    ``count_undelivered`` returns the number of undelivered outcomes; they count as open jobs.
    Without ``guests``, jobs that change a guest fail.
    """

    backends: Sequence[Backend]
    checkpoint: Checkpoint
    max_concurrent: int
    on_done: JobCallback
    timer: Callable[..., threading.Timer] = threading.Timer
    removed_driver: RemovedDriverLookup = lambda _: None
    count_undelivered: Callable[[], int] = lambda: 0
    guests: GuestDevices | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._tasks: dict[str, _Task] = {}
        self._rediscovering: set[str] = set()  # ended jobs whose devices are being discovered

    def start(self, spec: JobSpec) -> JobAnswer:
        """Enqueue a job, do not wait, and return its status: ``{"state", "error"}``. Idempotent.

        The status of a running job also has its ``activity``, if it is known.

        Raise Unavailable if the agent is stopping or has too many open jobs.
        """
        with self._lock:
            if self._stopped:
                raise errors.Unavailable("the agent is stopping")
            answer = self._current_answer(spec)
            if answer is None:
                if len(self._tasks) + self.count_undelivered() >= MAX_PENDING:
                    raise errors.Unavailable(
                        f"the agent has {MAX_PENDING} open or undelivered jobs, the maximum; "
                        "retry when some have ended"
                    )
                self._cancel_superseded(spec)
                self._tasks[spec.job_uuid] = _Task(spec)
                answer = _answer(AgentJobStatus.RUNNING)
            self._start_ready()
        return answer

    def stop(self) -> None:
        """Start no more jobs or items. An interrupted job runs again when it is requested again."""
        with self._lock:
            self._stopped = True

    def join(self, seconds: float) -> bool:
        """Wait for the running jobs; return whether they ended in time."""
        end = time.monotonic() + seconds
        with self._lock:
            threads = [task.thread for task in self._tasks.values() if task.thread is not None]
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def running(self) -> list[str]:
        """Return the uuids of the jobs whose driver has not returned."""
        with self._lock:
            # A task without a thread only waits: a stop loses nothing of it.
            return [job for job, task in self._tasks.items() if task.thread is not None]

    def _current_answer(self, spec: JobSpec) -> JobAnswer | None:
        """Return the status of a known job; None if the job must be enqueued."""
        task = self._tasks.get(spec.job_uuid)
        if task is not None:
            if task.cancelled:
                return _answer(AgentJobStatus.FAILED, CANCELLED)
            if task.discarded:
                return _answer(AgentJobStatus.FAILED, task.timeout_error)
            return _answer(AgentJobStatus.RUNNING, activity=task.activity.current)
        # The outcome of the job must not reach the conductor before the report of its device.
        if spec.job_uuid in self._rediscovering:
            return _answer(AgentJobStatus.RUNNING)
        entry = self.checkpoint.get(spec.job_uuid)
        # STARTED without a task: the job was interrupted, by a restart for example, and runs again.
        if entry is None or entry.state is CheckpointState.STARTED:
            return None
        if entry.state is CheckpointState.COMPLETED:
            return _answer(AgentJobStatus.DONE)
        if entry.state is CheckpointState.CANCELLED:
            return _answer(AgentJobStatus.FAILED, CANCELLED)
        # The conductor requests a retried job until it succeeds: here it runs again.
        if spec.retried:
            return None
        return _answer(AgentJobStatus.FAILED, entry.error)

    def _cancel_superseded(self, spec: JobSpec) -> None:
        """Cancel jobs: one that waits never starts, and the result of one that runs is ignored."""
        for job in spec.cancels:
            if job == spec.job_uuid:
                continue  # a cancelled job would never start
            # Also of a job that is unknown here: its request may arrive after the one that cancels
            # it. The kind of such a job is not known, and not used.
            self.checkpoint.record(job, JobKind.PREPARE, CheckpointState.CANCELLED)
            task = self._tasks.get(job)
            if task is not None:
                task.cancelled = True
                if task.thread is None:
                    del self._tasks[job]

    def _start_ready(self) -> None:
        """Start each job that has no lock conflict, up to the limit."""
        if self._stopped:
            return
        tasks = self._tasks.values()
        # A job past its timeout keeps its thread, but not its slot: some hanging drivers must not
        # stop all work of the host.
        free_slots = self.max_concurrent - sum(
            t.thread is not None and t.timeout_error is None for t in tasks
        )
        # Guests may keep their devices for a long time: other jobs do not wait for them.
        free_unplugs = max(1, self.max_concurrent // 2) - sum(map(_is_unplugging, tasks))
        locks = _Locks()
        for task in tasks:
            is_unplug = task.spec.kind is JobKind.UNPLUG
            # A release waits until the driver of the job that it cancels has returned. Otherwise
            # both would change the device at the same time.
            blocked = locks.conflicts(task.spec) or any(map(self._is_running, task.spec.cancels))
            has_slot = free_slots > 0 and (free_unplugs > 0 or not is_unplug)
            if task.thread is None and has_slot and not blocked and self._start_task(task):
                free_slots -= 1
                free_unplugs -= is_unplug
            # Also of a job that waits: a later job must not overtake it on the same handle.
            locks.add(task.spec)

    def _is_running(self, job: str) -> bool:
        task = self._tasks.get(job)
        return task is not None and task.thread is not None

    def _start_task(self, task: _Task) -> bool:
        """Record a job as started and start its thread; return False if that fails."""
        spec = task.spec
        # Of its own, without a pool: a driver that hangs keeps its thread, and would use up a pool.
        thread = threading.Thread(
            target=self._run, args=(task,), name=f"job-{spec.job_uuid}", daemon=True
        )
        self.checkpoint.record(spec.job_uuid, spec.kind, CheckpointState.STARTED)
        task.thread = thread
        try:
            thread.start()
        except RuntimeError as exc:
            # Retried when the next job ends or when the conductor requests the job again.
            LOG.warning("Job cannot start, retrying: %s", exc, job=spec.job_uuid)
            task.thread = None
        return task.thread is not None

    def _run(self, task: _Task) -> None:
        with log.log_fields(job=task.spec.job_uuid), task.activity.record():
            self._run_task(task)

    def _run_task(self, task: _Task) -> None:
        """Run a job in this thread, record its end and report it, unless it was discarded."""
        spec = task.spec
        LOG.info(
            "Job started: %s, %d items",
            spec.kind,
            len(spec.items),
            device={item.device for item in spec.items},
            instance=spec.instance,
        )
        watchdog = self.timer(spec.timeout, self._time_out, (task,))
        # A driver that hangs must not keep the process at its end.
        watchdog.daemon = True
        aborted, error = False, None
        try:
            watchdog.start()
            # The present drivers: a job keeps the drivers that it started with.
            drivers = {backend.name: backend.driver for backend in self.backends}
            with tracing.remote_span("job.execute", task.trace_context, **_span_fields(spec)):
                # Before the driver is called: an agent that is killed during the call then knows of
                # the job.
                self.checkpoint.flush()
                error = execute(
                    spec,
                    drivers,
                    should_continue=lambda: not (self._stopped or task.discarded),
                    removed_driver=self.removed_driver,
                    guests=self.guests,
                )
        except Aborted:
            aborted = True
        except OSError as exc:  # of the checkpoint: ``execute`` returns the errors of drivers
            error = f"the agent cannot write its checkpoint: {exc}"
        except Exception as exc:
            LOG.exception("Unexpected error while running a job")
            error = f"unexpected error in the agent: {error_text(exc)}"
        watchdog.cancel()
        with self._lock:
            # An aborted job stays STARTED in the checkpoint, so that it runs again on request.
            reported = not aborted and not task.discarded
            if reported:
                state = CheckpointState.COMPLETED if error is None else CheckpointState.FAILED
                self.checkpoint.record(spec.job_uuid, spec.kind, state, error)
                if spec.kind in INVENTORY_KINDS:
                    self._rediscovering.add(spec.job_uuid)
            del self._tasks[spec.job_uuid]
            self._start_ready()
        if reported:
            self._report(spec, error)
        elif task.discarded:
            LOG.info(
                "Driver finished a cancelled or timed-out job, result ignored: %s",
                error or "succeeded",
            )
            # The driver may have changed the device nevertheless.
            self._rediscover(spec)

    def _time_out(self, task: _Task) -> None:
        """Fail a job that exceeds its timeout.

        A partition job does not fail: its device must stay unavailable while the driver changes it.
        """
        spec = task.spec
        if spec.kind is JobKind.PARTITION:
            LOG.warning("Job exceeds %g s, waiting for the driver", spec.timeout, job=spec.job_uuid)
            return
        with self._lock:
            # The job has ended while the timer waited for the lock.
            if self._tasks.get(spec.job_uuid) is not task:
                return
            # The driver cannot be interrupted: the job keeps its thread and its locks until the
            # call returns, so that no other job touches the device meanwhile.
            error = task.timeout_error = f"{spec.kind} did not end in {spec.timeout:g} s"
            reported = not task.cancelled
            if reported:
                self.checkpoint.record(spec.job_uuid, spec.kind, CheckpointState.FAILED, error)
            self._start_ready()
        if reported:
            self._report(spec, error)

    def _report(self, spec: JobSpec, error: str | None) -> None:
        """Write the checkpoint, then report the outcome of a job to the conductor."""
        if error is not None:
            LOG.warning("Job failed: %s", error, job=spec.job_uuid, instance=spec.instance)
        try:
            self.checkpoint.flush()
        except OSError as exc:
            LOG.warning(
                "Cannot write the checkpoint, the job may run again after a restart: %s",
                exc,
                job=spec.job_uuid,
            )
        state = AgentJobStatus.DONE if error is None else AgentJobStatus.FAILED
        # The changed device is reported before the outcome of the job that changed it.
        self._rediscover(spec, lambda: self._finish(spec, state, error))

    def _finish(self, spec: JobSpec, state: AgentJobStatus, error: str | None) -> None:
        with self._lock:
            self._rediscovering.discard(spec.job_uuid)
        self.on_done(spec.job_uuid, str(state), error)

    def _rediscover(self, spec: JobSpec, callback: Callable[[], None] = lambda: None) -> None:
        """Rediscover the backends whose devices a job changed; then call ``callback``."""
        names = {item.backend for item in spec.items}
        affected = [backend for backend in self.backends if backend.name in names]
        if spec.kind not in INVENTORY_KINDS or not affected:
            callback()
            return
        # A job that changes the inventory has one device, and so one backend to wait for.
        first, *others = affected
        first.rediscover(lambda _: callback())
        for backend in others:
            backend.rediscover()


def _span_fields(spec: JobSpec) -> dict[str, Any]:
    devices = {item.device for item in spec.items}
    return {"job": spec.job_uuid, "kind": spec.kind, "instance": spec.instance, "device": devices}


def _is_unplugging(task: _Task) -> bool:
    """Return whether this is an unplug job that has started and has not exceeded its timeout."""
    return (
        task.spec.kind is JobKind.UNPLUG and task.thread is not None and task.timeout_error is None
    )


class _Locks:
    """The handles, whole deployables and whole devices that jobs lock."""

    def __init__(self) -> None:
        # A lock of a whole device or deployable conflicts with each lock within it:
        #   _whole_devices: locked with all they have; _devices: any part of them is locked
        #   _whole_deployables: locked with all handles; _deployables: any part of them is locked
        self._whole_devices: set[str] = set()
        self._devices: set[str] = set()
        self._whole_deployables: set[str] = set()
        self._deployables: set[str] = set()
        self._handles: set[tuple[str, str]] = set()  # addresses of deployable and handle

    def conflicts(self, spec: JobSpec) -> bool:
        """Return whether a job needs a handle, deployable or device that is locked."""
        return any(
            item.device in self._whole_devices
            or (spec.kind is JobKind.PARTITION and item.device in self._devices)
            or item.deployable in self._whole_deployables
            or (item.deployable, item.handle) in self._handles
            or (item.deployable in self._deployables and _needs_whole(spec, item))
            for item in spec.items
        )

    def add(self, spec: JobSpec) -> None:
        """Add the handles, deployables and devices that a job locks."""
        for item in spec.items:
            self._devices.add(item.device)
            if spec.kind is JobKind.PARTITION:
                self._whole_devices.add(item.device)
                continue
            self._deployables.add(item.deployable)
            if _needs_whole(spec, item):
                self._whole_deployables.add(item.deployable)
            else:
                self._handles.add((item.deployable, item.handle))


def _needs_whole(spec: JobSpec, item: WorkItem) -> bool:
    return spec.kind is JobKind.PROGRAM or not item.handle


def _answer(
    state: AgentJobStatus, error: str | None = None, activity: Activity | None = None
) -> JobAnswer:
    answer: JobAnswer = {"state": str(state), "error": error}
    return answer if activity is None else {**answer, "activity": activity.to_dict()}
