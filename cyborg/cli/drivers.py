# SPDX-License-Identifier: Apache-2.0
"""``cyborg driver-*`` and ``install-driver`` and its like: which drivers there are, and changes."""

import argparse
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from cliff import columns, lister, show

from cyborg.cli import configs, ordered, shown
from cyborg.cli.answers import Refused, at
from cyborg.core.device import DeviceType

PATH = "/drivers"
FIELDS: shown.Columns = (
    ("Driver", "name"),
    ("UUID", "uuid"),
    ("Type", "type"),
    ("Version", "version"),
    ("Support", "support"),
    ("Hosts", "hosts"),
)
ONE: shown.Columns = (*FIELDS, ("Abilities", "abilities"), ("Options", "options"))


class Hosts(columns.FormattableColumn[Any]):
    """Where a driver is: a line for each backend, with what is wrong with it."""

    def human_readable(self) -> str:
        """Return the lines."""
        return "\n".join(_place(place) for place in self._value or ())


class Options(columns.FormattableColumn[Any]):
    """The options of a driver: a line for each."""

    def human_readable(self) -> str:
        """Return the lines."""
        return "\n".join(
            f"{o['name']} ({o['kind']}, {shown.words(o['default']) or 'unset'}): {o['help']}"
            for o in self._value or ()
        )


def _place(place: Mapping[str, Any]) -> str:
    backend = f" ({place['backend']})" if place["backend"] else ""
    said = f"{place['host']}{backend} {place['status']}"
    if place["wish"] in ("disabled", "absent"):
        said += f", wanted {place['wish']}"
    if place["applied"] is False:
        said += ", not applied yet"
    if place["state"] != "up":
        said += f", agent {place['state']}"
    return said + (f": {place['error']}" if place["error"] else "")


def _driver(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("driver_id", help="name or uuid of the driver")


class List(lister.Lister):
    """List the drivers that are installed on any host, and who uses them."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--host", help="only what is on this host")
        parser.add_argument(
            "--type",
            choices=[kind.value for kind in DeviceType],
            help="only drivers of such devices",
        )
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        rows = self.app.rest.rows(PATH, "drivers", host=args.host, type=args.type)
        return shown.table(FIELDS, [{**row, "hosts": Hosts(row["hosts"])} for row in rows])


class Show(show.ShowOne):
    """Show one driver with its options."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the driver."""
        parser = super().get_parser(prog_name)
        _driver(parser)
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        row = self.app.rest.call("GET", at(PATH, args.driver_id))
        open_ = {"hosts": Hosts(row["hosts"]), "options": Options(row["options"])}
        return shown.one(ONE, {**row, **open_})


class Install(ordered.Ordered):
    """Have hosts enable a driver that is installed there."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the driver, where it goes and its options."""
        parser = super().get_parser(prog_name)
        _driver(parser)
        ordered.add_places(
            parser,
            "only on this host; on all that have the driver by default",
            "name of the backend; that of the driver by default",
        )
        configs.add(parser)
        return parser

    def order(self, args: argparse.Namespace) -> Mapping[str, Any]:
        """Install."""
        body = {"driver": args.driver_id, **ordered.places(args)}
        if args.config:
            body["config"] = configs.gather(args.config)
        answer: Mapping[str, Any] = self.app.rest.call("POST", PATH, body)
        return answer


class Uninstall(ordered.Ordered):
    """Have hosts give up a driver; refused while anything of it is in use."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the driver, where it goes and how."""
        parser = super().get_parser(prog_name)
        _driver(parser)
        ordered.add_places(
            parser,
            "only on this host; on all by default",
            "only this backend; all of the driver by default",
        )
        parser.add_argument(
            "--drain",
            action="store_true",
            help="give nothing of it out from now on, and wait until what is in use is released",
        )
        parser.add_argument(
            "--force",
            action="store_true",
            help="although something is in use, and although hosts are dead",
        )
        return parser

    def order(self, args: argparse.Namespace) -> Mapping[str, Any]:
        """Uninstall."""
        asked = [("host", host) for host in args.host or ()]
        asked += [("backend", args.backend)] if args.backend is not None else []
        asked += [(name, "true") for name in ("drain", "force") if getattr(args, name)]
        path = at(PATH, args.driver_id) + (f"?{urlencode(asked)}" if asked else "")
        answer: Mapping[str, Any] = self.app.rest.call("DELETE", path)
        return answer


class Update(ordered.Ordered):
    """Change a driver's backends, one host after another; the first that fails stops it."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the driver, where and what changes."""
        parser = super().get_parser(prog_name)
        _driver(parser)
        ordered.add_places(
            parser,
            "only on this host; on all by default",
            "only this backend; all of the driver by default",
        )
        configs.add(parser)
        parser.add_argument(
            "--unset",
            action="append",
            default=[],
            metavar="NAME",
            help="an option that is again what the host's configuration file says; give it once "
            "for each",
        )
        wish = parser.add_mutually_exclusive_group()
        wish.add_argument(
            "--enable", dest="status", action="store_const", const="enabled", help="open it"
        )
        wish.add_argument(
            "--disable",
            dest="status",
            action="store_const",
            const="disabled",
            help="close it: it is seen, and nothing of it is given out",
        )
        parser.add_argument(
            "--reload", action="store_true", help="make it anew although nothing changes"
        )
        return parser

    def order(self, args: argparse.Namespace) -> Mapping[str, Any]:
        """Update."""
        change: dict[str, Any] = {}
        if args.config or args.unset:
            given: Mapping[str, Any] = configs.gather(args.config)
            if both := sorted(set(args.unset) & set(given)):
                raise Refused(f"{both[0]}: --config or --unset, not both")
            change["config"] = {**given, **dict.fromkeys(args.unset)}
        if args.status:
            change["status"] = args.status
        if args.reload:
            change["reload"] = True
        if not change:
            raise Refused("say what to change: --config, --unset, --enable, --disable or --reload")
        body = {**change, **ordered.places(args)}
        answer: Mapping[str, Any] = self.app.rest.call("PATCH", at(PATH, args.driver_id), body)
        return answer
