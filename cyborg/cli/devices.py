# SPDX-License-Identifier: Apache-2.0
"""``cyborg device-*``: devices that the agents discovered, and how they are partitioned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cyborg.cli.common import base, formatting, listing, pci_ids, progress
from cyborg.cli.common.base import Arguments, Change, argument, field_argument, flag, plan
from cyborg.cli.common.rest import Collection, CommandError, Row
from cyborg.cli.jobs import JOBS, WAIT_ARGUMENTS, job_progress
from cyborg.core.inventory.device import NOT_OFFERED, DeviceType
from cyborg.core.jobs.job import JobState
from cyborg.core.maintenance import SuccessorMode
from cyborg.core.text import sanitize

SHORT = formatting.columns_of("uuid, type, model, hostname=Host, address, schedulable")
LONG = formatting.columns_of(
    "vendor, status, state, state_reasons, placement, health, health_reason, health_since, "
    "backend, deliverable, undeliverable_reason, setup_required, reboot_required, draining, use, "
    "numa_node, topology, serial, layout, desired_layout, layouts, job_errors, maintenance, "
    "std_board_info=Board, vendor_board_info=Vendor board, created_at, updated_at",
    after=SHORT,
)


def format_schedulable(row: Row) -> str:
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
        # Searched in the text: a response has the board info as JSON in a string.
        withheld = f'"{NOT_OFFERED}"' in str(row.get("vendor_board_info"))
        return "no: not offered" if withheld else "no: nothing to offer"
    # The state of the device changes at once, that of Placement with the next publication:
    # in between the device is opening or closing.
    if state == "ready":
        offered = "yes" if placement == "in_sync" else "opening"
        # It is offered nevertheless: the next job may succeed.
        return f"{offered}, see job_errors" if row.get("job_errors") else offered
    reason = state.replace("_", " ")
    return f"no: {reason}" if placement == "in_sync" else f"closing: {reason}"


def _format_row(row: Row) -> dict[str, Any]:
    return {**pci_ids.add_names(row), "schedulable": format_schedulable_until(row)}


def format_schedulable_until(row: Row) -> str:
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
    # Without the offset, which is always that of UTC.
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
            type=progress.parse_time,
            metavar="TIME",
            help="end of the window: a time in ISO 8601, such as 2030-01-31T14:00:00Z, or a "
            "duration from now on, such as +90m, +2h or +1d",
        ),
        field_argument(
            "--successor",
            choices=list(SuccessorMode),
            help="whether device contexts get other devices: at first none",
        ),
        flag("--end", "end the window now"),
    )

    def take_action(self, args: Arguments) -> None:
        """Set or delete the window. Raise CommandError."""
        fields = self.read_fields(args)
        # Both, or none.
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


LAYOUT_COLUMNS = formatting.columns_of("name, offers, traits, current")
LAYOUTS = Collection("/devices", LAYOUT_COLUMNS, LAYOUT_COLUMNS, nouns="layouts")
RESULT = formatting.columns_of("device, hostname=Host, address, job, state, error")
RESULTS = Collection("/devices", RESULT, nouns="devices")


class LayoutList(listing.Lister, of=LAYOUTS):
    """List the possible layouts of a device; one of them is its current layout."""

    ARGUMENTS = (argument("device", help="uuid or address of the device, or HOST/ADDRESS"),)

    def read_rows(self, args: Arguments) -> list[dict[str, Any]]:
        """Return the layouts."""
        path = DEVICES.object_path(DEVICES.find_uuid(self.app.rest, args.device))
        answer = self.app.rest.call("GET", f"{path}/layout")
        return [
            {**layout, "current": layout["name"] == answer["layout"]}
            for layout in answer["layouts"]
        ]


def describe_layout(device: Row, name: str) -> str:
    """Return how the offer of a device with these layouts would change with one of them.

    >>> offers = {"a": {"PGPU": 1}, "b": {"VGPU": 2}}
    >>> layouts = [{"name": n, "offers": o, "traits": [f"T_{n}"]} for n, o in offers.items()]
    >>> describe_layout({"layout": "a", "layouts": layouts}, "b")
    'PGPU 1 -> 0, VGPU 0 -> 2, -T_a, +T_b'
    >>> describe_layout({"layout": None, "layouts": layouts}, "b")
    'would offer VGPU 2, its current layout is unknown'
    >>> describe_layout({"layout": None, "layouts": []}, "b")
    'refused: the device has no layouts'
    """
    layouts = {row["name"]: row for row in device["layouts"]}
    if not layouts:
        return "refused: the device has no layouts"
    if name not in layouts:
        return sanitize(f"refused, expected one of {', '.join(layouts)}")
    if device["layout"] not in layouts:
        offers = ", ".join(f"{key} {count}" for key, count in layouts[name]["offers"].items())
        return sanitize(f"would offer {offers or 'nothing'}, its current layout is unknown")
    before, after = layouts[device["layout"]], layouts[name]
    counts = {
        resource_class: [row["offers"].get(resource_class, 0) for row in (before, after)]
        for resource_class in sorted({*before["offers"], *after["offers"]})
    }
    lost = sorted({*before["traits"]} - {*after["traits"]})
    gained = sorted({*after["traits"]} - {*before["traits"]})
    texts = [f"{key} {old} -> {new}" for key, (old, new) in counts.items() if old != new]
    texts += [*(f"-{trait}" for trait in lost), *(f"+{trait}" for trait in gained)]
    return sanitize(", ".join(texts)) or "offers the same"


def describe_set_changes(changes: Sequence[Row]) -> str:
    """Return how the offers of device sets would change.

    >>> closed = {"address": "hgx:1", "size": 4, "before": "allocated", "after": "withheld"}
    >>> describe_set_changes([closed, {**closed, "before": "withheld"}])
    'closes set hgx:1 (4, allocated), closes set hgx:1 (4, not offered)'
    >>> describe_set_changes([{**closed, "before": "withheld", "after": "offered"}])
    'offers set hgx:1 (4)'
    """
    texts = []
    for row in changes:
        if row["after"] == "withheld":
            before = "not offered" if row["before"] == "withheld" else row["before"]
            texts.append(f"closes set {row['address']} ({row['size']}, {before})")
        else:
            texts.append(f"offers set {row['address']} ({row['size']})")
    return sanitize(", ".join(texts))


@dataclass(frozen=True, slots=True)
class LayoutPreview(Change):
    """The change of a layout, and the device sets of the host whose offers it changes."""

    device_sets: Sequence[Row] = ()


class LayoutSet(base.WaitCommand, listing.Lister, of=RESULTS):
    """Apply a layout to unused devices or, with --drain, to devices once they are unused.

    Each device has its own job; an error of one device does not stop the others. The exit status is
    1 if a job cannot be created or, with --wait, does not succeed. With --dry-run, show how the
    offer of each device would change, and which device sets would be closed or offered, whether the
    device is in use or not.
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
        flag("--all", "all devices that can have this layout"),
        flag("--drain", "cordon each device and wait until its bound handles are released"),
    )

    def preview(self, args: Arguments) -> list[Change]:
        """Return how the offer of each device would change. Raise CommandError without a device."""
        devices = self._find_devices(args)
        if not devices:
            raise _no_device(args)
        changes: list[Change] = []
        for row in devices:
            change = plan(f"set layout {args.layout} of", "device", row)
            # An unknown layout has no preview: its line says that it would be refused.
            query = {"preview": args.layout} if args.layout in row["layouts"] else {}
            path = f"{DEVICES.object_path(row['uuid'])}/layout"
            answer = self.app.rest.call("GET", path, params=query)
            sets = answer["preview"]["device_sets"] if query else []
            texts = [describe_layout(answer, args.layout), describe_set_changes(sets)]
            details = f"{change.details}: {', '.join(filter(None, texts))}"
            preview = LayoutPreview(change.action, change.kind, change.uuid, details, sets)
            changes.append(preview)
        return changes

    def take_action(self, args: Arguments) -> Any:
        """Start the jobs, wait with --wait, and return a row for each device."""
        # All jobs are started before the first wait: they run at the same time.
        rows = [self._start(args, device) for device in self._find_devices(args)]
        if args.wait:
            rows = [self._wait(row, args.within) for row in rows]
        # The options selected no device; a wrong uuid is an error before.
        if not rows:
            raise _no_device(args)
        if any(row["error"] for row in rows):
            self._status = 1
        return self.build_rows(args, rows)

    def _find_devices(self, args: Arguments) -> Sequence[Row]:
        """Return the devices to change: the given devices, or those that the options select.

        The options select only devices that can have the layout.
        """
        rest, filters = self.app.rest, self.read_fields(args)
        selects = bool(filters or args.model or args.all)
        # Both, or none: a command without a choice must not change all devices.
        if selects == bool(args.device):
            raise CommandError("give either devices, or --host, --type, --vendor, --model or --all")
        if args.device:
            return [
                rest.call("GET", DEVICES.object_path(uuid))
                for uuid in DEVICES.find_uuids(rest, args.device)
            ]
        return [
            device
            for device in DEVICES.list_all(rest, **filters)
            if args.model in (None, device["model"]) and args.layout in device["layouts"]
        ]

    def _start(self, args: Arguments, device: Row) -> dict[str, Any]:
        """Start the job of a device; return its row."""
        names = {"device": device["uuid"], "hostname": device["hostname"]}
        row = {**names, "address": device["address"], "error": None}
        path = f"{DEVICES.object_path(device['uuid'])}/layout"
        try:
            body = {"layout": args.layout, "drain": args.drain}
            job = self.app.rest.call("PUT", path, body)
        except CommandError as exc:
            # The other devices go on: each has a job of its own.
            return {**row, "error": str(exc)}
        return {**row, "job": job["uuid"], "state": job["state"]}

    def _wait(self, row: dict[str, Any], within: float) -> dict[str, Any]:
        """Wait for the end of a job; return the row with its result."""
        if row["error"] is not None:
            return row
        path = JOBS.object_path(row["job"])
        title = f"partitioning of {row['address']} on {row['hostname']}"
        job = self.wait(path, job_progress, title, within, show_counts=False)
        error = job["error"] if job["state"] != JobState.DONE else None
        return {**row, "state": job["state"], "error": error}


def _no_device(args: Arguments) -> CommandError:
    return CommandError(f"no matching device can have the layout {args.layout}")
