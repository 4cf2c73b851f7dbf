# SPDX-License-Identifier: Apache-2.0
"""Base of the commands that start a job, show it, and optionally wait for its end."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from cyborg.cli.common import base, formatting
from cyborg.cli.common.base import Argument, argument, field_argument
from cyborg.cli.common.progress import Progress
from cyborg.cli.jobs import JOBS, build_job, describe_failure, format_step
from cyborg.cli.terminal import tables
from cyborg.core.drivers.rollout import FAILED_STATES, FINAL_STATES, StepState
from cyborg.core.jobs.job import JobState
from cyborg.core.jobs.progress import parse_activity

STARTED = formatting.columns_of("uuid, kind, state")
WAIT_ARGUMENTS = (
    argument("--wait", action="store_true", help="wait until the job has ended"),
    base.within_argument(
        3600.0, "with --wait, the maximum time to wait (3600); the job continues after it"
    ),
)


def job_progress(job: Mapping[str, Any]) -> Progress:
    """Return the progress of a job, with one line for each of its steps that has started.

    The progress of a job without backends is its activity on its host.
    """
    steps, activity = job.get("steps", ()), parse_activity(job.get("activity"))
    total = sum(job["progress"].values())
    done = sum(number for state, number in job["progress"].items() if state in FINAL_STATES)
    pending = f"job {job['uuid']} is {job['state']}, {done} of {total} backends have finished"
    lines = [format_step(step) for step in steps if step["state"] != StepState.WAITING]
    if activity is not None:
        done, total = activity.done or 0, activity.total or 0
        pending = f"job {job['uuid']} is {job['state']}: {activity}"
        lines.append(activity.step)
    return Progress(done, total, pending if job["state"] == JobState.OPEN else None, lines)


class JobCommand(base.WaitCommand, tables.ShowOne):
    """Base class of commands that start a job, and wait for its end with --wait.

    With --wait the exit status is 1 if the job did not succeed.
    """

    OPTIONS: Sequence[Argument] = WAIT_ARGUMENTS

    def start_job(self, args: argparse.Namespace) -> Mapping[str, Any]:
        """Start the job and return it. Raise CommandError."""
        raise NotImplementedError

    def call(self, method: str, path: str, body: Any = None) -> Mapping[str, Any]:
        """Call the service and return its response, which is the job."""
        job: Mapping[str, Any] = self.app.rest.call(method, path, body)
        return job

    def take_action(self, args: argparse.Namespace) -> Any:
        """Start the job, wait with --wait, and return the job."""
        started = self.start_job(args)
        if not args.wait:
            return formatting.build_object(STARTED, started)
        title = f"{started['kind']} of {started['uuid']}"
        poll = self.make_poll(JOBS, started["uuid"], "steps")
        job = self.wait(poll, job_progress, title, args.within)
        if "steps" not in job:
            job = self.app.rest.read_whole(JOBS.object_path(started["uuid"]), "steps")
        if job["state"] != JobState.DONE or any(s["state"] in FAILED_STATES for s in job["steps"]):
            self.app.LOG.error(describe_failure(job))
            self._status = 1
        elif pending := sum(step["state"] == StepState.PENDING_AGENT for step in job["steps"]):
            self.app.LOG.warning("%d backends are pending until their agents reconnect", pending)
        return build_job(job)


def target_arguments(hosts: str, backend: str) -> tuple[Argument, Argument]:
    """Return the arguments --host and --backend of a request with these help texts."""
    return (
        field_argument("--host", to="hosts", action="append", help=f"{hosts}; repeatable"),
        field_argument("--backend", help=backend),
    )
