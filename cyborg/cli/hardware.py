# SPDX-License-Identifier: Apache-2.0
"""``cyborg hardware-list``: the devices of the hosts as their agents last told of them."""

import argparse
from typing import Any

from cliff import lister

from cyborg.cli import shown

PATH = "/hardware"
SHORT: shown.Columns = (
    ("UUID", "uuid"),
    ("Host", "host"),
    ("Address", "address"),
    ("Driver", "driver"),
    ("Specs", "acc_specs"),
    ("Status", "acc_status"),
    ("Health", "health"),
)
LONG: shown.Columns = (
    *SHORT,
    ("Backend", "backend"),
    ("Vendor", "vendor_id"),
    ("Product", "product_id"),
    ("NUMA node", "numa_node"),
    ("Serial", "serial"),
)


class List(lister.Lister):
    """List hardware, whether or not it is ready or even supported."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--host", help="only the hardware of this host")
        parser.add_argument("--driver", help="only that of this driver or backend")
        parser.add_argument("--long", action="store_true", help="show every field")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        rows = self.app.rest.rows(PATH, "hardware", host=args.host, driver=args.driver)
        return shown.table(LONG if args.long else SHORT, rows)
