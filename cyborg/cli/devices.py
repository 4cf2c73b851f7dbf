# SPDX-License-Identifier: Apache-2.0
"""``cyborg device-*``: devices that the agents discovered."""

from collections.abc import Mapping
from typing import Any

from cyborg.cli.common import base, formatting, listing, pci_ids
from cyborg.cli.common.base import argument, field_argument
from cyborg.cli.common.collection import Collection
from cyborg.core.wire.hardware import NOT_OFFERED

SHORT = formatting.columns_of("uuid, type, model, hostname=Host, address, schedulable")
LONG = formatting.columns_of(
    "vendor, status, state, state_reasons, placement, health, health_reason, health_since, "
    "backend, deliverable, undeliverable_reason, numa_node, topology, serial, layout, "
    "desired_layout, job_errors, std_board_info=Board, vendor_board_info=Vendor board, "
    "created_at, updated_at",
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
    return {**pci_ids.add_names(row), "schedulable": format_schedulable(row)}


DEVICES = Collection("/devices", SHORT, LONG, format_row=_format_row)


class List(listing.Lister, of=DEVICES):
    """List devices and whether they are schedulable."""

    UNCUT_COLUMNS = ("State", "Schedulable")
    ARGUMENTS = (
        field_argument("--type", help="only this type, such as GPU, FPGA or NIC"),
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


class Show(base.Show, of=DEVICES):
    """Show one device."""

    ARGUMENTS = (argument("device", help="uuid of the device"),)


class _SetStatus(base.CallEach, of=DEVICES):
    """Base of the commands that enable or disable devices."""

    METHOD = "POST"
    ARGUMENTS = (argument("device", nargs="+", help="uuid of a device"),)


class Enable(_SetStatus):
    """Enable devices for new requests."""

    SUFFIX = "/enable"


class Disable(_SetStatus):
    """Disable devices for new requests; bound requests stay bound."""

    SUFFIX = "/disable"
