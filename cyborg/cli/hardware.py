# SPDX-License-Identifier: Apache-2.0
"""``cyborg hardware-*``: all devices of the hosts as last reported by the agents."""

from typing import Any

from cyborg.cli.common import formatting, listing, pci_ids
from cyborg.cli.common.base import Arguments, argument, field_argument
from cyborg.cli.common.formatting import Text
from cyborg.cli.common.rest import Collection, Row
from cyborg.cli.devices import DEVICES
from cyborg.cli.jobs import JobCommand

SHORT = formatting.columns_of("uuid, host, address, driver, acc_specs=Specs, acc_status=Status")
LONG = formatting.columns_of(
    "health, backend, vendor_id=Vendor, product_id=Product, vendor=Vendor name, "
    "model=Product name, numa_node, serial, not_offered, host_down",
    after=SHORT,
)


def show_specs(specs: Row | None) -> Text:
    """Return a cell with number and type of the accelerators of a device, and capabilities."""
    found = specs or {}
    text = f"{found.get('num', 0)} {found.get('device_type', '')}".strip()
    text += ", remote" if found.get("remote") else ""
    functions = formatting.to_text(found.get("acc_capability"))
    return Text(specs, f"{text}: {functions}" if functions else text)


def show_status(status: Row, not_offered: str | None = None) -> Text:
    """Return a cell with the reasons why a device cannot be attached, or the text ``ready``."""
    reasons = [key.replace("_", " ") for key, active in status.items() if active]
    text = f"not offered: {not_offered}" if not_offered else ", ".join(reasons) or "ready"
    return Text(status, text)


def _status(row: Row) -> Text:
    # Two more reasons, which are fields of their own in a response.
    conditions = {"unhealthy": row.get("health") == "unhealthy", "host_down": row.get("host_down")}
    status = {
        **(row.get("acc_status") or {}),
        **{key: True for key, active in conditions.items() if active},
    }
    return show_status(status, row.get("not_offered"))


def _format_row(row: Row) -> dict[str, Any]:
    return {
        **pci_ids.add_names(row),
        "acc_specs": show_specs(row["acc_specs"]),
        "acc_status": _status(row),
    }


HARDWARE = Collection("/hardware", SHORT, LONG, format_row=_format_row)


class List(listing.Lister, of=HARDWARE):
    """List all hardware, including devices that are not ready or not supported."""

    ARGUMENTS = (
        field_argument("--host", help="only the hardware of this host"),
        field_argument("--driver", help="only the hardware of this driver or backend"),
    )


class Adopt(JobCommand, of=HARDWARE):
    """Make a backend manage a device that its rules exclude."""

    ARGUMENTS = (
        field_argument("host", help="name of the host, as in service-list"),
        field_argument("address", help="address of the device, such as 0000:3b:00.0"),
        field_argument("--backend", required=True, help="name of a backend of this host"),
        field_argument(
            "--force",
            action="store_true",
            default=None,
            help="also if the host uses the device: accept the uses that the driver finds now",
        ),
    )

    def start_job(self, args: Arguments) -> Any:
        """Adopt the device and return the job."""
        return self.app.rest.call("POST", HARDWARE.path, self.read_fields(args))


class Release(JobCommand, of=HARDWARE):
    """Release a device from its backend, which then no longer offers the device."""

    ARGUMENTS = (argument("hardware", help="uuid or address of the device, or HOST/ADDRESS"),)

    def start_job(self, args: Arguments) -> Any:
        """Release the device and return the job."""
        uuid = DEVICES.find_uuid(self.app.rest, args.hardware)
        return self.app.rest.call("DELETE", HARDWARE.object_path(uuid))
