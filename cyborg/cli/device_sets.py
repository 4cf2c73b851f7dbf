# SPDX-License-Identifier: Apache-2.0
"""``cyborg device-set-list``: devices that are allocated together, and whether they are offered."""

from typing import Any

from cyborg.cli.common import formatting, listing
from cyborg.cli.common.base import Arguments, argument, field_argument
from cyborg.cli.common.rest import Collection, Row
from cyborg.cli.devices import DEVICES
from cyborg.core.inventory.device_set import OfferState

# A deployable that is no device set has no offer: these select all sets.
ALL_OFFERS = list(OfferState)
SHORT = formatting.columns_of("hostname=Host, address=Set, size, devices, offer, owner, reason")
LONG = formatting.columns_of(
    "uuid, kind, resource_class=Class, traits, mode, group, wanted, instance_uuid=Instance, "
    "project_id=Project, rp_uuid=Provider, placement_error",
    after=SHORT,
)


def describe_set(device_set: Row | None) -> dict[str, Any]:
    """Return the values of the columns of a device set; none for another deployable."""
    if device_set is None:
        return {}
    values = {key: device_set[key] for key in device_set if key not in ("members", "offer_reason")}
    return {
        **values,
        "devices": [_name_member(member) for member in device_set["members"]],
        "owner": find_owner(device_set),
        "reason": device_set["offer_reason"],
    }


def find_owner(device_set: Row) -> str | None:
    """Return the instance that has a set; without one, its project or ARQ; None without owner."""
    if instance := device_set["instance_uuid"]:
        return str(instance)
    if project := device_set["project_id"]:
        return f"project {project}"
    arq = next((m["arq_uuid"] for m in device_set["members"] if m["arq_uuid"]), None)
    return f"request {arq}" if arq else None


def _name_member(member: Row) -> str:
    return str(member["handle"]) + ("" if member["accelerator_uuid"] else " (absent)")


def _format_row(row: Row) -> dict[str, Any]:
    error = (row.get("placement") or {}).get("error")
    return {**row, **describe_set(row.get("device_set")), "placement_error": error}


DEVICE_SETS = Collection("/deployables", SHORT, LONG, nouns="device sets", format_row=_format_row)


class List(listing.Lister, of=DEVICE_SETS):
    """List the device sets of hosts, whether Placement offers them, and who has them.

    The reason says why a set is not offered.
    """

    UNCUT_COLUMNS = ("Set", "Size", "Offer")
    ARGUMENTS = (
        field_argument("--host", help="only the device sets of this host"),
        field_argument(
            "--device",
            to="member",
            lookup=DEVICES.find_uuid,
            help="only the device sets that have this device, by its uuid",
        ),
        argument(
            "--offer",
            choices=ALL_OFFERS,
            action="append",
            help="only the device sets with this offer; repeat the option for several",
        ),
    )

    def read_rows(self, args: Arguments) -> list[dict[str, Any]]:
        """Return the device sets."""
        offers = args.offer or ALL_OFFERS
        return DEVICE_SETS.list_all(self.app.rest, offer=offers, **self.read_fields(args))
