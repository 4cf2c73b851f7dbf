# SPDX-License-Identifier: Apache-2.0
"""Sealing of custody records into the chains of their devices, and what the chains need later.

The transactions that bind and release only insert records. A periodic task puts them into chains,
so that concurrent binds of handles of one device do not wait for one row. Every conductor runs the
task: it locks the head of a chain, and skips a chain whose head another conductor has locked.
Records that a killed conductor has not sealed are sealed by the next round of any conductor.

Old records are deleted. Each day a notification has the last record of each chain: a listener keeps
it where nobody can change it with the database, and later it shows whether the chain still has this
record. Of several conductors one notifies of a chain, because it locks the head.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc

from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core import custody
from cyborg.core.errors import Conflict
from cyborg.core.log import get_logger
from cyborg.core.notification import Event
from cyborg.db.custody import chains, read
from cyborg.db.custody.write import keys_of
from cyborg.db.outbox import write as outbox
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.threads.failures import RateLimitedLogger

LOG = get_logger(__name__)

BATCH_SIZE = 256  # records that one transaction seals: SQLite's writers wait for it
MAX_BATCHES = 64  # batches of one round
MAX_FAILED = 1000  # devices whose records cannot be sealed: the round ends there
PURGE_LIMIT = 500  # records of one chain, and chains, whose old records one sweep deletes

INTERVAL = timedelta(days=1)
MAX_CHAINS = 200  # of one notification: about 30 kB


class CustodySealer:
    """Sealer of custody records; safe to run in several conductors."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        *,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        self._retention = timedelta(days=conf.conductor.custody_retention)
        self._uow = uow
        self._now = now or uow.clock
        self._stopped = threading.Event()
        # Devices whose chain was changed by hand, and the row ids of records that no conductor
        # wrote: they must not fill the next batches.
        self._failed: set[str] = set()
        self._refused: set[int] = set()
        self._refusals = RateLimitedLogger(logger=LOG)
        self._failures = RateLimitedLogger(logger=LOG)

    def run_once(self) -> int:
        """Seal all records that conductors wrote and committed; return their number.

        If the records of a device cannot be sealed, skip the device until the records of all other
        devices are sealed; then retry. A record that no conductor wrote stays as it is: the audit
        reports it.
        """
        count = 0
        for _ in range(MAX_BATCHES):
            if self._stopped.is_set():
                break
            skipped_before = len(self._failed) + len(self._refused)
            sealed = self._seal_batch()
            count += sealed
            skipped = len(self._failed) + len(self._refused)
            # If a batch has changed nothing, all that is left is skipped in this round.
            if (not sealed and skipped == skipped_before) or skipped >= MAX_FAILED:
                self._failed.clear()
                self._refused.clear()
                break
        return count

    def sweep(self) -> int:
        """Delete records that are older than the retention; return their number."""
        if not self._retention:
            return 0
        cutoff = self._now() - self._retention
        uuids = self._uow.run(lambda tx: chains.expired(tx, cutoff, PURGE_LIMIT))
        deleted = 0
        for uuid in uuids:
            if self._stopped.is_set():
                break
            deleted += self._uow.run(partial(_purge, uuid=uuid, cutoff=cutoff))
        self._uow.run(lambda tx: chains.delete_empty_heads(tx, cutoff))
        return deleted

    def stop(self) -> None:
        """Make ``run_once`` and ``sweep`` return after the current transaction."""
        self._stopped.set()

    def _seal_batch(self) -> int:
        """Seal a batch of records; return their number."""
        hosts_by_device = self._uow.run(
            lambda tx: chains.unsealed_devices(
                tx, BATCH_SIZE, excluded=self._failed, refused=self._refused
            )
        )
        if not hosts_by_device:
            return 0
        try:
            self._uow.run(lambda tx: chains.add_heads(tx, hosts_by_device))
        except db_exc.DBDuplicateEntry:
            return 0  # another conductor seals the first records of a device: retry next time
        # All devices in one transaction first: one by one only where that fails, which is rare.
        with contextlib.suppress(db_exc.DBDuplicateEntry, Conflict):
            return self._seal(hosts_by_device)
        # A chain was changed by hand. The other devices must not wait for its repair.
        count = 0
        for uuid in hosts_by_device:
            try:
                count += self._seal([uuid])
            except (db_exc.DBDuplicateEntry, Conflict) as exc:
                self._add_failed(uuid, str(exc))
        return count

    def _add_failed(self, uuid: str, reason: str) -> None:
        """Skip a device in the rest of the round, and log it."""
        self._failed.add(uuid)
        self._failures.warn(
            "Cannot seal custody records of one or more devices, will retry: %s. After a key was "
            "set, run 'cyborg-dbsync sign-custody'. If this persists, audit the host of the device",
            reason,
            device=uuid,
        )

    def _seal(self, device_uuids: Collection[str]) -> int:
        result = self._uow.run(lambda tx: _seal(tx, device_uuids, self._refused))
        for uuid, fault in result.head_faults.items():
            self._add_failed(
                uuid, f"its row in custody_heads is not one that a conductor wrote: {fault}"
            )
        for record in result.forged:
            self._refused.add(record.id)
            self._refusals.warn(
                "Refused a custody record that no conductor wrote: %s (row %d of custody_records). "
                "Audit the host of the device",
                record.reason,
                record.id,
                device=record.device,
            )
        return result.num_sealed


class _ForgedRecord(NamedTuple):
    id: int
    device: str
    reason: str


class _SealResult(NamedTuple):
    """Number of sealed records, and what no conductor wrote: records, and heads by device uuid."""

    num_sealed: int
    forged: Sequence[_ForgedRecord]
    head_faults: Mapping[str, str]


def _seal(
    tx: sa.Connection, device_uuids: Collection[str], refused: Collection[int] = ()
) -> _SealResult:
    """Seal unsealed records of devices.

    Skip devices whose heads another transaction has locked, and the row ids ``refused``. Heads and
    records that no conductor wrote are not sealed but returned. They raise no error, which would
    cost a transaction for each device: between setting a key and ``sign-custody`` no head is valid.
    """
    locked = {head["device_uuid"]: head for head in chains.lock_heads(tx, device_uuids)}
    faults = {uuid: why for uuid, head in locked.items() if (why := chains.find_fault(tx, head))}
    locked = {uuid: head for uuid, head in locked.items() if uuid not in faults}
    if not locked:
        return _SealResult(num_sealed=0, forged=[], head_faults=faults)
    keys = keys_of(tx)
    # The ends of the chains, which move with each record that is sealed below.
    tips = {uuid: custody.Link(head["sequence"], head["hash"]) for uuid, head in locked.items()}
    oldest = {uuid: head["oldest_at"] for uuid, head in locked.items()}
    links: dict[int, custody.Link] = {}
    forged: list[_ForgedRecord] = []
    for row in chains.unsealed(tx, locked, BATCH_SIZE, refused):
        uuid = row["device_uuid"]
        previous = tips[uuid]
        record = read.to_record(row)
        # Without keys conductors sign nothing: no record can be recognised as forged.
        if keys.secrets and (
            reason := keys.find_fault(custody.serialize_new(record), row["signature"])
        ):
            forged.append(_ForgedRecord(row["id"], uuid, reason))
            continue
        record = replace(record, sequence=previous.sequence + 1)
        link = custody.Link(record.sequence, custody.compute_hash(record, previous.hash))
        tips[uuid] = links[row["id"]] = link
        oldest[uuid] = oldest[uuid] or record.time
    if not links:
        return _SealResult(num_sealed=0, forged=forged, head_faults=faults)
    if (sealed := chains.seal(tx, links)) != len(links):
        raise Conflict(f"{len(links) - sealed} custody records were changed while being sealed")
    changed = [
        (head, tips[uuid])
        for uuid, head in locked.items()
        if tips[uuid].sequence != head["sequence"]
    ]
    chains.advance(tx, changed, {uuid: time for uuid, time in oldest.items() if time is not None})
    return _SealResult(num_sealed=sealed, forged=forged, head_faults=faults)


def _purge(tx: sa.Connection, uuid: str, cutoff: datetime) -> int:
    """Delete the records of a chain older than ``cutoff``; return their number.

    Stop before the first record whose hash is wrong: the audit reports it.
    """
    heads = chains.lock_heads(tx, [uuid])
    if not heads:
        return 0  # its records are being sealed; retry in the next sweep
    head = heads[0]
    if chains.find_fault(tx, head):
        return 0  # evidence of a change; the audit reports it
    base = custody.Link(head["base_sequence"], head["base_hash"])
    oldest_at: datetime | None = None
    # One more than the limit: the first record that stays gives the age of the oldest one.
    for sealed in read.sealed_after(tx, uuid, base.sequence, PURGE_LIMIT + 1):
        is_retained = sealed.record.time >= cutoff
        is_over_limit = sealed.record.sequence > head["base_sequence"] + PURGE_LIMIT
        if is_retained or is_over_limit:
            oldest_at = sealed.record.time
            break
        position = custody.check_records(base, [sealed])
        if isinstance(position, custody.Fault):
            break  # evidence of a change; the audit reports it
        base = position
    return chains.delete_prefix(tx, head, base, oldest_at)


@dataclass(frozen=True, slots=True)
class CustodyAnchors:
    """Writer of the daily notifications; safe to run in several conductors."""

    uow: UnitOfWork
    notices: NotificationBuilder
    now: Callable[[], datetime]

    def sweep(self) -> int:
        """Write a notification of up to MAX_CHAINS chains whose last one is a day old.

        A head that no conductor wrote is left out. Return the number of chains.
        """
        if not self.notices.enabled:
            return 0
        now = self.now()
        return self.uow.run(lambda tx: self._write(tx, now))

    def _write(self, tx: sa.Connection, now: datetime) -> int:
        """Write a notification with the last records of chains; return their number."""
        # Heads are locked, and marked in the same transaction: of several conductors one notifies.
        due = chains.lock_unanchored(tx, now - INTERVAL, MAX_CHAINS)
        if not due:
            return 0
        tips = {
            head["device_uuid"]: custody.Link(head["sequence"], head["hash"])
            for head in due
            if chains.find_fault(tx, head) is None
        }
        row = {"uuid": str(uuid4()), "chains": custody.format_anchors(tips)}
        outbox.add_all(tx, self.notices.build_messages(Event.CUSTODY_ANCHORED, [row]))
        # Heads with a fault too: each sweep would find them again, before the others.
        chains.mark_anchored(tx, [head["id"] for head in due], now)
        return len(tips)
