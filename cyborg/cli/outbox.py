# SPDX-License-Identifier: Apache-2.0
"""``cyborg outbox-*``: what neighbours have not been told yet, and what they never took."""

import argparse
from typing import Any

from cliff import command, lister

from cyborg.cli import shown
from cyborg.cli.answers import Refused, at

PATH = "/outbox"
SHORT: shown.Columns = (
    ("UUID", "uuid"),
    ("Kind", "kind"),
    ("Subject", "subject"),
    ("State", "state"),
    ("Attempts", "attempts"),
    ("Error", "error"),
    ("Created", "created_at"),
)
LONG: shown.Columns = (
    *SHORT,
    ("Updated", "updated_at"),
    ("Next try", "next_try_at"),
    ("Payload", "payload"),
)


class List(lister.Lister):
    """List messages of the outbox: those that wait and those that are dead."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "--state", choices=["pending", "dead"], help="only these; both by default"
        )
        parser.add_argument("--kind", help="only these, such as nova-event or notification")
        parser.add_argument("--long", action="store_true", help="show every field")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        rows = self.app.rest.rows(PATH, "outbox", state=args.state, kind=args.kind)
        return shown.table(LONG if args.long else SHORT, rows)


class _Each(command.Command):
    """Does something to one message after another; one that is refused does not keep the others."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the messages."""
        parser = super().get_parser(prog_name)
        parser.add_argument("message", nargs="+", help="uuid of a dead message")
        return parser

    def _each(self, messages: list[str], method: str, tail: str = "") -> None:
        refused = []
        for message in messages:
            try:
                self.app.rest.call(method, at(PATH, message) + tail)
            except Refused as why:
                refused.append(f"{message}: {why}")
        if refused:
            raise Refused("; ".join(refused))


class Retry(_Each):
    """Have dead messages delivered after all."""

    def take_action(self, args: argparse.Namespace) -> None:
        """Retry each."""
        self._each(args.message, "POST", "/retry")


class Delete(_Each):
    """Forget dead messages."""

    def take_action(self, args: argparse.Namespace) -> None:
        """Delete each."""
        self._each(args.message, "DELETE")
