# SPDX-License-Identifier: Apache-2.0
"""Cancel jobs that cannot, or need not, succeed, within the transaction of the caller.

A device that drains is uncordoned. A job that is retried after a reboot gets the argument
CANCELLED: the agent may work on it, so it ends with the answer of the agent.

A release job is retried until it succeeds. When its backend was force-uninstalled it never
succeeds, and its dirty handles would keep their device forever. So the handles are removed and
tombstones are kept. Handles that need no cleaning are removed by the next report of their host; a
host that is down sends none.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.conductor.inventory.report_handler import ReportHandler, ReportResult
from cyborg.conductor.jobs import programming
from cyborg.conductor.jobs.completion import JobResult
from cyborg.core.errors import WrongState
from cyborg.core.inventory.device import Device
from cyborg.core.inventory.report import BackendStatus, Report
from cyborg.core.jobs import job as rules
from cyborg.db.backends import desired as desired_backends
from cyborg.db.drivers import rollouts
from cyborg.db.jobs import write as jobs

BY_OPERATOR = "cancelled by an operator"


def cancel(tx: sa.Connection, uuid: str, now: datetime) -> bool:
    """Cancel a job that changes a device; return False for another kind of job.

    If the device drains, uncordon it. A job that is retried after a reboot is not retried again: it
    ends when the work in progress ends. Raise WrongState for other jobs.
    """
    job = jobs.get(tx, uuid)
    if job is None or job["kind"] not in rules.INVENTORY_KINDS:
        return False
    # The agent before the job, as in every transaction; then the job again, which may have ended.
    desired_backends.lock_host(tx, job["host"])
    job = jobs.lock(tx, uuid)
    if (
        job is None
        or job["state"] != rules.JobState.OPEN
        or {rules.DRAINS, rules.AFTER_REBOOT}.isdisjoint(job["arguments"])
    ):
        raise WrongState(
            f"job {uuid} cannot be cancelled: expected a job whose device drains, or a job that "
            "is retried after a reboot",
            job=uuid,
        )
    if rules.DRAINS in job["arguments"]:
        programming.end_drain(tx, job, rules.JobState.CANCELLED, BY_OPERATOR, now)
    else:
        _give_up(tx, job, now)
    return True


def give_up_impossible(tx: sa.Connection, report: Report, now: datetime) -> int:
    """Cancel the failed jobs after a reboot that a host reports as impossible; return their number.

    A job is impossible if the device or the deployable is missing, belongs to another backend, or
    does not have the layout. The next report after the end of the job removes or drains the device.
    Jobs with fewer attempts than GIVE_UP_ATTEMPTS are left out: a device can appear, and get its
    kernel driver, some minutes after its host has booted. The caller has locked the agent of the
    host.
    """
    unready_backends = {b.name for b in report.backends if b.status is not BackendStatus.READY}
    reported = {device.address: device for device in report.devices}
    count = 0
    for job in jobs.failed_changes(tx, report.host):
        if job["attempts"] < rules.GIVE_UP_ATTEMPTS:
            continue
        # A partition or program job has one item.
        (item,) = job["arguments"]["items"]
        device = reported.get(item["device"])
        if device is None:
            # A backend that is not ready may have the device although the report lacks it.
            # Otherwise the device is gone, and so is a backend that the report lacks.
            impossible = item["backend"] not in unready_backends
        else:
            impossible = device.backend != item["backend"] or _lacks(device, job["arguments"], item)
        if impossible:
            _give_up(tx, job, now)
            count += 1
    return count


def _lacks(device: Device, arguments: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    """Return whether a device does not have the layouts and deployables that a job needs."""
    # A device whose kernel driver is not bound yet has neither.
    names = {known.name for known in device.layouts}
    parts = {part.address for part in device.deployables}
    layout, part = arguments.get("layout"), item.get("deployable")
    lacks_layout = bool(names) and layout is not None and layout not in names
    lacks_part = bool(parts) and bool(part) and part not in parts
    return lacks_layout or lacks_part


def _give_up(tx: sa.Connection, job: jobs.JobRow, now: datetime) -> None:
    rollouts.update_arguments(tx, job["id"], {**job["arguments"], rules.CANCELLED: True}, now)


def abandon_cleaning(
    tx: sa.Connection,
    row: jobs.JobRow,
    error: str | None,
    now: datetime,
    handler: ReportHandler,
) -> JobResult:
    """Abandon the handles of a failed release job whose backend was removed; then end the job.

    The next sweep creates another job for the remaining handles. If no handle was abandoned, and
    the job still has handles, it stays open and the result is empty.
    """
    host, backends = row["host"], {item["backend"] for item in row["arguments"]["items"]}
    if not desired_backends.removed_backends(tx, host, backends):
        return JobResult()
    desired_backends.lock_host(tx, host)
    # Compared again under the lock: the backend may have been installed since.
    outcomes = [
        handler.remove_backend(tx, host, backend, now)
        for backend in sorted(desired_backends.removed_backends(tx, host, backends))
    ]
    # The handles of a host that is down were abandoned with the uninstallation: then the job has
    # none, and ends. ``own`` are the providers of the handles that the job still has.
    if not any(outcome.abandoned for outcome in outcomes) and jobs.providers_of(tx, row["id"]).own:
        return JobResult()
    reason = f"abandoned, its backend is uninstalled: {error}"
    ended = jobs.end(tx, [row["id"]], rules.JobState.FAILED, reason)
    stale = sum(outcome.stale_providers for outcome in outcomes)
    remarks = [remark for outcome in outcomes for remark in outcome.remarks]
    return JobResult(completed=ended, providers=stale, remarks=remarks)


def remove_abandoned_backend(
    tx: sa.Connection, host: str, backend: str, now: datetime, handler: ReportHandler
) -> ReportResult | None:
    """Remove the unbound inventory of a force-uninstalled backend from a host that is down.

    Bound devices stay. Return None if the backend is desired again.
    """
    desired_backends.lock_host(tx, host)
    if not desired_backends.removed_backends(tx, host, {backend}):
        return None
    return handler.remove_backend(tx, host, backend, now)
