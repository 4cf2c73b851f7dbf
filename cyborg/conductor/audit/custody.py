# SPDX-License-Identifier: Apache-2.0
"""Check of the custody chains of a host, in pages, with a limit on the records of one audit.

If the limit ends the check of a chain early, the next audit of the host continues where the check
ended. After a complete check, the next audit checks the chain from the start again.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from oslo_config import cfg

from cyborg.core.audit.model import Finding, Kind
from cyborg.core.custody.chain import Fault, Link, SealedRecord, check_records, check_tip
from cyborg.db.read import custody as read
from cyborg.db.read.custody import ChainRow
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.db.write.custody import chains

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
        """Return the broken chains and the unsealed old records of a host.

        ``renew_lease`` is called before each page; it raises if the audit must end.
        """
        findings: list[Finding] = []
        progress: dict[str, Link] = {}
        left = self._max_records
        for row in self._uow.run(lambda tx: read.chains_of_host(tx, host, MAX_CHAINS)):
            if left <= 0:
                break
            reached, fault = self._check_chain(row, left, renew_lease)
            left -= max(1, reached.sequence - _start(row).sequence)
            if fault is not None and self._is_confirmed(row, fault, renew_lease):
                explanation = f"custody log: {fault.explanation}"
                findings.append(
                    Finding(host, Kind.CUSTODY_BROKEN, f"device {row['device_uuid']}", explanation)
                )
            if fault is not None or reached.sequence >= row["sequence"]:
                # The next audit begins at the start: after a fault to report it until it is
                # repaired, otherwise to find records that are changed after their check.
                reached = read.base(row)
            progress[row["device_uuid"]] = reached
        if progress:
            now = self._now()
            self._uow.run(lambda tx: chains.save_progress(tx, progress, now))
        renew_lease()
        return [*findings, *self._missing_heads(host), *self._late_records(host)]

    def _check_chain(
        self, row: ChainRow, limit: int, renew_lease: Callable[[], None]
    ) -> tuple[Link, Fault | None]:
        """Check up to about ``limit`` records; return the last checked record and any fault."""
        position = start = _start(row)
        while position.sequence - start.sequence < limit:
            renew_lease()
            page = self._uow.run(
                lambda tx, after=position.sequence: read.sealed_after(  # type: ignore[misc]
                    tx, row["device_uuid"], after, PAGE_SIZE
                )
            )
            # Records that were sealed after the head was read are left to the next audit.
            known = [sealed for sealed in page if sealed.record.sequence <= row["sequence"]]
            result = check_records(position, known)
            if isinstance(result, Fault):
                return position, result
            position = result
            if len(page) < PAGE_SIZE or len(known) < len(page):
                fault = check_tip(position, read.tip(row))
                return position, fault or self._check_end(row, page[len(known) :])
        # The limit is reached, perhaps with the last record.
        at_end = position.sequence >= row["sequence"]
        return position, check_tip(position, read.tip(row)) if at_end else None

    def _check_end(self, row: ChainRow, later: Sequence[SealedRecord]) -> Fault | None:
        """Return a fault if the chain has records after the last one in its head, else None.

        ``later`` are the records that were read after this last one. They are no fault if they were
        sealed after ``row`` was read.
        """
        if not later:
            return None
        current = self._uow.run(lambda tx: read.chain(tx, row["device_uuid"]))
        first = later[0]
        if current is None or current["sequence"] >= first.record.sequence:
            return None
        return check_tip(Link(first.record.sequence, first.hash), read.tip(current))

    def _is_confirmed(self, row: ChainRow, fault: Fault, renew_lease: Callable[[], None]) -> bool:
        """Check a chain again; return whether the fault is found at the same record again.

        If it is not found again, there is no fault: the first records of the chain were deleted, at
        the end of their retention, while the chain was read.
        """
        current = self._uow.run(lambda tx: read.chain(tx, row["device_uuid"]))
        if current is None:
            # Retention deletes the head after the last record; SQL may delete the head alone.
            return bool(self._uow.run(lambda tx: read.sealed_after(tx, row["device_uuid"], 0, 1)))
        same_start: ChainRow = {
            **current,
            "checked_sequence": row["checked_sequence"],
            "checked_hash": row["checked_hash"],
        }
        again = self._check_chain(same_start, self._max_records, renew_lease)[1]
        # The text may differ, because new records may have been sealed.
        return again is not None and again.sequence == fault.sequence

    def _missing_heads(self, host: str) -> list[Finding]:
        """Return findings for devices with sealed records but no head, or with no record at all."""
        headless = self._uow.run(lambda tx: read.devices_without_head(tx, host, MAX_CHAINS))
        empty = self._uow.run(lambda tx: read.devices_without_log(tx, host, MAX_CHAINS))
        explanations = [
            (headless, "its records are in a chain, but its row in custody_heads is missing"),
            (empty, "all its records and its row in custody_heads are missing"),
        ]
        return [
            Finding(host, Kind.CUSTODY_BROKEN, f"device {uuid}", f"custody log: {explanation}")
            for uuids, explanation in explanations
            for uuid in uuids
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


def _start(row: ChainRow) -> Link:
    """Return the record after which the check of a chain begins.

    After an incomplete check it is the last checked record, else the base of the chain.
    """
    if row["base_sequence"] < row["checked_sequence"] < row["sequence"]:
        return Link(row["checked_sequence"], row["checked_hash"])
    return read.base(row)
