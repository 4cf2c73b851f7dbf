# SPDX-License-Identifier: Apache-2.0
"""The command ``complete``."""

import argparse
from typing import Any

from cliff import command

from cyborg.cli.commands import ALIASES
from cyborg.cli.completion.scripts import WRITERS
from cyborg.cli.completion.table import Parsers, build_table, first_sentence


class Complete(command.Command):
    """Print a script for a shell that completes commands, options and their values."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the argument."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "shell",
            nargs="?",
            default="bash",
            choices=sorted(WRITERS),
            help="the shell, bash by default",
        )
        return parser

    def take_action(self, args: argparse.Namespace) -> None:
        """Print the script."""
        table = build_table(read_parsers(self.app), ALIASES)
        self.app.stdout.write(WRITERS[args.shell](table))


def read_parsers(app: Any) -> Parsers:
    """Return the parsers of all commands of an application, and of its global options."""
    parsers = {"": ("", app.parser)}
    for name, entry in app.command_manager:
        factory = entry.load()
        parser = factory(app, None).get_parser(f"{app.NAME} {name}")
        parsers[name] = (first_sentence(parser.description or factory.__doc__ or ""), parser)
    return parsers
