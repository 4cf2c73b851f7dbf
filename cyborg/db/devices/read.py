# SPDX-License-Identifier: Apache-2.0
"""Read devices: ``DeviceRow`` has the fields of a list."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypedDict, cast

import sqlalchemy as sa

from cyborg.core.attachments.attachment import AttachmentState, describe_target
from cyborg.core.jobs.job import JobKind, JobState
from cyborg.core.jobs.progress import Failure
from cyborg.core.maintenance import SuccessorState, successor_state
from cyborg.db import joins
from cyborg.db.deployables.read import RESTORE_FAILED
from cyborg.db.handles import usage
from cyborg.db.listing import Listing, columns_of
from cyborg.db.rows import DeviceColumns
from cyborg.db.schema import arqs, attachments, deployables, devices, jobs, providers, services
from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import device_contexts as contexts
from cyborg.db.schema import device_maintenances as windows

# Maximum number of errors of one device.
MAX_JOB_ERRORS = 16

# Maximum number of owners of one device that are shown.
MAX_OWNERS = 64


class OwnerRow(TypedDict):
    """An ARQ that owns a handle of the device; ``device_context`` is the uuid of its context.

    ``successor`` is None if the context has no successor, and for other ARQs. ``error`` is why
    there is none, or why the work on it waits.
    """

    arq: str
    state: str
    instance_uuid: str | None
    project_id: str | None
    device_context: str | None
    successor: SuccessorState | None
    error: str | None


class MaintenanceRow(TypedDict):
    """A maintenance window; ``owned`` and ``cleaning`` are numbers of handles.

    ``owners`` are the first MAX_OWNERS owners of handles.
    """

    since: datetime
    until: datetime
    user_id: str | None
    successor: str | None
    owned: int
    cleaning: int
    owners: list[OwnerRow]


class DeviceRow(DeviceColumns):
    """A device.

    ``programming``: any of its deployables is being programmed. ``restore_failed``: of any of them,
    as in ``db.deployables.read``. ``host_down``: the agent of its host is marked down.
    ``placement``: the worst state of its resource providers (error, stale or in_sync), or None if
    it has none. ``maintenance``: its maintenance window and how far it is drained, or None.
    ``use``: its handles by use, the clean ones as free (``db.handles.usage``).

    ``job_errors`` are texts: until when a failing device is closed; the last failed job of each
    kind, until one of the kind succeeds (``core.jobs.progress``); the errors of open jobs that
    apply a layout or an image; and, one for each handle, the errors of open jobs that clean its
    handles, or prepare them again after a reboot.
    """

    hostname: str
    programming: bool
    restore_failed: bool
    host_down: bool
    placement: str | None
    job_errors: list[str]
    maintenance: MaintenanceRow | None
    use: dict[str, int]
    created_at: datetime
    updated_at: datetime | None


_deployables = deployables.alias("device_deployables")
# 2 if one of its providers has an error, 1 if one is stale or not published yet, else 0.
_WORST_PROVIDER = (
    sa.select(
        sa.func.max(
            sa.case(
                (providers.c.error.is_not(None), 2),
                (providers.c.published_revision < providers.c.revision, 1),
                (providers.c.uuid.is_(None), 1),
                else_=0,
            )
        )
    )
    .select_from(_deployables.outerjoin(providers, providers.c.uuid == _deployables.c.rp_uuid))
    .where(_deployables.c.device_id == devices.c.id)
    .correlate(devices)
    .scalar_subquery()
)
# The columns of a maintenance window, which an outer join adds to the device.
_WINDOW: list[sa.ColumnElement[Any]] = [
    windows.c.created_at.label("window_since"),
    windows.c.until.label("window_until"),
    windows.c.user_id.label("window_user_id"),
    windows.c.successor.label("window_successor"),
]
COLUMNS = [
    devices.c.id.label("row_id"),
    devices.c.host.label("hostname"),
    *(column for column in devices.c if column.name not in ("id", "host")),
    sa.exists()
    .where(deployables.c.device_id == devices.c.id, deployables.c.job_id.is_not(None))
    .correlate(devices)
    .label("programming"),
    sa.exists()
    .where(deployables.c.device_id == devices.c.id, RESTORE_FAILED)
    .correlate(devices)
    .label("restore_failed"),
    services.c.down_since.is_not(None).label("host_down"),
    _WORST_PROVIDER.label("placement"),
    *_WINDOW,
]
_INTERNAL = {"row_id", *(column.name for column in _WINDOW)}
_OWNER = ("arq", "state", "instance_uuid", "project_id", "device_context")
_PLACEMENT = {None: None, 0: "in_sync", 1: "stale", 2: "error"}
_FROM = devices.outerjoin(services, joins.AGENT_OF_DEVICE).outerjoin(
    windows, windows.c.device_uuid == devices.c.uuid
)
SORTABLE = {
    "hostname": devices.c.host,
    **columns_of(
        devices,
        *("uuid", "type", "vendor", "model", "address", "health", "status"),
        *("created_at", "updated_at"),
    ),
}


def _complete(connection: sa.Connection, rows: list[dict[str, Any]]) -> list[DeviceRow]:
    """Add what other tables have: three statements, and one for sources of device sets.

    Two more if a device has a window.
    """
    maintenances = _find_windows(connection, rows)
    errors = _job_errors(connection, [row["uuid"] for row in rows])
    uses = usage.of_devices(connection, [row["row_id"] for row in rows])
    # The columns of DEVICES are all columns of the table, and a spread has no types: mypy cannot
    # compare them with DeviceRow. ``test_read_rows.py`` does, in both directions.
    return [
        cast(
            DeviceRow,
            {
                **{name: value for name, value in row.items() if name not in _INTERNAL},
                "maintenance": maintenances.get(row["uuid"]),
                "job_errors": [*_failures(row), *errors.get(row["uuid"], [])][:MAX_JOB_ERRORS],
                "placement": _PLACEMENT[row["placement"]],
                "use": uses[row["row_id"]],
            },
        )
        for row in rows
    ]


DEVICES = Listing(
    row=DeviceRow,
    table=devices,
    source=_FROM,
    columns=COLUMNS,
    sortable=SORTABLE,
    filters={
        "hostname": devices.c.host,
        **columns_of(
            devices,
            *("type", "vendor", "status", "health", "deliverable", "address", "model", "backend"),
        ),
    },
    ids_first=True,
    complete=_complete,
)
find = DEVICES.find
get = DEVICES.get


def _failures(row: Mapping[Any, Any]) -> Iterator[str]:
    """Yield texts about the ended jobs of a device that failed."""
    if row["retry_at"] is not None:
        until = f"{row['retry_at']:%Y-%m-%dT%H:%M:%SZ}"
        yield f"closed until {until}, because {row['failed_prepares']} prepare jobs failed in a row"
    for failure in row["job_failures"] or ():
        yield Failure.from_dict(failure).describe()


def _job_errors(connection: sa.Connection, uuids: Collection[str]) -> dict[str, list[str]]:
    """Return the errors of open jobs on devices and their handles, by the uuid of the device."""
    if not uuids:
        return {}
    j, h = jobs.c, handles.c
    failed = sa.and_(j.state == JobState.OPEN, j.error.is_not(None), devices.c.uuid.in_(uuids))
    to_deployable = deployables.c.id == h.deployable_id
    to_device = devices.c.id == deployables.c.device_id
    cleaned = jobs.join(handles, sa.and_(h.job_id == j.id, h.arq_id.is_(None)))
    restored = jobs.join(arqs, arqs.c.job_id == j.id).join(handles, h.arq_id == arqs.c.id)
    programmed = jobs.join(deployables, deployables.c.job_id == j.id)
    of_handle = (h.id, h.address)
    # With the id 0, jobs of the whole device or of a deployable come first.
    of_device = (sa.literal(0).label("id"), devices.c.address)
    # For each kind of job: its joins to the device, what it works on, and its conditions.
    queries = [
        sa.select(devices.c.uuid, *target, j.kind, j.uuid.label("job"), j.error)
        .select_from(source)
        .where(failed, *conditions)
        for source, target, *conditions in (
            (cleaned.join(deployables, to_deployable).join(devices, to_device), of_handle),
            (restored.join(deployables, to_deployable).join(devices, to_device), of_handle),
            (
                jobs.join(devices, devices.c.uuid == j.subject),
                of_device,
                j.kind == JobKind.PARTITION,
            ),
            (programmed.join(devices, to_device), of_device, j.kind == JobKind.PROGRAM),
        )
    ]
    errors = defaultdict[str, list[str]](list)
    for row in sorted(connection.execute(sa.union_all(*queries)), key=lambda row: row.id):
        handle = f"handle {row.address}, " if row.id else ""
        errors[row.uuid].append(f"{handle}{row.kind} job {row.job}: {row.error}")
    return errors


def _find_windows(
    connection: sa.Connection, rows: Collection[dict[str, Any]]
) -> dict[str, MaintenanceRow]:
    """Return the windows of rows with _WINDOW, by the uuid of the device.

    Execute two statements if there is a window, none otherwise.
    """
    with_window = [row for row in rows if row["window_until"] is not None]
    if not with_window:
        return {}
    uuids = [row["uuid"] for row in with_window]
    owners, counts = _owners(connection, uuids), _count_handles(connection, uuids)
    maintenances: dict[str, MaintenanceRow] = {}
    for row in with_window:
        uuid = row["uuid"]
        uses = counts.get(uuid, _Uses())
        maintenances[uuid] = {
            "since": row["window_since"],
            "until": row["window_until"],
            "user_id": row["window_user_id"],
            "successor": row["window_successor"],
            "owned": uses.owned,
            "cleaning": uses.cleaning,
            "owners": owners[uuid],
        }
    return maintenances


def _owners(connection: sa.Connection, uuids: Collection[str]) -> dict[str, list[OwnerRow]]:
    """Return the first MAX_OWNERS owners of handles of these devices, by the uuid of the device."""
    number = sa.func.row_number().over(partition_by=devices.c.id, order_by=arqs.c.id)
    numbered = (
        sa.select(arqs.c.id, devices.c.uuid.label("device"), number.label("number"))
        .select_from(joins.OWNED_HANDLES)
        .where(devices.c.uuid.in_(sorted(uuids)))
        .subquery()
    )
    # The attachment of the ARQ, and the successor that its context gets for the device. After the
    # exchange the old handle belongs to an ARQ of the successor, before to one of the context.
    attached, successor = attachments.alias("attached"), attachments.alias("successor")
    query = (
        sa.select(
            numbered.c.device,
            arqs.c.uuid.label("arq"),
            arqs.c.state,
            arqs.c.instance_uuid,
            arqs.c.project_id,
            sa.func.coalesce(contexts.c.uuid, attached.c.successor_of).label("device_context"),
            attached.c.uuid.label("attachment"),
            attached.c.hostname.label("attached_host"),
            attached.c.maintained_device.label("attached_device"),
            attached.c.state.label("attached_state"),
            attached.c.step.label("attached_step"),
            attached.c.error.label("attached_error"),
            successor.c.state.label("successor_state"),
            successor.c.step.label("successor_step"),
            successor.c.error.label("successor_error"),
        )
        .select_from(numbered)
        .join(arqs, arqs.c.id == numbered.c.id)
        .outerjoin(contexts, contexts.c.id == arqs.c.context_id)
        .outerjoin(attached, attached.c.id == arqs.c.attachment_id)
        .outerjoin(
            successor,
            sa.and_(
                successor.c.successor_of == contexts.c.uuid,
                successor.c.maintained_device == numbered.c.device,
                successor.c.instance_uuid == arqs.c.instance_uuid,
                successor.c.state.in_([AttachmentState.ATTACHING, AttachmentState.ERROR]),
            ),
        )
        .where(numbered.c.number <= MAX_OWNERS)
        .order_by(arqs.c.id)
    )
    owners = defaultdict[str, list[OwnerRow]](list)
    for row in connection.execute(query):
        state, error = _successor_of(row)
        shown = {name: row._mapping[name] for name in _OWNER}
        owners[row.device].append(cast(OwnerRow, {**shown, "successor": state, "error": error}))
    return owners


def _successor_of(row: Any) -> tuple[SuccessorState | None, str | None]:
    """Return the state of the successor for an owner, and why there is none or why it waits.

    ``row`` is one of the query of ``_owners``.
    """
    # The owner is an ARQ of the successor: the handles have been exchanged.
    if row.attached_device == row.device:
        return successor_state(row.attached_state, row.attached_step), row.attached_error
    if row.attachment is not None:
        # An attachment without a context, or a successor for another device.
        if row.device_context is None or row.attached_device is not None:
            return None, None
        return None, (
            f"device context {row.device_context} is attached to "
            f"{describe_target(row.instance_uuid, row.attached_host)} by attachment "
            f"{row.attachment}, which gets no successor: detach it"
        )
    if row.successor_state is None:
        return None, None
    return successor_state(row.successor_state, row.successor_step), row.successor_error


class _Uses(NamedTuple):
    """Numbers of handles of a device; one to clean is dirty and has no owner."""

    owned: int = 0
    cleaning: int = 0


def _count_handles(connection: sa.Connection, uuids: Collection[str]) -> dict[str, _Uses]:
    """Return the numbers of handles in use, by the uuid of the device."""
    owned, cleaning = handles.c.arq_id.is_not(None), handles.c.needs_cleaning
    query = (
        sa.select(
            devices.c.uuid,
            sa.func.sum(sa.case((owned, 1), else_=0)),
            sa.func.sum(sa.case((sa.and_(sa.not_(owned), cleaning), 1), else_=0)),
        )
        .select_from(joins.HANDLES)
        .where(devices.c.uuid.in_(sorted(uuids)))
        .group_by(devices.c.uuid)
    )
    return {uuid: _Uses(int(count), int(dirty)) for uuid, count, dirty in connection.execute(query)}
