# SPDX-License-Identifier: Apache-2.0
"""Rows have the keys and the types that their TypedDict declares: mypy relies on these classes."""

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.db import schema
from cyborg.db.read import (
    accelerators,
    arqs,
    attributes,
    audits,
    deployables,
    device_profiles,
    devices,
    discoveries,
    jobs,
    outbox,
    providers,
    self_heal,
)
from cyborg.tests.fixtures.databases import rows

Find = Callable[[sa.Connection], Sequence[Mapping[str, Any]]]


def _one(get: Callable[[sa.Connection, str], Mapping[str, Any] | None], table: sa.Table) -> Find:
    """Return a function that gets the first object of a table."""

    def find(connection: sa.Connection) -> list[Mapping[str, Any]]:
        uuid = connection.scalar(sa.select(table.c.uuid).order_by(table.c.id))
        row = get(connection, str(uuid))
        assert row is not None
        return [row]

    return find


FINDERS: Mapping[type, Find] = {
    accelerators.AcceleratorRow: accelerators.find,
    arqs.ArqRow: arqs.find,
    attributes.AttributeRow: attributes.find,
    audits.AuditRow: audits.find,
    audits.AuditDetailsRow: _one(audits.get, schema.audits),
    deployables.DeployableRow: deployables.find,
    device_profiles.DeviceProfileRow: device_profiles.find,
    devices.DeviceRow: devices.find,
    discoveries.BackendRow: lambda connection: _one(discoveries.get, schema.discoveries)(
        connection
    )[0]["backends"],
    discoveries.SummaryRow: discoveries.find_summaries,
    discoveries.DiscoveryRow: _one(discoveries.get, schema.discoveries),
    jobs.JobRow: jobs.find,
    jobs.JobDetailsRow: _one(jobs.get, schema.jobs),
    jobs.StepRow: lambda connection: _one(jobs.get, schema.jobs)(connection)[0]["steps"],
    outbox.MessageRow: outbox.find,
    providers.ProviderRow: providers.find,
    self_heal.SelfHealRow: self_heal.find,
}


@pytest.fixture
def filled_engine(engine: sa.Engine) -> sa.Engine:
    """Return a database with at least one row of each kind, some with and some without an owner."""
    card, profile = rows.insert_card(engine, handles=2), rows.insert_profile(engine)
    arq = rows.insert_arq(engine, profile, label_tags=["a"], label_name="n")
    rows.insert_arq(engine, profile)
    (arq_row,) = rows.read(engine, schema.arqs, uuid=arq)
    handle = rows.read(engine, schema.attach_handles)[0]
    rows.update(engine, schema.attach_handles, handle["id"], arq_id=arq_row["id"])
    attribute = {"deployable_id": card.deployable_id, "key": "k", "value": "v"}
    rows.insert(engine, schema.attributes, **attribute)
    rows.insert(engine, schema.audits, state="DONE", sources=["nova"], findings=[{"kind": "k"}])
    for host in ("a", "b"):
        values = {"uuid": str(uuid4()), "host": host, "backend": "f", "state": "DONE"}
        rows.insert(engine, schema.discoveries, **values)
    job = rows.insert(engine, schema.jobs, kind="k", host="", subject="s", arguments={})
    rows.insert(engine, schema.job_steps, job_id=job, host="h", backend="b", state="done")
    rows.insert(engine, schema.outbox, kind="k", subject="s", payload={"a": 1})
    now = timeutils.utcnow()
    rows.insert(engine, schema.self_heal_counters, kind="k", count=1, last_at=now)
    return engine


@pytest.mark.parametrize("kind", FINDERS, ids=lambda kind: kind.__name__)
def test_row_has_declared_keys_and_types(filled_engine: sa.Engine, kind: type) -> None:
    declared = typing.get_type_hints(kind)
    with filled_engine.connect() as connection:
        found = FINDERS[kind](connection)
    assert found
    for row in found:
        assert row.keys() == declared.keys()
        wrong = {key: value for key, value in row.items() if not _fits(value, declared[key])}
        assert wrong == {}


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if typing.is_typeddict(kind):
        kind = dict
    return type(value) is kind or (kind is datetime and isinstance(value, datetime))
