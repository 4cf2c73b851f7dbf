# SPDX-License-Identifier: Apache-2.0
"""Custody records of handles, written in the transaction of the change that they record.

Each function takes at most two statements, however many handles there are.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

from cyborg.core.binding.profile import KEY, AttachTarget, is_for_host, parse_group
from cyborg.core.custody import MAX_ERROR, Entry, Event
from cyborg.core.inventory.device import CLEANING_ABILITIES, Ability
from cyborg.core.text import sanitize
from cyborg.db.binding.claims import FreeHandleRow
from cyborg.db.binding.write import ArqRow
from cyborg.db.custody import write as records
from cyborg.db.custody.write import HandleRow
from cyborg.db.jobs.write import JobRow


class Place(NamedTuple):
    """Where a handle is: the host, the uuid of the device, and the address of the deployable.

    ``device_set`` is the address of the device set through which it is claimed, None without one.
    """

    host: str
    device: str
    deployable: str
    device_set: str | None = None


def record_claimed(
    tx: sa.Connection,
    arqs: Sequence[ArqRow],
    claimed: Mapping[str, FreeHandleRow],
    places: Mapping[str, Place],
    now: datetime,
) -> None:
    """Record that ARQs have claimed handles.

    ``arqs`` are the rows of the ARQs after the bind. ``claimed`` has the handle, and ``places`` its
    place, of each ARQ by the uuid of the ARQ.
    """
    entries = []
    for arq in arqs:
        handle, place = claimed[arq["uuid"]], places[arq["uuid"]]
        details = {
            "handle": handle["uuid"],
            "handle_address": handle["address"],
            "deployable_address": place.deployable,
            **_owner(arq),
        }
        if place.device_set is not None:
            details["device_set"] = place.device_set
        entries.append(Entry(place.device, place.host, Event.CLAIMED, details))
    records.add(tx, entries, now)


def record_prepared(tx: sa.Connection, arqs: Sequence[ArqRow], job: JobRow, now: datetime) -> None:
    """Record that the host has prepared the handles of ARQs, with the options of their profile."""

    def describe(handle: HandleRow, arq: ArqRow) -> dict[str, Any] | None:
        if Ability.PREPARES not in handle["abilities"]:
            return None  # of another device of the instance, which needs no preparation
        accel = dict(parse_group(arq["group"], "group").accel)
        return {"accel": accel, "job": job["uuid"]}

    _record_owned(tx, arqs, Event.PREPARED, describe, now)


def record_assigned(tx: sa.Connection, arqs: Sequence[ArqRow], now: datetime) -> None:
    """Record the instance of ARQs that own handles under a lease; ``arqs`` already have it."""
    _record_owned(tx, arqs, Event.ASSIGNED, lambda handle, arq: {}, now)


def record_released(
    tx: sa.Connection,
    arqs: Collection[ArqRow],
    now: datetime,
    *,
    reason: str,
    error: str | None = None,
) -> None:
    """Record the release of the handles of ARQs; the caller releases them afterwards.

    ``error`` is why their bind failed, if it did.
    """

    def describe(handle: HandleRow, arq: ArqRow) -> dict[str, Any]:
        needs_cleaning = bool(handle["needs_cleaning"])
        return {"reason": reason, "needs_cleaning": needs_cleaning, **_error(error)}

    _record_owned(tx, arqs, Event.RELEASED, describe, now)


def _record_owned(
    tx: sa.Connection,
    arqs: Collection[ArqRow],
    event: Event,
    describe: Callable[[HandleRow, ArqRow], dict[str, Any] | None],
    now: datetime,
) -> None:
    """Record an event of the handles that ARQs own; ``describe`` returns None for no record."""
    by_id = {arq["id"]: arq for arq in arqs}
    if not by_id:
        return
    entries = []
    # One query for all ARQs: an instance with many devices costs no more than one of one device.
    for handle in records.handles_of_arqs(tx, by_id):
        # Never 0: the query selects the handles that these ARQs own.
        arq = by_id[handle["arq_id"] or 0]
        if (details := describe(handle, arq)) is not None:
            details = {**_handle(handle), **_owner(arq), **details}
            entries.append(Entry(handle["device"], handle["host"], event, details))
    records.add(tx, entries, now)


def record_cleaned(tx: sa.Connection, job: JobRow, now: datetime) -> None:
    """Record that the host has cleaned the handles of a job, before they are marked as clean."""
    _record_cleaning(tx, job, Event.CLEANED, job["error"], now)


def record_cleaning_failed(
    tx: sa.Connection, job: JobRow, error: str | None, now: datetime
) -> None:
    """Record a failed attempt to clean handles, unless the previous attempt had the same error.

    The cleaning of a device is retried without end; its custody log must not grow with each try.
    """
    if job["error"] != error:
        _record_cleaning(tx, job, Event.CLEANING_FAILED, error, now)


class AbandonedHandle(NamedTuple):
    """A handle without cleaning: the uuid of its device, and addresses."""

    device: str
    deployable: str
    handle: str


def record_abandoned(
    tx: sa.Connection, host: str, handles: Collection[AbandonedHandle], now: datetime
) -> None:
    """Record that handles of a host are removed without cleaning."""
    entries = [
        Entry(
            item.device,
            host,
            Event.CLEANING_ABANDONED,
            {"handle_address": item.handle, "deployable_address": item.deployable},
        )
        for item in handles
    ]
    records.add(tx, entries, now)


def record_programmed(
    tx: sa.Connection, job: JobRow, image: str | None, error: str | None, now: datetime
) -> None:
    """Record the result of a program job; ``error`` is None if it succeeded."""
    row = records.device_of(tx, job["subject"])
    if row is None:
        return  # the deployable was removed
    details: dict[str, Any] = {
        "deployable": job["subject"],
        "deployable_address": row["deployable"],
        "image": image,
        "job": job["uuid"],
        **_error(error),
    }
    event = Event.PROGRAMMED if error is None else Event.PROGRAM_FAILED
    records.add(tx, [Entry(row["device"], row["host"], event, details)], now)


def record_partitioned(tx: sa.Connection, job: JobRow, error: str | None, now: datetime) -> None:
    """Record the result of a partition job; ``error`` is None if it succeeded.

    The job names the uuid of the device; the row of the device may no longer exist.
    """
    details = {"layout": job["arguments"]["layout"], "job": job["uuid"], **_error(error)}
    event = Event.PARTITIONED if error is None else Event.PARTITION_FAILED
    records.add(tx, [Entry(job["subject"], job["host"], event, details)], now)


def _record_cleaning(
    tx: sa.Connection, job: JobRow, event: Event, error: str | None, now: datetime
) -> None:
    entries = []
    for handle in records.handles_to_clean(tx, job["id"]):
        details: dict[str, Any] = {
            **_handle(handle),
            "abilities": ",".join(sorted(CLEANING_ABILITIES & set(handle["abilities"]))),
            "job": job["uuid"],
            **_error(error),
        }
        entries.append(Entry(handle["device"], handle["host"], event, details))
    records.add(tx, entries, now)


def _handle(row: HandleRow) -> dict[str, Any]:
    return {
        "handle": row["uuid"],
        "handle_address": row["address"],
        "deployable_address": row["deployable"],
    }


def _owner(arq: ArqRow) -> dict[str, Any]:
    owner = {
        "arq": arq["uuid"],
        "instance": arq["instance_uuid"],
        "project": arq["project_id"],
    }
    # Without an instance: the host itself, or the lease of a context.
    return {**owner, KEY: AttachTarget.HOST.value} if is_for_host(arq["group"]) else owner


def _error(error: str | None) -> dict[str, str]:
    return {} if error is None else {"error": sanitize(error, MAX_ERROR)}
