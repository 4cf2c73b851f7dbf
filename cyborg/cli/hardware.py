# SPDX-License-Identifier: Apache-2.0
"""``cyborg hardware-*``: the devices of the hosts as their agents last told of them."""

import argparse
from collections.abc import Mapping
from typing import Any

from cliff import columns, lister

from cyborg.cli import ordered, shown
from cyborg.cli.answers import at

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


class Specs(columns.FormattableColumn[Any]):
    """What a device is: how many of what can be attached, and what they are able to do."""

    def human_readable(self) -> str:
        """Return the words."""
        its = self._value or {}
        said = f"{its.get('num', 0)} {its.get('device_type', '')}".strip()
        said += ", remote" if its.get("remote") else ""
        able = shown.words(its.get("acc_capability"))
        return f"{said}: {able}" if able else said


class Status(columns.FormattableColumn[Any]):
    """What a device waits for before it can be attached."""

    def human_readable(self) -> str:
        """Return the words."""
        needed = [key.replace("_", " ") for key, wanted in (self._value or {}).items() if wanted]
        return ", ".join(needed) or "ready"


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
        told = [
            {
                **row,
                "acc_specs": Specs(row.get("acc_specs")),
                "acc_status": Status(row.get("acc_status")),
            }
            for row in rows
        ]
        return shown.table(LONG if args.long else SHORT, told)


class Adopt(ordered.Ordered):
    """Have a backend manage a device that its rules leave alone."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the device and the backend."""
        parser = super().get_parser(prog_name)
        parser.add_argument("host", help="the host, as service-list names it")
        parser.add_argument("address", help="where the device is, such as 0000:3b:00.0")
        parser.add_argument("--backend", required=True, help="the backend of that host")
        return parser

    def order(self, args: argparse.Namespace) -> Mapping[str, Any]:
        """Adopt."""
        body = {"host": args.host, "address": args.address, "backend": args.backend}
        answer: Mapping[str, Any] = self.app.rest.call("POST", PATH, body)
        return answer


class Release(ordered.Ordered):
    """Have its backend leave a device alone from now on."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the device."""
        parser = super().get_parser(prog_name)
        parser.add_argument("hardware", help="uuid of the device, as hardware-list shows it")
        return parser

    def order(self, args: argparse.Namespace) -> Mapping[str, Any]:
        """Release."""
        answer: Mapping[str, Any] = self.app.rest.call("DELETE", at(PATH, args.hardware))
        return answer
