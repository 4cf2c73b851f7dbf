# SPDX-License-Identifier: Apache-2.0
"""Rows have the keys and the types that their TypedDict declares: mypy relies on these classes."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.db import schema
from cyborg.db.attachments import read as attachments
from cyborg.db.audits import read as audits
from cyborg.db.backends import read as backends
from cyborg.db.binding import accelerators, project_units
from cyborg.db.binding import read as arqs
from cyborg.db.contexts import read as device_contexts
from cyborg.db.custody import read as custody
from cyborg.db.deployables import attributes
from cyborg.db.deployables import read as deployables
from cyborg.db.devices import hardware
from cyborg.db.devices import read as devices
from cyborg.db.discoveries import read as discoveries
from cyborg.db.drivers import entries as hosts
from cyborg.db.drivers import read as summaries
from cyborg.db.jobs import read as jobs
from cyborg.db.outbox import read as outbox
from cyborg.db.profiles import read as device_profiles
from cyborg.db.services import read as services
from cyborg.db.totals import read as self_heal
from cyborg.db.totals import read as totals
from cyborg.tests.fixtures.databases.row_types import DEVICE, assert_rows_fit, fill

Find = Callable[[sa.Connection], Sequence[Mapping[str, Any]]]


def _one(get: Callable[[sa.Connection, str], Mapping[str, Any] | None], table: sa.Table) -> Find:
    """Return a function that gets the first object of a table."""

    def find(connection: sa.Connection) -> list[Mapping[str, Any]]:
        uuid = connection.scalar(sa.select(table.c.uuid).order_by(table.c.id))
        row = get(connection, str(uuid))
        assert row is not None
        return [row]

    return find


def _driver(connection: sa.Connection) -> list[summaries.DriverDetailsRow]:
    row = summaries.get(connection, "fake", now=timeutils.utcnow())
    assert row is not None
    return [row]


def _hosts(connection: sa.Connection) -> list[hosts.HostRow]:
    return hosts.find_hosts(connection, "fake", now=timeutils.utcnow())


def _discovery(connection: sa.Connection) -> str:
    return str(discoveries.find(connection)[0]["uuid"])


def _steps(connection: sa.Connection) -> list[jobs.StepRow]:
    uuid = jobs.find(connection)[0]["uuid"]
    return jobs.find_steps(connection, uuid, jobs.find_hosts(connection, uuid))


def _totals(connection: sa.Connection) -> totals.Totals:
    return totals.read(connection, now=timeutils.utcnow())


def _usage(connection: sa.Connection) -> list[project_units.UsageRow]:
    project = connection.scalar(sa.select(schema.arqs.c.project_id))
    return project_units.usage(connection, str(project))


FINDERS: Mapping[type, Find] = {
    accelerators.AcceleratorRow: accelerators.find,
    arqs.ArqRow: arqs.find,
    attachments.AttachmentRow: attachments.find,
    attributes.AttributeRow: attributes.find,
    audits.AuditRow: _one(audits.get, schema.audits),
    backends.AgentBackendRow: backends.find,
    backends.BackendRow: lambda connection: services.find(
        connection, functions=True, host="compute-1"
    )[0]["backends"],
    backends.FunctionRow: lambda connection: backends.find(connection)[0]["functions"],
    custody.RecordRow: lambda connection: custody.find(connection, device_uuid=DEVICE),
    custody.ChainRow: lambda connection: custody.chains_of_host(connection, "compute-1", 5),
    custody.LateRow: lambda connection: custody.late(
        connection, "compute-1", timeutils.utcnow() + timedelta(days=1)
    ),
    deployables.DeployableRow: deployables.find,
    device_contexts.ContextRow: _one(device_contexts.get, schema.device_contexts),
    device_profiles.DeviceProfileRow: device_profiles.find,
    devices.DeviceRow: devices.find,
    discoveries.BackendRow: lambda connection: discoveries.find_backends(
        connection,
        _discovery(connection),
        discoveries.find_hosts(connection, _discovery(connection)),
    ),
    discoveries.SummaryRow: discoveries.find,
    summaries.DriverRow: lambda connection: summaries.find(connection, now=timeutils.utcnow()),
    summaries.DriverDetailsRow: _driver,
    hosts.HostRow: _hosts,
    hosts.HostDriverRow: lambda connection: hosts.find_entries(
        connection, "fake", _hosts(connection), now=timeutils.utcnow()
    ),
    hosts.EffectiveOptionsRow: lambda connection: hosts.find_effective_options(
        connection, "fake", _hosts(connection)
    ),
    hardware.HardwareRow: hardware.find,
    jobs.JobRow: jobs.find,
    jobs.StepRow: _steps,
    outbox.MessageRow: outbox.find,
    project_units.UsageRow: _usage,
    self_heal.SelfHealRow: self_heal.find_self_heal,
    services.ServiceRow: services.find,
    totals.UnhealthyRow: lambda connection: _totals(connection).unhealthy,
    totals.OutboxCountRow: lambda connection: _totals(connection).outbox,
    totals.JobCountRow: lambda connection: _totals(connection).jobs,
}


# The keys that only the conductor reads.
OMITTED: Mapping[type, set[str]] = {device_contexts.ContextRow: {"id", "lease_expires_at"}}


def test_rows_have_declared_keys_and_types(engine: sa.Engine) -> None:
    fill(engine)
    with engine.connect() as connection:
        for kind, find in FINDERS.items():
            assert_rows_fit(find(connection), kind, OMITTED.get(kind, ()))
