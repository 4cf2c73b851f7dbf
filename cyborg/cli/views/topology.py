# SPDX-License-Identifier: Apache-2.0
"""``cyborg topology``: hosts, NUMA nodes, devices and handles, and who has them."""

import argparse
import json
from pathlib import Path

from cyborg.cli.common import base
from cyborg.cli.common.base import argument
from cyborg.cli.views import output
from cyborg.cli.views.inventory import MAX_HOSTS, fetch_topology
from cyborg.cli.views.picture_file import write_picture
from cyborg.cli.views.svg import draw_svg
from cyborg.cli.views.tree import build_tree

DEFAULT_HOSTS = 10


def parse_max_hosts(text: str) -> int:
    """Parse a number of hosts. Raise ArgumentTypeError."""
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_HOSTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_HOSTS}")
    return int(text)


class Topology(base.Command):
    """Show the devices of hosts by NUMA node, their handles, and who has these.

    Handles without an owner are only counted. Without --host the first hosts by name are shown. For
    administrators.
    """

    ARGUMENTS = (
        (
            argument("--host", help="only this host"),
            argument(
                "--max-hosts",
                type=parse_max_hosts,
                default=DEFAULT_HOSTS,
                metavar="N",
                help=f"number of hosts, {DEFAULT_HOSTS} by default, at most {MAX_HOSTS}",
            ),
        ),
        argument("--svg", type=Path, metavar="FILE", help="write a picture to this file instead"),
        output.FORMAT,
    )

    def take_action(self, args: argparse.Namespace) -> None:
        """Show the topology or write the picture."""
        found = fetch_topology(self.app.rest, args.host, args.max_hosts)
        if args.svg is not None:
            write_picture(args.svg, draw_svg(found))
        elif args.format == "json":
            document = {"hosts": found.document, "more_hosts": found.num_more}
            self.app.stdout.write(json.dumps(document, indent=2) + "\n")
        else:
            lines = build_tree(found, *output.size_of(self.app.stdout))
            output.write_lines(self.app.stdout, lines)
