# SPDX-License-Identifier: Apache-2.0
"""Rows have the keys and the types that their TypedDict declares: mypy relies on these classes."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, is_typeddict

import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core.drivers.rollout import StepKey
from cyborg.core.hosts import AGENT
from cyborg.core.orphans.orphans import BoundArqRow
from cyborg.db import schema
from cyborg.db.attachments import handles as guest_devices
from cyborg.db.attachments import write as attachments
from cyborg.db.audits import write as audits
from cyborg.db.backends import desired as desired_backends
from cyborg.db.binding import claims as handle_claims
from cyborg.db.binding import write as arqs
from cyborg.db.contexts import write as device_contexts
from cyborg.db.custody import chains
from cyborg.db.custody import write as records
from cyborg.db.deployables import programming
from cyborg.db.deployables import write as deployables
from cyborg.db.devices import write as devices
from cyborg.db.discoveries import write as discoveries
from cyborg.db.drivers import rollouts
from cyborg.db.drivers import write as drivers
from cyborg.db.handles import write as attach_handles
from cyborg.db.jobs import write as jobs
from cyborg.db.jobs.read import StepRow
from cyborg.db.orphans import write as orphans
from cyborg.db.outbox import write as outbox
from cyborg.db.profiles import write as device_profiles
from cyborg.db.providers import write as providers
from cyborg.db.rows import DeviceRow, StoredRow
from cyborg.db.services import write as services
from cyborg.tests.fixtures.databases.row_types import DEVICE, INSTANCE, assert_rows_fit, fill
from cyborg.tests.unit.db.test_read_rows import FINDERS as READ_FINDERS

NOW = timeutils.utcnow()
LATER = NOW + timedelta(days=1)
HOST = "compute-1"
LEASE: Mapping[str, Any] = {"owner": "o", "now": LATER, "until": LATER + timedelta(days=1)}


def _uuid(tx: sa.Connection, table: sa.Table, column: str = "uuid") -> str:
    """Return the uuid of the first row of a table."""
    return str(tx.scalar(sa.select(table.c[column]).order_by(table.c.id)))


def _heartbeat(tx: sa.Connection) -> services.DaemonRow:
    fields: services.HeartbeatFields = {"status": "READY", "versions": {}}
    epoch = _uuid(tx, schema.services)
    times: services.HeartbeatTimes = {"last_seen_at": NOW, "late_at": LATER, "down_at": LATER}
    return services.upsert_heartbeat(tx, AGENT, HOST, epoch, times, fields)


def _release(tx: sa.Connection) -> list[handle_claims.ReleasedHandleRow]:
    tx.execute(sa.update(schema.attach_handles).values(needs_cleaning=True))
    return handle_claims.release(tx, [1], NOW)


def _find_lost(tx: sa.Connection) -> list[DeviceRow]:
    tx.execute(sa.update(schema.attach_handles).values(needs_cleaning=False, arq_id=None))
    tx.execute(sa.update(schema.devices).values(boot_check="lost", desired_layout="2"))
    return programming.find_lost(tx, 5)


def _find_successor(tx: sa.Connection) -> device_contexts.SuccessorWorkRow | None:
    tx.execute(sa.update(schema.device_profiles).values(context_id=None))
    profile = tx.scalar(sa.select(schema.arqs.c.profile_id).where(schema.arqs.c.id == 1))
    hidden = schema.device_profiles.c.id == profile
    context = tx.execute(sa.select(schema.device_contexts.c.id)).scalar_one()
    tx.execute(sa.update(schema.device_profiles).where(hidden).values(context_id=context))
    tx.execute(sa.update(schema.arqs).values(context_id=None))
    return device_contexts.find_successor(tx, context)


def _find_step_errors(tx: sa.Connection) -> list[StepRow]:
    tx.execute(sa.update(schema.job_steps).values(error="no such card"))
    return rollouts.find_errors(tx, 1, 5)


def _lease_verified(tx: sa.Connection) -> Any:
    state = providers.PlacementState(3, None)
    for row in providers.lease(tx, limit=5, **LEASE):
        published = {row["uuid"]: providers.Published(row["revision"], state)}
        providers.record_published(tx, LEASE["owner"], published, NOW)
    return providers.lease_for_verification(tx, before=LATER, limit=5, **LEASE)


def _daemons(tx: sa.Connection) -> list[Any]:
    return [
        _heartbeat(tx),
        services.find(tx, _uuid(tx, schema.services)),
        services.find_agent(tx, HOST),
        services.previous_incarnation(tx, AGENT, HOST, "other"),
        *services.lock_of_host(tx, HOST),
        *services.mark_down(tx, LATER, timedelta(days=9999), 5),
        *services.purge(tx, LATER, 5),
    ]


def _devices(tx: sa.Connection) -> list[DeviceRow]:
    addresses = [_uuid(tx, schema.devices, "address")]
    return [
        *devices.of_host(tx, HOST),
        *devices.lock_history(tx, HOST, addresses),
        *_find_lost(tx),
    ]


def _arqs(tx: sa.Connection) -> list[arqs.ArqRow]:
    return [
        *arqs.lock(tx, [_uuid(tx, schema.arqs)]),
        *arqs.other_arqs_of_instance(tx, INSTANCE, []),
        *device_profiles.users(tx, ["fpga"], 5),
        *orphans.failed_binds(tx, LATER, 5),
    ]


def _agents(tx: sa.Connection) -> list[Any]:
    agent = desired_backends.lock(tx, HOST, _uuid(tx, schema.services, "epoch"))
    return [agent, *drivers.agents(tx)]


def _profiles(tx: sa.Connection) -> list[Any]:
    found = [device_profiles.find_visible(tx, "fpga"), *device_profiles.find(tx, ["fpga"])]
    # Only by_name counts.
    assert all(row is not None and "used" not in row for row in found)
    return [{**row, "used": 0} for row in found if row] + [device_profiles.by_name(tx, "fpga")]


FINDERS: Mapping[type, Callable[[sa.Connection], Any]] = {
    arqs.ArqRow: _arqs,
    arqs.ArqToBindRow: lambda tx: arqs.lock_to_bind(tx, [_uuid(tx, schema.arqs)], INSTANCE),
    jobs.BoundHandleRow: lambda tx: jobs.lock_bound_without_job(tx, HOST),
    attach_handles.HandleRow: lambda tx: attach_handles.of_host(tx, HOST),
    attach_handles.OwnedHandleRow: lambda tx: attach_handles.owned(tx, HOST),
    attach_handles.OwnerRow: lambda tx: attach_handles.owners(tx, [1, 2]),
    attachments.AttachmentRow: lambda tx: attachments.lock(tx, instance=INSTANCE),
    guest_devices.GuestDeviceRow: lambda tx: guest_devices.of_attachment(tx, 1),
    audits.LeasedAuditRow: lambda tx: audits.lease(tx, **LEASE),
    chains.HeadRow: lambda tx: chains.lock_heads(tx, [DEVICE]),
    chains.UnsealedRow: lambda tx: chains.unsealed(tx, [DEVICE], 5),
    records.HandleRow: lambda tx: records.handles_of_arqs(tx, [1]),
    records.DeviceHostRow: lambda tx: records.device_of(tx, _uuid(tx, schema.deployables)),
    deployables.DeployableRow: lambda tx: deployables.of_host(tx, HOST),
    deployables.DesiredProviderRow: lambda tx: deployables.desired_state(
        tx, [_uuid(tx, schema.providers)]
    ),
    desired_backends.AgentRow: _agents,
    device_contexts.ContextRow: lambda tx: device_contexts.lock(tx, [1]),
    device_contexts.ProjectUsageRow: lambda tx: [device_contexts.project_usage(tx, "p", 5, 5)],
    device_contexts.SuccessorWorkRow: lambda tx: [_find_successor(tx)],
    device_contexts.ArqStateRow: lambda tx: device_contexts.arq_states(tx, [1]),
    device_profiles.ProfileRow: lambda tx: device_profiles.by_name(tx, "fpga"),
    DeviceRow: _devices,
    devices.WindowRow: lambda tx: [devices.find_window(tx, DEVICE)],
    discoveries.TargetRow: lambda tx: discoveries.targets(tx, HOST, None),
    drivers.InstallationRow: lambda tx: list(drivers.installations(tx, "fake").values()),
    handle_claims.ClaimedProviderRow: lambda tx: handle_claims.providers(
        tx, [_uuid(tx, schema.providers)]
    ),
    handle_claims.FreeHandleRow: lambda tx: handle_claims.lock_unclaimed(tx, 1, 5, wait=True),
    handle_claims.HandleStateRow: lambda tx: handle_claims.all_handles(tx, [1]),
    handle_claims.ReleasedHandleRow: _release,
    handle_claims.DirtyHandleRow: lambda tx: jobs.unassigned_dirty(tx, 5),
    BoundArqRow: lambda tx: orphans.next_bound(tx, "", 0, 5),
    jobs.JobRow: lambda tx: [
        *jobs.lease(tx, limit=5, **LEASE),
        *rollouts.lease(tx, limit=5, **LEASE),
    ],
    device_profiles.ProfileRow: _profiles,
    services.DaemonRow: _daemons,
    outbox.LeasedMessageRow: lambda tx: outbox.lease(tx, "k", limit=5, **LEASE),
    programming.OpenPartitionRow: lambda tx: programming.open_partitions(tx, HOST),
    programming.PartitionRow: lambda tx: programming.lock_device(tx, _uuid(tx, schema.devices)),
    programming.ProgramRow: lambda tx: programming.lock(tx, _uuid(tx, schema.deployables)),
    providers.LeasedProviderRow: lambda tx: providers.lease(tx, limit=5, **LEASE),
    providers.VerifiedProviderRow: _lease_verified,
    rollouts.StepRow: lambda tx: rollouts.steps_of_job(tx, 1),
    rollouts.StepCountRow: lambda tx: rollouts.count_steps(tx, 1),
    StepRow: _find_step_errors,
    rollouts.PendingStepRow: lambda tx: rollouts.pending_steps(tx, HOST, [1]),
    rollouts.HolderRow: lambda tx: rollouts.holders(tx, [StepKey(HOST, "fake")], 5),
    services.UpCountRow: lambda tx: [services.count_up(tx, NOW)],
}


# The keys that only lists have.
OMITTED: Mapping[type, set[str]] = {
    device_contexts.ContextRow: {"successor"},
}


def test_every_row_type_of_a_result_is_checked() -> None:
    declared = {
        kind
        for module in (value for value in globals().values() if isinstance(value, ModuleType))
        for name, kind in vars(module).items()
        if is_typeddict(kind) and name.endswith("Row") and not name.startswith(("_", "New"))
    }
    # A stored row derives from that of a list, which has a test of its own.
    assert declared - {StoredRow, *READ_FINDERS} == FINDERS.keys() - READ_FINDERS.keys()


def test_rows_have_declared_keys_and_types(engine: sa.Engine) -> None:
    fill(engine)
    for kind, find in FINDERS.items():
        with engine.connect() as connection:  # rolled back
            found = find(connection)
            rows = found if isinstance(found, Sequence) else [found]
            assert_rows_fit(rows, kind, OMITTED.get(kind, ()))
