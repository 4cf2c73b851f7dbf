# SPDX-License-Identifier: Apache-2.0
"""``cyborg device-custody``: who held the handles of a device, and how they were cleaned."""

import argparse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cyborg.cli.common import formatting, listing
from cyborg.cli.common.base import argument, field_argument
from cyborg.cli.common.collection import Collection
from cyborg.cli.common.errors import CommandError
from cyborg.cli.common.rest import RestClient
from cyborg.cli.devices import DEVICES
from cyborg.core.custody.chain import Fault, Link, SealedRecord, check_records, check_tip
from cyborg.core.custody.record import Event, Record
from cyborg.core.text import sanitize

SHORT = formatting.columns_of("sequence=No., recorded_at=Time, event, instance, details")
LONG = formatting.columns_of("arq=ARQ, project, handle, hostname=Host, uuid, hash", after=SHORT)
_OWN_COLUMNS = ("arq", "instance", "project", "handle")


class Details(formatting.Cell):
    """Details of a record that have no column of their own: ``name=value`` each."""

    def human_readable(self) -> str:
        """Return the details in one line, first the address of the handle."""
        shown = {
            name: sanitize(str(value))
            for name, value in sorted((self._value or {}).items())
            if name not in _OWN_COLUMNS and value not in (None, {})
        }
        handle = [address] if (address := shown.pop("handle_address", None)) else []
        return ", ".join([*handle, *(f"{name}={value}" for name, value in shown.items())])


def _format_row(row: Mapping[str, Any]) -> dict[str, Any]:
    details = row["details"]
    owner = {name: details.get(name) for name in _OWN_COLUMNS}
    return {**row, **owner, "details": Details(details)}


CUSTODY = Collection(
    "/devices", SHORT, LONG, key="custody", nouns="custody records", format_row=_format_row
)


class Custody(listing.Lister, of=CUSTODY):
    """List the custody records of a device, also of a removed device.

    Each record has the hash of the previous record. With --verify, all hashes are computed again
    and the command fails if a hash differs.
    """

    UNCUT_COLUMNS = ("Event",)
    ARGUMENTS = (
        argument("device", help="uuid of the device; of a removed one, the whole uuid"),
        field_argument("--event", choices=[event.value for event in Event], help="only this event"),
        argument("--verify", action="store_true", help="check the hash chain of the device"),
    )

    def read_rows(self, args: argparse.Namespace) -> list[dict[str, Any]]:
        """Return the records."""
        rest = self.app.rest
        path = f"{DEVICES.object_path(DEVICES.find_uuid(rest, args.device))}/custody"
        if args.verify:
            self.app.stderr.write(_verify_log(rest, path))
        return rest.list_all(path, "custody", **self.read_fields(args))


def _verify_log(rest: RestClient, path: str) -> str:
    """Read a whole custody log and check its hashes; return a message with the result.

    Raise CommandError if a hash differs or a record is missing.
    """
    one = {"limit": 1}
    before = rest.call("GET", path, params=one)["chain"]
    rows = rest.list_all(path, "custody")
    after = rest.call("GET", path, params=one)["chain"]
    if before is None or after is None:
        return "no record is in the chain yet\n"
    # Records may be added at the end and deleted at the start while the pages are read. The end of
    # before and the start of after enclose the records that every page has.
    base = Link(after["base_sequence"], after["base_hash"])
    return _verify(base, Link(before["sequence"], before["hash"]), rows)


def _verify(base: Link, tip: Link, rows: Sequence[Mapping[str, Any]]) -> str:
    sealed = [row for row in rows if row["sequence"] is not None]
    in_chain = sorted(
        (row for row in sealed if base.sequence < row["sequence"] <= tip.sequence),
        key=lambda row: int(row["sequence"]),
    )
    reached = check_records(base, map(_to_sealed_record, in_chain))
    fault = reached if isinstance(reached, Fault) else check_tip(reached, tip)
    if fault is not None:
        raise CommandError(f"the chain is broken: {fault.explanation}")
    return (
        f"records {base.sequence + 1} to {tip.sequence} are unchanged; the last hash is "
        f"{tip.hash}\n"
    )


def _to_sealed_record(row: Mapping[str, Any]) -> SealedRecord:
    time = datetime.fromisoformat(row["recorded_at"]).astimezone(UTC).replace(tzinfo=None)
    record = Record(
        uuid=row["uuid"],
        device=row["device_uuid"],
        sequence=row["sequence"],
        time=time,
        host=row["hostname"],
        event=row["event"],
        details=row["details"],
    )
    return SealedRecord(record, row["hash"])
