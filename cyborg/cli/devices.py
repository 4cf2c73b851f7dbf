# SPDX-License-Identifier: Apache-2.0
"""``cyborg device-*``: devices that the agents discovered."""

import argparse
from collections.abc import Mapping
from typing import Any

from cyborg.cli.common import base, duration, formatting, listing, pci_ids
from cyborg.cli.common.base import argument, field_argument
from cyborg.cli.common.collection import Collection
from cyborg.cli.common.errors import CommandError
from cyborg.core.inventory.device import DeviceType
from cyborg.core.inventory.report import NOT_OFFERED
from cyborg.core.maintenance import SuccessorMode

SHORT = formatting.columns_of("uuid, type, model, hostname=Host, address, schedulable")
LONG = formatting.columns_of(
    "vendor, status, state, state_reasons, placement, health, health_reason, health_since, "
    "backend, deliverable, undeliverable_reason, setup_required, reboot_required, draining, use, "
    "numa_node, topology, serial, layout, desired_layout, layouts, job_errors, maintenance, "
    "std_board_info=Board, vendor_board_info=Vendor board, created_at, updated_at",
    after=SHORT,
)


def format_schedulable(row: Mapping[str, Any]) -> str:
    """Return whether Placement offers a device, with the reason if it does not.

    >>> format_schedulable({"state": "maintaining", "placement": "in_sync"})
    'no: maintaining'
    >>> format_schedulable({"state": "maintaining", "placement": "stale"})
    'closing: maintaining'
    >>> format_schedulable({"state": "ready", "placement": "in_sync", "job_errors": ["it broke"]})
    'yes, see job_errors'
    """
    state, placement = str(row.get("state")), row.get("placement")
    if placement == "error":
        return "error in Placement"
    if placement is None:
        withheld = f'"{NOT_OFFERED}"' in str(row.get("vendor_board_info"))
        return "no: not offered" if withheld else "no: nothing to offer"
    if state == "ready":
        offered = "yes" if placement == "in_sync" else "opening"
        return f"{offered}, see job_errors" if row.get("job_errors") else offered
    reason = state.replace("_", " ")
    return f"no: {reason}" if placement == "in_sync" else f"closing: {reason}"


def _format_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**pci_ids.add_names(row), "schedulable": format_schedulable_until(row)}


def format_schedulable_until(row: Mapping[str, Any]) -> str:
    """Return ``format_schedulable``, then the end of the maintenance window and its drain status.

    >>> window = {"until": "2030-01-31T14:00:00+00:00", "owned": 2, "cleaning": 0}
    >>> row = {"state": "maintaining", "placement": "in_sync", "maintenance": window}
    >>> format_schedulable_until(row)
    'no: maintaining until 2030-01-31T14:00:00Z, 2 handles in use'
    """
    text, window = format_schedulable(row), row.get("maintenance")
    if not window or row.get("state") != "maintaining":
        return text
    used = window["owned"] + window["cleaning"]
    drain = "drained" if not used else f"{used} handle{'s' if used > 1 else ''} in use"
    end = str(window["until"])[:19]
    return f"{text} until {end}Z, {drain}"


def _filters(text: str) -> dict[str, str | None]:
    host, slash, address = text.partition("/")
    return {"hostname": host, "address": address} if slash else {"address": text}


DEVICES = Collection(
    "/devices",
    SHORT,
    LONG,
    format_row=_format_row,
    filters=_filters,
    expected="the address or HOST/ADDRESS",
)


class DeviceList(listing.Lister, of=DEVICES):
    """List devices and whether they are schedulable."""

    UNCUT_COLUMNS = ("State", "Schedulable")
    ARGUMENTS = (
        field_argument("--type", choices=[str(kind) for kind in DeviceType], help="only this type"),
        field_argument("--vendor", help="only this vendor id, such as 10de"),
        field_argument("--host", to="hostname", help="only the devices of this host"),
        field_argument("--address", help="only devices with this address, such as 0000:3b:00.0"),
        field_argument(
            "--status", choices=("enabled", "maintaining"), help="only devices with this status"
        ),
        field_argument(
            "--deliverable",
            choices=("true", "false"),
            help="only devices that can, or cannot, be attached to an instance",
        ),
        field_argument(
            "--health", choices=("ok", "unhealthy", "unknown"), help="only devices with this health"
        ),
    )


class DeviceShow(base.Show, of=DEVICES):
    """Show one device."""

    ARGUMENTS = (argument("device", help="uuid or address of the device, or HOST/ADDRESS"),)


class _SetStatus(base.CallEach, of=DEVICES):
    """Base of the commands that enable or disable devices."""

    METHOD = "POST"
    ARGUMENTS = (
        argument("device", nargs="+", help="uuid or address of a device, or HOST/ADDRESS"),
    )


class DeviceEnable(_SetStatus):
    """Enable devices for new requests."""

    SUFFIX = "/enable"
    ACTION = "enable"


class DeviceMaintain(base.Command, of=DEVICES):
    """Begin, change or end the maintenance window of a device.

    Until its end no new requests are bound to the device; bound requests stay bound. With
    --successor auto, each device context that is bound to a server gets another device of the host,
    which the server has from its next start; a change without --successor leaves this as it is.
    """

    ARGUMENTS = (
        argument("device", help="uuid or address of the device, or HOST/ADDRESS"),
        field_argument(
            "--until",
            type=duration.parse_time,
            metavar="TIME",
            help="end of the window: a time in ISO 8601, such as 2030-01-31T14:00:00Z, or a "
            "duration from now on, such as +90m, +2h or +1d",
        ),
        field_argument(
            "--successor",
            choices=list(SuccessorMode),
            help="whether device contexts get other devices: at first none",
        ),
        argument("--end", action="store_true", help="end the window now"),
    )

    def take_action(self, args: argparse.Namespace) -> None:
        """Set or delete the window. Raise CommandError."""
        fields = self.read_fields(args)
        if args.end == ("until" in fields):
            raise CommandError("give either --until or --end")
        if args.end and fields:
            raise CommandError("--successor needs --until")
        path = f"{self.find_path(args)}/maintenance"
        if args.end:
            self.app.rest.call("DELETE", path)
        else:
            self.app.rest.call("PUT", path, fields)


class DeviceDisable(_SetStatus):
    """Disable devices for new requests; bound requests stay bound."""

    SUFFIX = "/disable"
    ACTION = "disable"
