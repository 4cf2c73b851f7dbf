# SPDX-License-Identifier: Apache-2.0
"""``cyborg job-*``, and the commands that have something done by a job."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cliff import columns, command, lister, show

from cyborg.cli import seconds, shown
from cyborg.cli.answers import Refused, at
from cyborg.cli.waiting import Progress, wait
from cyborg.core.job import JobKind, JobState
from cyborg.core.rollout import BROKEN, ENDED, Kind, StepState
from cyborg.core.text import clean

PATH = "/jobs"
POLL = 0.5  # seconds
MOST = 20  # hosts that one message names
# Plain words: argparse shows those of an enumeration as Python's objects.
KINDS = [kind.value for kind in (*Kind, *JobKind)]
STATES = [state.value for state in JobState]

BEGUN: shown.Columns = (("UUID", "uuid"), ("Kind", "kind"), ("State", "state"))
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


def look(job: Mapping[str, Any]) -> Progress:
    """Return how far a job is, host by host."""
    steps = job["steps"]
    done = sum(step["state"] in ENDED for step in steps)
    state = f"job {job['uuid']} is {job['state']}, {done} of {len(steps)} backends are through"
    late = state if job["state"] == JobState.OPEN else None
    lines = [line(step) for step in steps if step["state"] != StepState.WAITING]
    return Progress(done, len(steps), late, lines)


def trouble(job: Mapping[str, Any]) -> str:
    """Return why a job did not end well, and on which hosts."""
    parts = [line(step) for step in job["steps"] if step["state"] in BROKEN]
    named = parts[:MOST] + ([f"{len(parts) - MOST} more"] if len(parts) > MOST else [])
    if untouched := sum(step["state"] == StepState.UNTOUCHED for step in job["steps"]):
        named.append(f"{untouched} untouched")
    said = [clean(job["error"])] if job["error"] else []
    told = "; ".join(" ".join(text.split()) for text in [*said, *named])
    return f"job {job['uuid']} ({job['kind']} {job['subject']}) {job['state']}: {told or 'unsaid'}"


def _whole(job: Mapping[str, Any]) -> Any:
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
        return _whole(self.app.rest.call("GET", at(PATH, args.job)))


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


class Ordered(show.ShowOne):
    """A command that has something done by a job, and waits for its end if asked to.

    The exit status is 1 when the job that was waited for did not end well.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add whether to wait."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--wait", action="store_true", help="wait until it is done")
        parser.add_argument(
            "--within",
            type=seconds.parse,
            default=3600.0,
            metavar="SECONDS",
            help="with --wait, for how long at most (3600); the job itself goes on",
        )
        return parser

    def order(self, args: argparse.Namespace) -> Mapping[str, Any]:
        """Ask for it; return the job that has begun. Raises Refused."""
        raise NotImplementedError

    def run(self, parsed_args: argparse.Namespace) -> int:
        """Order, show, and tell how it ended."""
        self._status = 0
        return super().run(parsed_args) or self._status

    def take_action(self, args: argparse.Namespace) -> Any:
        """Order, wait if asked to, and return the job."""
        made = self.order(args)
        if not args.wait:
            return shown.one(BEGUN, made)
        ask = partial(self.app.rest.call, "GET", at(PATH, made["uuid"]))
        what = f"{made['kind']} of {made['uuid']}"
        job = wait(ask, look, what, within=args.within, pause=POLL, counted=True)
        if job["state"] != JobState.DONE:
            self.app.LOG.error(trouble(job))
            self._status = 1
        elif away := sum(step["state"] == StepState.AWAY for step in job["steps"]):
            self.app.LOG.warning("%s backends come to it when their agents return", away)
        return _whole(job)


def places(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a body that say which hosts and which backend."""
    hosts: Sequence[str] | None = args.host
    return {
        key: value
        for key, value in (("hosts", hosts), ("backend", args.backend))
        if value is not None
    }


def add_places(parser: argparse.ArgumentParser, hosts: str, backend: str) -> None:
    """Add to a command which hosts and which backend; the texts are the helps."""
    parser.add_argument("--host", action="append", help=f"{hosts}; give it once for each")
    parser.add_argument("--backend", help=backend)
