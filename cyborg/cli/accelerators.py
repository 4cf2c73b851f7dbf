# SPDX-License-Identifier: Apache-2.0
"""``cyborg accelerator-*``: what can be attached, who holds it, and what it is called."""

import argparse
from typing import Any

from cliff import lister, show

from cyborg.cli import servers, shown
from cyborg.cli.answers import Refused, at

PATH = "/accelerators"
STATES = ("draining", "preparing", "bound", "dirty", "closed", "free")
SHORT: shown.Columns = (
    ("UUID", "uuid"),
    ("Name", "name"),
    ("Class", "resource_class"),
    ("Host", "hostname"),
    ("Driver", "driver"),
    ("Address", "attach_handle_info"),
    ("State", "state"),
    ("Instance", "instance_uuid"),
)
LONG: shown.Columns = (
    *SHORT,
    ("State reasons", "state_reasons"),
    ("Description", "description"),
    ("Tags", "tags"),
    ("Type", "type"),
    ("Vendor", "vendor"),
    ("Model", "model"),
    ("Backend", "backend"),
    ("Handle", "attach_handle_type"),
    ("Device", "device_uuid"),
    ("Deployable", "deployable_uuid"),
    ("Provider", "rp_uuid"),
    ("Request", "arq_uuid"),
    ("Project", "project_id"),
    ("Created", "created_at"),
    ("Updated", "updated_at"),
)


class List(lister.Lister):
    """List accelerators: those of your project or, for an administrator, all."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--driver", help="only those of this driver or backend")
        parser.add_argument("--host", help="only those of this host")
        parser.add_argument("--instance", help="only those of this instance, by its uuid")
        parser.add_argument("--resource-class", help="only this class, such as PGPU or FPGA")
        parser.add_argument("--state", choices=STATES, help="only those in this state")
        parser.add_argument("--long", action="store_true", help="show every field")
        parser.add_argument(
            "--detail",
            action="store_true",
            help="show also how each server is now, as Nova tells you",
        )
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        rows = self.app.rest.rows(
            PATH,
            "accelerators",
            driver=args.driver,
            host=args.host,
            instance=args.instance,
            resource_class=args.resource_class,
            state=args.state,
        )
        columns = LONG if args.long else SHORT
        if args.detail:
            held = {row["instance_uuid"] for row in rows} - {None}
            known = servers.states(self.app.rest, held)
            rows = [{**row, "server": known.get(row["instance_uuid"])} for row in rows]
            columns = (*columns, ("Server", "server"))
        return shown.table(columns, rows)


class Show(show.ShowOne):
    """Show one accelerator."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the accelerator."""
        parser = super().get_parser(prog_name)
        parser.add_argument("accelerator", help="uuid of the accelerator")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        return shown.one(LONG, self.app.rest.call("GET", at(PATH, args.accelerator)))


class Update(show.ShowOne):
    """Label an accelerator that is held; the label goes when its holder does."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the accelerator and its label."""
        parser = super().get_parser(prog_name)
        parser.add_argument("accelerator", help="uuid of the accelerator")
        parser.add_argument("--name", help="what to call it; an empty one takes the name away")
        parser.add_argument("--description", help="free text; an empty one takes it away")
        tags = parser.add_mutually_exclusive_group()
        tags.add_argument(
            "--tag",
            action="append",
            help="a word about it; give it once for each: they replace those that it has",
        )
        tags.add_argument("--no-tags", action="store_true", help="take all its tags away")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Label and show."""
        label: dict[str, Any] = {
            key: value or None
            for key, value in (("name", args.name), ("description", args.description))
            if value is not None
        }
        if args.tag or args.no_tags:
            label["tags"] = args.tag or []
        if not label:
            raise Refused("say what to change: --name, --description, --tag or --no-tags")
        return shown.one(LONG, self.app.rest.call("PATCH", at(PATH, args.accelerator), label))
