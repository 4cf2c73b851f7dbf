# SPDX-License-Identifier: Apache-2.0
"""Check of the custody chains of a host, in pages, with a limit on the records of one audit.

If the limit ends the check of a chain early, the next audit of the host continues where the check
ended. After a complete check, the next audit checks the chain from the start again.
"""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial

from oslo_config import cfg

from cyborg.core import custody
from cyborg.core.audit.sources import Finding, Kind
from cyborg.db.custody import chains, read
from cyborg.db.custody.read import ChainRow
from cyborg.db.custody.write import keys_of
from cyborg.db.unit_of_work import UnitOfWork

PAGE_SIZE = 500  # records that are read together
MAX_RECORDS = 20_000  # of all chains of a host in one audit: about ten seconds
MAX_CHAINS = 1000  # of a host in one audit
MIN_LATE = timedelta(minutes=5)  # an unsealed record of this age is a finding
LATE_INTERVALS = 10  # or after this many intervals of the sealer, if that is longer


class ChainChecker:
    """Checker of the custody chains of hosts."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        *,
        now: Callable[[], datetime] | None = None,
        max_records: int = MAX_RECORDS,
    ) -> None:
        """``max_records`` limits the records of a host that one audit reads."""
        self._uow = uow
        self._now = now or uow.clock
        self._max_records = max_records
        interval = timedelta(seconds=conf.conductor.custody_seal_interval)
        self._late = max(MIN_LATE, LATE_INTERVALS * interval)

    def check(self, host: str, renew_lease: Callable[[], None]) -> list[Finding]:
        """Return the broken chains, the forged records and the unsealed old records of a host.

        ``renew_lease`` is called before each page; it raises if the audit must end.
        """
        findings: list[Finding] = []
        progress: dict[str, custody.Link] = {}
        records_left = self._max_records
        # Once for the host: the keys belong to the engine and do not change.
        keys = self._uow.run(keys_of)
        for row in self._uow.run(lambda tx: read.chains_of_host(tx, host, MAX_CHAINS)):
            if records_left <= 0:
                break
            device, start = row["device_uuid"], _find_start(row, keys)
            reached, fault = self._check_chain(row, start, records_left, keys, renew_lease)
            first = start or read.base(row)
            # A fault is confirmed with all records of the chain, which are counted for that.
            last = reached.sequence if fault is None else row["sequence"]
            # At least 1: thousands of empty chains must not make an audit endless.
            records_left -= max(1, last - first.sequence)
            # Bind and release go on during the audit, so a fault counts only if a second look has
            # it.
            if fault is not None and (
                confirmed := self._confirm(device, fault, start, keys, renew_lease)
            ):
                findings.append(_broken(host, device, confirmed))
            if fault is not None or reached.sequence >= row["sequence"]:
                # The next audit begins at the start: after a fault to report it until it is
                # repaired, otherwise to find records that are changed after their check.
                reached = read.base(row)
            progress[device] = reached
        if progress:
            now = self._now()
            self._uow.run(lambda tx: chains.save_progress(tx, progress, now))
        renew_lease()
        return [
            *findings,
            *self._missing_heads(host),
            *self._forged_records(host, keys),
            *self._late_records(host),
        ]

    def _check_chain(
        self,
        row: ChainRow,
        start: custody.Link | None,
        limit: int,
        keys: custody.Keys,
        renew_lease: Callable[[], None],
    ) -> custody.Verification:
        """Check up to about ``limit`` records; return the last checked record and any fault.

        Records that were sealed or deleted after ``row`` was read may look like a fault.
        """
        head = read.to_head(row)
        records = self._read_records(row["device_uuid"], start, limit, renew_lease)
        # Without a second query for the head: ``_confirm`` has one, for a chain with a fault.
        log = custody.Log(before=head, records=records, after=head)
        is_complete = row["sequence"] - (start or head.base).sequence <= limit
        return custody.verify(log, keys, start=start, complete=is_complete)

    def _confirm(
        self,
        device: str,
        fault: custody.Fault,
        start: custody.Link | None,
        keys: custody.Keys,
        renew_lease: Callable[[], None],
    ) -> custody.Fault | None:
        """Check a chain again, with its head as it is after its records; return any fault."""

        def read_head() -> custody.Head | None:
            row = self._uow.run(lambda tx: read.chain(tx, device))
            return None if row is None else read.to_head(row)

        # Read around the records: a chain that grew, or was shortened by retention, is between the
        # two.
        before = read_head()
        records = list(self._read_records(device, start, self._max_records, renew_lease))
        after = read_head()
        if before is None and after is None:
            # Retention deletes the head after the last record; SQL may delete the head alone.
            return fault if records else None
        is_complete = len(records) < self._max_records
        log = custody.Log(before=before, records=records, after=after)
        return custody.verify(log, keys, start=start, complete=is_complete).fault

    def _read_records(
        self, device: str, start: custody.Link | None, limit: int, renew_lease: Callable[[], None]
    ) -> Iterator[custody.SealedRecord]:
        """Yield the sealed records of a chain after ``start`` in pages, at least ``limit``."""
        after, count = None if start is None else start.sequence, 0
        while count < limit:
            renew_lease()
            page = self._uow.run(
                partial(read.sealed_after, device_uuid=device, sequence=after, limit=PAGE_SIZE)
            )
            yield from page
            if len(page) < PAGE_SIZE:
                return
            after, count = page[-1].record.sequence, count + len(page)

    def _missing_heads(self, host: str) -> list[Finding]:
        """Return findings for devices with sealed records but no head, or with no record at all."""
        headless = self._uow.run(lambda tx: read.devices_without_head(tx, host, MAX_CHAINS))
        empty = self._uow.run(lambda tx: read.devices_without_log(tx, host, MAX_CHAINS))
        return [
            _broken(host, uuid, fault)
            for uuid in (*headless, *empty)
            if (fault := self._find_fault_without_head(uuid))
        ]

    def _find_fault_without_head(self, device: str) -> custody.Fault | None:
        # One record is enough: a chain without a head is a fault whatever its records are.
        records = self._uow.run(lambda tx: read.sealed_after(tx, device, sequence=None, limit=1))
        log = custody.Log(before=None, records=records, after=None)
        return custody.verify(log, None).fault

    def _forged_records(self, host: str, keys: custody.Keys) -> list[Finding]:
        # Without keys no record has a signature: nothing distinguishes a forged one.
        if not keys.secrets:
            return []
        records = self._uow.run(lambda tx: read.new_records(tx, host, MAX_CHAINS))
        return [
            _broken(host, new.record.device, fault)
            for new in records
            if (fault := custody.find_forged([new], keys, 0))
        ]

    def _late_records(self, host: str) -> list[Finding]:
        cutoff = self._now() - self._late
        return [
            Finding(
                host,
                Kind.CUSTODY_UNSEALED,
                f"device {row['device_uuid']}",
                f"custody log: {row['count']} records are not in "
                f"the chain, the oldest since {row['oldest_at'].isoformat()} UTC",
            )
            for row in self._uow.run(lambda tx: read.late(tx, host, cutoff))
        ]


def _broken(host: str, device: str, fault: custody.Fault) -> Finding:
    explanation = f"custody log: {fault.explanation}"
    return Finding(host, Kind.CUSTODY_BROKEN, f"device {device}", explanation)


def _find_start(row: ChainRow, keys: custody.Keys) -> custody.Link | None:
    """Return the record after which the check of a chain begins, None for its start.

    After an incomplete check it is the last checked record.
    """
    reached = custody.Link(row["checked_sequence"], row["checked_hash"])
    if not row["base_sequence"] < reached.sequence < row["sequence"]:
        return None
    data = custody.serialize_progress(row["device_uuid"], reached)
    return reached if keys.find_fault(data, row["checked_signature"]) is None else None
