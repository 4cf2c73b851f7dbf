# SPDX-License-Identifier: Apache-2.0
"""``cyborg job-*`` and ``outbox-*``: long-running jobs, and messages to other services.

Commands that start a job, show it and optionally wait for its end are JobCommands.
"""

from collections.abc import Sequence
from typing import Any

from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import Argument, Arguments, argument, field_argument
from cyborg.cli.common.progress import Progress
from cyborg.cli.common.rest import Collection, Row
from cyborg.cli.terminal import tables
from cyborg.core.drivers.rollout import FAILED_STATES, FINAL_STATES, Kind, StepState
from cyborg.core.jobs.job import JobKind, JobState
from cyborg.core.jobs.progress import parse_activity
from cyborg.core.text import join_limited, sanitize

MAX_HOSTS = 20  # in one error message
# Plain strings: argparse would show members of an enumeration as Python objects.
KINDS = [kind.value for kind in (*Kind, *JobKind)]
STATES = [state.value for state in JobState]
STEP_STATES = [state.value for state in StepState]

SHORT = formatting.columns_of("uuid, kind, subject, host, state, progress, activity")
LONG = formatting.columns_of("created_at, updated_at, attempts, error", after=SHORT)
DETAIL = formatting.columns_of("steps", after=LONG)


def _format_row(job: Row) -> dict[str, Any]:
    activity = job.get("activity")
    text = str(parse_activity(activity) or "")
    return {**job, "activity": formatting.Text(activity, text)}


JOBS = Collection("/jobs", SHORT, LONG, format_row=_format_row)


def format_step(step: Row) -> str:
    """Return the state of one backend on one host."""
    error = f": {sanitize(step['error'])}" if step["error"] else ""
    return f"{step['host']} ({step['backend']}) {step['state']}{error}"


def describe_failure(job: Row) -> str:
    """Return why and on which hosts a job failed."""
    failures = [format_step(step) for step in job["steps"] if step["state"] in FAILED_STATES]
    shown = [join_limited(failures, MAX_HOSTS, separator="; ")] if failures else []
    if skipped := sum(step["state"] == StepState.SKIPPED for step in job["steps"]):
        shown.append(f"{skipped} skipped")
    # The error of a job with steps repeats the errors of the steps.
    error = [sanitize(job["error"])] if job["error"] and not shown else []
    reasons = "; ".join(" ".join(text.split()) for text in [*error, *shown]) or "no reason given"
    return f"job {job['uuid']} ({job['kind']} {job['subject']}) {job['state']}: {reasons}"


def build_job(job: Row) -> Any:
    """Return the headings and values of a job."""
    steps = formatting.Text(job["steps"], "\n".join(map(format_step, job["steps"] or ())))
    return formatting.build_object(DETAIL, {**_format_row(job), "steps": steps})


class JobList(listing.Lister, of=JOBS):
    """List jobs."""

    ARGUMENTS = (
        field_argument("--kind", choices=KINDS, help="only jobs of this kind"),
        field_argument("--state", choices=STATES, help="only jobs in this state"),
        field_argument("--host", help="only jobs for this host"),
        field_argument("--subject", help="only jobs for this driver, instance or deployable"),
    )


class JobShow(base.Show, of=JOBS):
    """Show one job with its state on each host."""

    ARGUMENTS = (
        argument("job", help="uuid of the job"),
        field_argument("--step-state", choices=STEP_STATES, help="only the steps in this state"),
    )

    def take_action(self, args: Arguments) -> Any:
        """Return the job."""
        path, filters = self.find_path(args), self.read_fields(args)
        return build_job(self.app.rest.read_whole(path, "steps", **filters))


class JobCancel(base.CallEach, of=JOBS):
    """Cancel open driver jobs, and jobs that drain a device or are retried after a reboot.

    Steps in progress are finished. Backends and devices that were only cordoned are uncordoned.
    """

    ACTION = "cancel"
    ARGUMENTS = (argument("job", nargs="+", help="uuid of an open job"),)


STARTED = formatting.columns_of("uuid, kind, state")
WAIT_ARGUMENTS = base.wait_arguments("the job has ended", 3600.0, "; the job continues after it")


def job_progress(job: Row) -> Progress:
    """Return the progress of a job, with one line for each of its steps that has started.

    The progress of a job without backends is its activity on its host.
    """
    steps, activity = job.get("steps", ()), parse_activity(job.get("activity"))
    # From the counts: the list has jobs without their steps.
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

    def start_job(self, args: Arguments) -> Any:
        """Start the job and return it. Raise CommandError."""
        raise NotImplementedError

    def take_action(self, args: Arguments) -> Any:
        """Start the job, wait with --wait, and return the job."""
        started = self.start_job(args)
        if not args.wait:
            return formatting.build_object(STARTED, started)
        title = f"{started['kind']} of {started['uuid']}"
        poll = self.make_poll(JOBS, started["uuid"], "steps")
        job = self.wait(poll, job_progress, title, args.within)
        # A poll reads large work without its parts: see make_poll.
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


MESSAGE_COLUMNS = formatting.columns_of("uuid, kind, subject, state, attempts, error")
LONG_MESSAGE_COLUMNS = formatting.columns_of(
    "created_at, updated_at, next_try_at, payload", after=MESSAGE_COLUMNS
)
OUTBOX = Collection(
    "/outbox", MESSAGE_COLUMNS, LONG_MESSAGE_COLUMNS, nouns="messages", has_objects=False
)
_MESSAGES = argument("message", nargs="+", help="uuid of a dead letter")


class MessageList(listing.Lister, of=OUTBOX):
    """List pending messages and dead letters of the outbox."""

    ARGUMENTS = (
        field_argument(
            "--state",
            choices=["pending", "dead"],
            help="only messages in this state; both by default",
        ),
        field_argument(
            "--kind", help="only messages of this kind, such as nova-event or notification"
        ),
    )


class MessageRetry(base.CallEach, of=OUTBOX):
    """Retry the delivery of dead letters."""

    ARGUMENTS = (_MESSAGES,)
    METHOD, SUFFIX, ACTION = "POST", "/retry", "retry"


class MessageDelete(base.CallEach, of=OUTBOX):
    """Delete dead letters."""

    ARGUMENTS = (_MESSAGES,)
