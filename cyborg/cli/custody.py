# SPDX-License-Identifier: Apache-2.0
"""``cyborg device-custody``: who held the handles of a device, and how they were cleaned."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from cyborg.cli.common import formatting, listing
from cyborg.cli.common.base import Arguments, argument, field_argument, flag
from cyborg.cli.common.rest import Collection, CommandError, RestClient, Row
from cyborg.cli.devices import DEVICES
from cyborg.core import custody as core
from cyborg.core.custody import Event, Keys, Link, Record, SealedRecord, parse_keys
from cyborg.core.errors import Invalid
from cyborg.core.text import sanitize

SHORT = formatting.columns_of("sequence=No., recorded_at=Time, event, instance, details")
LONG = formatting.columns_of("arq=ARQ, project, handle, hostname=Host, uuid, hash", after=SHORT)
T = TypeVar("T")
_OWN_COLUMNS = ("arq", "instance", "project", "handle")


def show_details(details: Row | None) -> formatting.Text:
    """Return a cell with the details that have no column of their own, in one line.

    The first is the address of the handle, the others are ``name=value``.
    """
    shown = {
        name: sanitize(str(value))
        for name, value in sorted((details or {}).items())
        # An empty value tells nothing.
        if name not in _OWN_COLUMNS and value not in (None, {})
    }
    address = shown.pop("handle_address", "")
    handle = [address] if address else []
    text = ", ".join([*handle, *(f"{name}={value}" for name, value in shown.items())])
    return formatting.Text(details, text)


def _format_row(row: Row) -> dict[str, Any]:
    details = row["details"]
    owner = {name: details.get(name) for name in _OWN_COLUMNS}
    return {**row, **owner, "details": show_details(details)}


CUSTODY = Collection(
    "/devices", SHORT, LONG, key="custody", nouns="custody records", format_row=_format_row
)


class Custody(listing.Lister, of=CUSTODY):
    """List the custody records of a device, also of a removed device.

    Each record has the hash of the previous record. With --verify, all hashes are computed again
    and the command fails if a hash differs, or a record is missing or was not written by a
    conductor.
    """

    UNCUT_COLUMNS = ("Event",)
    ARGUMENTS = (
        argument(
            "device",
            nargs="?",
            help="uuid of the device; of a removed one, the whole uuid. Without it, --verify and "
            "--export-anchor are about all devices, and those of --anchor",
        ),
        field_argument("--event", choices=[event.value for event in Event], help="only this event"),
        flag("--verify", "check the hash chain of the device"),
        argument(
            "--key-file",
            metavar="FILE",
            help="with --verify, also check the signatures, with the keys of the conductors",
        ),
        argument(
            "--anchor",
            metavar="FILE",
            help="with --verify, also compare with the last hashes of an earlier --export-anchor",
        ),
        argument("--export-anchor", metavar="FILE", help="write the last hash to a new file"),
    )

    def read_rows(self, args: Arguments) -> list[dict[str, Any]]:
        """Return the records; none without a device."""
        rest = self.app.rest
        if (args.key_file or args.anchor) and not args.verify:
            raise CommandError("--key-file and --anchor need --verify")
        if not (args.device or args.verify or args.export_anchor):
            raise CommandError("name a device, or give --verify or --export-anchor for all devices")
        if args.verify or args.export_anchor:
            self._check_logs(rest, args)
        if not args.device:
            return []
        path = _path(DEVICES.find_uuid(rest, args.device))
        return rest.list_all(path, "custody", **self.read_fields(args))

    def produce_output(self, parsed_args: Arguments, *output: Any) -> int:
        """Print the records; without a device there are none to print."""
        return super().produce_output(parsed_args, *output) if parsed_args.device else 0

    def _check_logs(self, rest: RestClient, args: Arguments) -> None:
        """Verify the logs of one device or of all, and export their last records."""
        keys = _read_file(args.key_file, parse_keys) if args.key_file else None
        anchors = _read_file(args.anchor, core.parse_anchors) if args.anchor else {}
        if args.device:
            uuids = [DEVICES.find_uuid(rest, args.device)]
        else:
            # Those of the anchors, too: a removed device is not listed, but its log must be
            # complete.
            uuids = sorted({row["uuid"] for row in DEVICES.list_all(rest)} | set(anchors))
        prefixes = {uuid: "" if args.device else f"device {uuid}: " for uuid in uuids}
        tips: dict[str, Link] = {}
        num_broken = 0
        for uuid, prefix in prefixes.items():
            try:
                if args.verify:
                    message, tip = verify_log(rest, uuid, keys, anchors.get(uuid))
                    self.app.stderr.write(f"{prefix}{message}")
                else:
                    head = _read_head(rest, uuid)
                    tip = None if head is None else head.tip
            except CommandError as exc:
                if args.device:
                    raise
                # The other logs are checked, too: a fault in one says nothing about them.
                num_broken += 1
                self.app.stderr.write(f"{prefix}{exc}\n")
            else:
                if tip is not None:
                    tips[uuid] = tip
        if num_broken:
            raise CommandError(f"{num_broken} of {len(uuids)} custody logs are not proved")
        if args.export_anchor:
            _write_anchors(args.export_anchor, tips)


def verify_log(
    rest: RestClient, device: str, keys: Keys | None = None, anchor: Link | None = None
) -> tuple[str, Link | None]:
    """Read a whole custody log and check it; return a message with the result, and the last link.

    Raise CommandError for a fault.
    """
    # Before and after the records: a conductor may seal some of them in between.
    before = _read_head(rest, device)
    rows = rest.list_all(_path(device), "custody")
    after = _read_head(rest, device)
    # By sequence: the list has the order of its pages.
    sealed = sorted(
        (SealedRecord(_to_record(row), row["hash"]) for row in rows if row["sequence"] is not None),
        key=lambda sealed: sealed.record.sequence,
    )
    new = [
        core.NewRecord(_to_record(row), row.get("signature"))
        for row in rows
        if row["sequence"] is None
    ]
    reached, fault = core.verify(core.Log(before, sealed, after, new), keys, anchor=anchor)
    if fault is not None:
        raise CommandError(f"the chain is broken: {fault.explanation}")
    if after is None:
        return "no record is in the chain yet\n", None
    message = (
        f"records {after.base.sequence + 1} to {reached.sequence} are unchanged; the last hash is "
        f"{reached.hash}\n"
    )
    if keys is None or not after.signature:
        missing = "give --key-file" if after.signature else "the conductors have no key"
        message += f"not proved: that a conductor wrote them ({missing})\n"
    if anchor is not None and anchor.sequence < after.base.sequence:
        message += f"record {anchor.sequence} of the anchor was deleted after its retention\n"
    return message, reached


def _path(uuid: str) -> str:
    return f"{DEVICES.object_path(uuid)}/custody"


def _read_file(name: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, Invalid) as exc:
        raise CommandError(f"cannot read {name}: {exc}") from exc


def _write_anchors(name: str, tips: Mapping[str, Link]) -> None:
    document = {"time": datetime.now(UTC).isoformat(), "chains": core.format_anchors(tips)}
    try:
        # A new file only: who overwrites an anchor loses what it proves.
        with Path(name).open("x", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=1) + "\n")
    except OSError as exc:
        raise CommandError(f"cannot write {name}: {exc}") from exc


def _read_head(rest: RestClient, device: str) -> core.Head | None:
    chain = rest.call("GET", _path(device), params={"limit": 1})["chain"]
    if chain is None:
        return None
    tip = Link(chain["sequence"], chain["hash"])
    base = Link(chain["base_sequence"], chain["base_hash"])
    return core.Head(device, tip, base, chain.get("signature"))


def _to_record(row: Row) -> Record:
    # As the database has it: the hash is that of a time in UTC without an offset.
    time = datetime.fromisoformat(row["recorded_at"]).astimezone(UTC).replace(tzinfo=None)
    return Record(
        uuid=row["uuid"],
        device=row["device_uuid"],
        sequence=row["sequence"] or 0,  # 0 until it is in the chain
        time=time,
        host=row["hostname"],
        event=row["event"],
        details=row["details"],
    )
