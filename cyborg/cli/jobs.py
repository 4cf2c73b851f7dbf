# SPDX-License-Identifier: Apache-2.0
"""``cyborg job-*``: long-running jobs on one or more hosts, and their progress."""

import argparse
from collections.abc import Mapping
from typing import Any

from cliff import columns

from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import argument, field_argument
from cyborg.cli.common.collection import Collection
from cyborg.core.drivers.rollout import FAILED_STATES, Kind, StepState
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


def _format_row(job: Mapping[str, Any]) -> dict[str, Any]:
    activity = job.get("activity")
    text = str(parse_activity(activity) or "")
    return {**job, "activity": formatting.Text(activity, text)}


JOBS = Collection("/jobs", SHORT, LONG, format_row=_format_row)


class Steps(columns.FormattableColumn[Any]):
    """Steps of a job: one line for each backend, with its error."""

    def human_readable(self) -> str:
        """Return the value as lines of text."""
        return "\n".join(format_step(step) for step in self._value or ())


def format_step(step: Mapping[str, Any]) -> str:
    """Return the state of one backend on one host."""
    error = f": {sanitize(step['error'])}" if step["error"] else ""
    return f"{step['host']} ({step['backend']}) {step['state']}{error}"


def describe_failure(job: Mapping[str, Any]) -> str:
    """Return why and on which hosts a job failed."""
    failures = [format_step(step) for step in job["steps"] if step["state"] in FAILED_STATES]
    shown = [join_limited(failures, MAX_HOSTS, separator="; ")] if failures else []
    if skipped := sum(step["state"] == StepState.SKIPPED for step in job["steps"]):
        shown.append(f"{skipped} skipped")
    # The error of a job with steps repeats the errors of the steps.
    error = [sanitize(job["error"])] if job["error"] and not shown else []
    reasons = "; ".join(" ".join(text.split()) for text in [*error, *shown]) or "no reason given"
    return f"job {job['uuid']} ({job['kind']} {job['subject']}) {job['state']}: {reasons}"


def build_job(job: Mapping[str, Any]) -> Any:
    """Return the headings and values of a job."""
    return formatting.build_object(DETAIL, {**_format_row(job), "steps": Steps(job["steps"])})


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

    def take_action(self, args: argparse.Namespace) -> Any:
        """Return the job."""
        path, filters = self.find_path(args), self.read_fields(args)
        return build_job(self.app.rest.read_whole(path, "steps", **filters))


class JobCancel(base.CallEach, of=JOBS):
    """Cancel open driver jobs, and jobs that drain a device or are retried after a reboot.

    Steps in progress are finished. Backends and devices that were only cordoned are uncordoned.
    """

    ACTION = "cancel"
    ARGUMENTS = (argument("job", nargs="+", help="uuid of an open job"),)
