# SPDX-License-Identifier: Apache-2.0
"""``cyborg job-*``: what takes time, on one host or on many, and how far it is."""

import argparse
from collections.abc import Mapping
from typing import Any

from cliff import columns, command, lister, show

from cyborg.cli import shown
from cyborg.cli.answers import Refused, at
from cyborg.core.job import JobKind, JobState
from cyborg.core.rollout import BROKEN, Kind, StepState
from cyborg.core.text import clean

PATH = "/jobs"
MOST = 20  # hosts that one message names
# Plain words: argparse shows those of an enumeration as Python's objects.
KINDS = [kind.value for kind in (*Kind, *JobKind)]
STATES = [state.value for state in JobState]

SHORT: shown.Columns = (
    ("UUID", "uuid"),
    ("Kind", "kind"),
    ("Subject", "subject"),
    ("Host", "host"),
    ("State", "state"),
    ("Progress", "progress"),
    ("Created", "created_at"),
)
LONG: shown.Columns = (
    *SHORT,
    ("Updated", "updated_at"),
    ("Attempts", "attempts"),
    ("Error", "error"),
)
ONE: shown.Columns = (*LONG, ("Steps", "steps"))


class Steps(columns.FormattableColumn[Any]):
    """How a job is on each host: a line for each backend, with what went wrong."""

    def human_readable(self) -> str:
        """Return the lines."""
        return "\n".join(line(step) for step in self._value or ())


def line(step: Mapping[str, Any]) -> str:
    """Return how one backend on one host is."""
    error = f": {clean(step['error'])}" if step["error"] else ""
    return f"{step['host']} ({step['backend']}) {step['state']}{error}"


def trouble(job: Mapping[str, Any]) -> str:
    """Return why a job did not end well, and on which hosts."""
    parts = [line(step) for step in job["steps"] if step["state"] in BROKEN]
    named = parts[:MOST] + ([f"{len(parts) - MOST} more"] if len(parts) > MOST else [])
    if untouched := sum(step["state"] == StepState.UNTOUCHED for step in job["steps"]):
        named.append(f"{untouched} untouched")
    # The error of a job with steps says what they say.
    said = [clean(job["error"])] if job["error"] and not named else []
    told = "; ".join(" ".join(text.split()) for text in [*said, *named])
    return f"job {job['uuid']} ({job['kind']} {job['subject']}) {job['state']}: {told or 'unsaid'}"


def whole(job: Mapping[str, Any]) -> Any:
    """Return a job as a command shows one."""
    return shown.one(ONE, {**job, "steps": Steps(job["steps"])})


class List(lister.Lister):
    """List jobs: what takes time, on one host or on many."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--kind", choices=KINDS, help="only these")
        parser.add_argument("--state", choices=STATES, help="only these")
        parser.add_argument("--host", help="only those that are about this host")
        parser.add_argument(
            "--subject", help="only those about this driver, instance or deployable"
        )
        parser.add_argument("--long", action="store_true", help="show every field")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        rows = self.app.rest.rows(
            PATH, "jobs", kind=args.kind, state=args.state, host=args.host, subject=args.subject
        )
        return shown.table(LONG if args.long else SHORT, rows)


class Show(show.ShowOne):
    """Show one job with how it is on each host."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the job."""
        parser = super().get_parser(prog_name)
        parser.add_argument("job", help="uuid of the job")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        return whole(self.app.rest.call("GET", at(PATH, args.job)))


class Cancel(command.Command):
    """Have jobs about drivers begin nothing more; what they had only closed is open again."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the jobs."""
        parser = super().get_parser(prog_name)
        parser.add_argument("job", nargs="+", help="uuid of an open job about a driver")
        return parser

    def take_action(self, args: argparse.Namespace) -> None:
        """Cancel one after another; one that is refused does not keep the others."""
        refused = []
        for job in args.job:
            try:
                self.app.rest.call("DELETE", at(PATH, job))
            except Refused as why:
                refused.append(f"{job}: {why}")
        if refused:
            raise Refused("; ".join(refused))
