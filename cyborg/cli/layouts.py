# SPDX-License-Identifier: Apache-2.0
"""``cyborg device-layout-*``: how devices are partitioned."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import argument, field_argument
from cyborg.cli.common.collection import Collection
from cyborg.cli.common.errors import CommandError
from cyborg.cli.common.job_command import WAIT_ARGUMENTS, job_progress
from cyborg.cli.common.preview import Change, plan
from cyborg.cli.devices import DEVICES
from cyborg.cli.jobs import JOBS
from cyborg.core.jobs.job import JobState

LAYOUT_COLUMNS = formatting.columns_of("name, offers, traits, current")
LAYOUTS = Collection("/devices", LAYOUT_COLUMNS, LAYOUT_COLUMNS, nouns="layouts")
RESULT = formatting.columns_of("device, hostname=Host, address, job, state, error")
RESULTS = Collection("/devices", RESULT, nouns="devices")


class LayoutList(listing.Lister, of=LAYOUTS):
    """List the possible layouts of a device; one of them is its current layout."""

    ARGUMENTS = (argument("device", help="uuid or address of the device, or HOST/ADDRESS"),)

    def read_rows(self, args: argparse.Namespace) -> list[dict[str, Any]]:
        """Return the layouts."""
        path = DEVICES.object_path(DEVICES.find_uuid(self.app.rest, args.device))
        found = self.app.rest.call("GET", f"{path}/layout")
        return [
            {**layout, "current": layout["name"] == found["layout"]} for layout in found["layouts"]
        ]


class LayoutSet(base.WaitCommand, listing.Lister, of=RESULTS):
    """Apply a layout to unused devices or, with --drain, to devices once they are unused.

    Each device has its own job; an error of one device does not stop the others. The exit status is
    1 if a job cannot be created or, with --wait, does not succeed.
    """

    OPTIONS = (*WAIT_ARGUMENTS, base.DRY_RUN)
    ARGUMENTS = (
        argument("layout", help="name of the layout, as in device-layout-list"),
        argument(
            "device",
            nargs="*",
            help="uuid or address of a device, or HOST/ADDRESS; or give one of the options below",
        ),
        field_argument("--host", to="hostname", help="the devices of this host"),
        field_argument("--type", help="the devices of this type, such as GPU"),
        field_argument("--vendor", help="the devices of this vendor id"),
        argument("--model", help="the devices of this model, as in device-list"),
        argument("--all", action="store_true", help="all devices that can have this layout"),
        argument(
            "--drain",
            action="store_true",
            help="cordon each device and wait until its bound handles are released",
        ),
    )

    def preview(self, args: argparse.Namespace) -> list[Change]:
        """Return the devices. Raise CommandError if there is none."""
        devices = self._find_devices(args)
        if not devices:
            raise _no_device(args)
        return [plan(f"set layout {args.layout} of", "device", row) for row in devices]

    def take_action(self, args: argparse.Namespace) -> Any:
        """Start the jobs, wait with --wait, and return a row for each device."""
        rows = [self._start(args, device) for device in self._find_devices(args)]
        if args.wait:
            rows = [self._wait(row, args.within) for row in rows]
        if not rows:
            raise _no_device(args)
        if any(row["error"] for row in rows):
            self._status = 1
        return self.build_rows(args, rows)

    def _find_devices(self, args: argparse.Namespace) -> Sequence[Mapping[str, Any]]:
        """Return the devices to change: the given devices, or those that the options select.

        The options select only devices that can have the layout.
        """
        rest, filters = self.app.rest, self.read_fields(args)
        selects = bool(filters or args.model or args.all)
        if selects == bool(args.device):
            raise CommandError("give either devices, or --host, --type, --vendor, --model or --all")
        if args.device:
            return [
                rest.call("GET", DEVICES.object_path(u))
                for u in DEVICES.find_uuids(rest, args.device)
            ]
        return [
            device
            for device in DEVICES.list_all(rest, **filters)
            if args.model in (None, device["model"]) and args.layout in device["layouts"]
        ]

    def _start(self, args: argparse.Namespace, device: Mapping[str, Any]) -> dict[str, Any]:
        """Start the job of a device; return its row."""
        row = {
            "device": device["uuid"],
            "hostname": device["hostname"],
            "address": device["address"],
            "job": None,
            "state": None,
            "error": None,
        }
        path = f"{DEVICES.object_path(device['uuid'])}/layout"
        try:
            body = {"layout": args.layout, "drain": args.drain}
            job = self.app.rest.call("PUT", path, body)
        except CommandError as exc:
            return {**row, "error": str(exc)}
        return {**row, "job": job["uuid"], "state": job["state"]}

    def _wait(self, row: dict[str, Any], within: float) -> dict[str, Any]:
        """Wait for the end of a job; return the row with its result."""
        if row["job"] is None:
            return row
        path = JOBS.object_path(row["job"])
        title = f"partitioning of {row['address']} on {row['hostname']}"
        job = self.wait(path, job_progress, title, within, show_counts=False)
        error = job["error"] if job["state"] != JobState.DONE else None
        return {**row, "state": job["state"], "error": error}


def _no_device(args: argparse.Namespace) -> CommandError:
    return CommandError(f"no matching device can have the layout {args.layout}")
