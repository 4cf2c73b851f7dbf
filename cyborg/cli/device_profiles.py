# SPDX-License-Identifier: Apache-2.0
"""``cyborg device-profile-*``: what users may ask for, by name."""

import argparse
from typing import Any

from cliff import command, lister, show

from cyborg.cli import groups, shown
from cyborg.cli.answers import Refused, at

PATH = "/device_profiles"
SHORT: shown.Columns = (("UUID", "uuid"), ("Name", "name"), ("Groups", "groups"))
LONG: shown.Columns = (
    *SHORT,
    ("Description", "description"),
    ("Created", "created_at"),
    ("Updated", "updated_at"),
)


class Create(show.ShowOne):
    """Create a device profile."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the name and the groups."""
        parser = super().get_parser(prog_name)
        parser.add_argument("name", help="letters, digits, '-' and '_', at most 255 of them")
        parser.add_argument(
            "--group",
            metavar="KEY=VALUE,...",
            type=groups.parse,
            action="append",
            required=True,
            help="one request group, such as resources:FPGA=1,trait:CUSTOM_X=required, or the "
            "same as a JSON object; give it once for each group",
        )
        parser.add_argument("--description", help="free text")
        parser.add_argument("--uuid", help="take this uuid instead of a new one")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Create and show."""
        wanted = {"name": args.name, "groups": args.group}
        wanted |= {
            key: value
            for key, value in (("description", args.description), ("uuid", args.uuid))
            if value is not None
        }
        return shown.one(LONG, self.app.rest.call("POST", PATH, [wanted]))


class List(lister.Lister):
    """List device profiles."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--long", action="store_true", help="show every field")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        rows = self.app.rest.rows(PATH, "device_profiles")
        return shown.table(LONG if args.long else SHORT, rows)


class Show(show.ShowOne):
    """Show one device profile."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the profile."""
        parser = super().get_parser(prog_name)
        parser.add_argument("profile", help="name or uuid of the profile")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        answer = self.app.rest.call("GET", at(PATH, args.profile))
        return shown.one(LONG, answer["device_profile"])


class Delete(command.Command):
    """Delete device profiles that no accelerator request uses."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the profiles."""
        parser = super().get_parser(prog_name)
        parser.add_argument("profile", nargs="+", help="name or uuid of a profile")
        return parser

    def take_action(self, args: argparse.Namespace) -> None:
        """Delete one after another; one that is refused does not keep the others."""
        refused = []
        for profile in args.profile:
            try:
                self.app.rest.call("DELETE", at(PATH, profile))
            except Refused as why:
                refused.append(f"{profile}: {why}")
        if refused:
            raise Refused("; ".join(refused))
