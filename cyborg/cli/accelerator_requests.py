# SPDX-License-Identifier: Apache-2.0
"""``cyborg arq-*``: accelerator requests (ARQs) from creation to release."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from cliff import command, lister, show

from cyborg.cli import shown
from cyborg.cli.answers import Refused, at

PATH = "/accelerator_requests"
SHORT: shown.Columns = (
    ("UUID", "uuid"),
    ("State", "state"),
    ("Profile", "device_profile_name"),
    ("Instance", "instance_uuid"),
    ("Host", "hostname"),
    ("Handle", "attach_handle_type"),
    ("Address", "attach_handle_info"),
)
LONG: shown.Columns = (
    *SHORT,
    ("Group", "device_profile_group_id"),
    ("Provider", "device_rp_uuid"),
    ("Handle UUID", "attach_handle_uuid"),
    ("Project", "project_id"),
    ("Created", "created_at"),
    ("Updated", "updated_at"),
)


class Create(lister.Lister):
    """Make the accelerator requests of a device profile, one for each unit it asks for."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the profile."""
        parser = super().get_parser(prog_name)
        parser.add_argument("profile", help="name of the device profile")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Create and show."""
        made = self.app.rest.call("POST", PATH, {"device_profile_name": args.profile})
        return shown.table(SHORT, made["arqs"])


class List(lister.Lister):
    """List accelerator requests."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--instance", help="only the requests of this instance")
        parser.add_argument("--long", action="store_true", help="show every field")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        rows = self.app.rest.rows(PATH, "arqs", instance=args.instance)
        return shown.table(LONG if args.long else SHORT, rows)


class Show(show.ShowOne):
    """Show one accelerator request."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the request."""
        parser = super().get_parser(prog_name)
        parser.add_argument("arq", help="uuid of the request")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        return shown.one(LONG, self.app.rest.call("GET", at(PATH, args.arq)))


class Bind(lister.Lister):
    """Bind requests to an instance: all of them or, when one cannot be met, none."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the requests and where they go."""
        parser = super().get_parser(prog_name)
        parser.add_argument("arq", nargs="+", help="uuid of a request")
        parser.add_argument("--host", required=True, help="the host, as device-list names it")
        parser.add_argument(
            "--provider",
            required=True,
            action="append",
            help="uuid of the resource provider that Placement chose; give it once for all "
            "requests or once for each, in the same order",
        )
        parser.add_argument("--instance", required=True, help="uuid of the instance")
        _vouched(parser)
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Bind with one call, then show."""
        providers = args.provider * len(args.arq) if len(args.provider) == 1 else args.provider
        if len(providers) != len(args.arq):
            raise Refused(
                f"{len(args.arq)} requests and {len(args.provider)} providers: "
                "give one --provider for all or one for each"
            )
        wanted = {"/hostname": args.host, "/instance_uuid": args.instance}
        self.app.rest.call(
            "PATCH",
            PATH,
            {
                arq: _patch("add", wanted | {"/device_rp_uuid": provider})
                for arq, provider in zip(args.arq, providers, strict=True)
            },
            service_token=args.service_token,
        )
        rows = self.app.rest.rows(PATH, "arqs", instance=args.instance)
        return shown.table(SHORT, rows)


class Unbind(command.Command):
    """Take requests from their instance; they can be bound again."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the requests."""
        parser = super().get_parser(prog_name)
        parser.add_argument("arq", nargs="+", help="uuid of a request")
        _vouched(parser)
        return parser

    def take_action(self, args: argparse.Namespace) -> None:
        """Unbind with one call."""
        gone = dict.fromkeys(("/hostname", "/device_rp_uuid", "/instance_uuid"))
        body = dict.fromkeys(args.arq, _patch("remove", gone))
        self.app.rest.call("PATCH", PATH, body, service_token=args.service_token)


class Delete(command.Command):
    """Delete accelerator requests, by uuid or all those of an instance."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the requests."""
        parser = super().get_parser(prog_name)
        parser.add_argument("arq", nargs="*", help="uuid of a request")
        parser.add_argument("--instance", help="delete all requests of this instance")
        _vouched(parser)
        return parser

    def take_action(self, args: argparse.Namespace) -> None:
        """Delete with one call."""
        if bool(args.arq) == bool(args.instance):
            raise Refused("say which: either uuids of requests or --instance")
        chosen = {"arqs": ",".join(args.arq)} if args.arq else {"instance": args.instance}
        self.app.rest.call("DELETE", PATH, params=chosen, service_token=args.service_token)


def _vouched(parser: argparse.ArgumentParser) -> None:
    # What is bound moves only with the word of a service, as Nova gives it.
    parser.add_argument(
        "--service-token",
        type=_token,
        metavar="TOKEN",
        default=os.environ.get("OS_CYBORG_SERVICE_TOKEN"),
        help="a token of a service's user, such as Nova's, without which a cloud with keystone "
        "binds nothing and frees nothing that is bound (Env: OS_CYBORG_SERVICE_TOKEN)",
    )


def _token(text: str) -> str:
    token = text.strip()
    # Not its words: whoever mistypes a token should not see it in a log of the terminal.
    if not token.isascii() or any(letter <= " " or letter == "\x7f" for letter in token):
        raise argparse.ArgumentTypeError("a token is one word of ASCII letters")
    return token


def _patch(verb: str, fields: Mapping[str, str | None]) -> list[dict[str, str]]:
    return [
        {"op": verb, "path": path} | ({} if value is None else {"value": value})
        for path, value in fields.items()
    ]
