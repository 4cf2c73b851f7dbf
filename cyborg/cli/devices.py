# SPDX-License-Identifier: Apache-2.0
"""``cyborg device-*``: the cards and functions that the agents found."""

import argparse
from typing import Any

from cliff import lister, show

from cyborg.cli import shown
from cyborg.cli.answers import at

PATH = "/devices"
SHORT: shown.Columns = (
    ("UUID", "uuid"),
    ("Type", "type"),
    ("Vendor", "vendor"),
    ("Model", "model"),
    ("Host", "hostname"),
    ("Status", "status"),
    ("State", "state"),
)
LONG: shown.Columns = (
    *SHORT,
    ("State reasons", "state_reasons"),
    ("Health", "health"),
    ("Health reason", "health_reason"),
    ("Health since", "health_since"),
    ("Address", "address"),
    ("Backend", "backend"),
    ("NUMA node", "numa_node"),
    ("Serial", "serial"),
    ("Board", "std_board_info"),
    ("Vendor board", "vendor_board_info"),
    ("Created", "created_at"),
    ("Updated", "updated_at"),
)


class List(lister.Lister):
    """List devices."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--type", help="only this type, such as GPU, FPGA or NIC")
        parser.add_argument("--vendor", help="only this vendor id, such as 10de")
        parser.add_argument("--host", help="only the devices of this host")
        parser.add_argument("--address", help="only those at this address, such as 0000:3b:00.0")
        parser.add_argument("--status", choices=("enabled", "maintaining"), help="only these")
        parser.add_argument("--health", choices=("ok", "unhealthy", "unknown"), help="only these")
        parser.add_argument("--long", action="store_true", help="show all that is known of each")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        rows = self.app.rest.rows(
            PATH,
            "devices",
            type=args.type,
            vendor=args.vendor,
            hostname=args.host,
            address=args.address,
            status=args.status,
            health=args.health,
        )
        return shown.table(LONG if args.long else SHORT, rows)


class Show(show.ShowOne):
    """Show one device."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the device."""
        parser = super().get_parser(prog_name)
        parser.add_argument("device", help="uuid of the device")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        return shown.one(LONG, self.app.rest.call("GET", at(PATH, args.device)))
