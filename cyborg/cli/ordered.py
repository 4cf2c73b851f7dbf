# SPDX-License-Identifier: Apache-2.0
"""Commands that have something done by a job: ordered, shown, and waited for if wished."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cliff import show

from cyborg.cli import seconds, shown
from cyborg.cli.answers import at
from cyborg.cli.jobs import PATH, line, trouble, whole
from cyborg.cli.waiting import Progress, wait
from cyborg.core.job import JobState
from cyborg.core.rollout import ENDED, StepState

POLL = 0.5  # seconds
BEGUN: shown.Columns = (("UUID", "uuid"), ("Kind", "kind"), ("State", "state"))


def look(job: Mapping[str, Any]) -> Progress:
    """Return how far a job is, host by host."""
    steps = job["steps"]
    done = sum(step["state"] in ENDED for step in steps)
    state = f"job {job['uuid']} is {job['state']}, {done} of {len(steps)} backends are through"
    late = state if job["state"] == JobState.OPEN else None
    lines = [line(step) for step in steps if step["state"] != StepState.WAITING]
    return Progress(done, len(steps), late, lines)


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
        return whole(job)


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
