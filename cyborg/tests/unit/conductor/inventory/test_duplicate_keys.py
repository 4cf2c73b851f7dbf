# SPDX-License-Identifier: Apache-2.0
"""A report with a duplicate key is rejected with the violated constraint."""

import logging
from dataclasses import replace

import pytest
import sqlalchemy as sa
from oslo_db.exception import DBDuplicateEntry

from cyborg.core.errors import Conflict
from cyborg.core.inventory.device import Deployable
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.hosts import Host, card, make_hosts


def make_deployable(address: str) -> Deployable:
    return replace(card().deployables[0], address=address)


def test_report_with_provider_name_of_another_host_raises_conflict(
    engine: sa.Engine,
) -> None:
    hosts = make_hosts(engine)
    Host("a").send(hosts, card(deployables=(make_deployable("b_c"),)))
    other = Host("a_b", devices=[card(deployables=(make_deployable("c"),))])
    other.hello(hosts)
    with pytest.raises(Conflict, match="names are in use: a_b_c belongs to host a"):
        other.report(hosts)


def test_report_that_violates_other_constraint_names_it(
    engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card(0), card(1))
    host.send(hosts, card(1))
    (tombstone,) = rows.read(engine, schema.device_tombstones)
    (device,) = rows.read(engine, schema.devices)
    # A tombstone with the uuid of an existing device is an inconsistency, no conflict of hosts.
    rows.update(engine, schema.device_tombstones, tombstone["id"], uuid=device["uuid"])
    host.devices = (card(0), card(1))
    host.hello(hosts)
    with pytest.raises(Conflict) as caught:
        host.report(hosts)
    assert "uniqueness constraint" in caught.value.message
    assert "uuid" in caught.value.message
    assert "no other host" in caught.value.message
    (line,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "duplicate key" in line.getMessage()
    assert "attempt 2 of 2" in line.getMessage()


def test_report_with_duplicate_key_is_retried(
    sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, host = make_hosts(sqlite_engine), Host(devices=[card(0)])
    host.hello(hosts)
    run_unpatched, failures = UnitOfWork.run, [True]

    def run(self: UnitOfWork, work: object) -> object:
        if failures:
            failures.pop()
            raise DBDuplicateEntry(columns=["address"])
        return run_unpatched(self, work)  # type: ignore[arg-type]

    monkeypatch.setattr(UnitOfWork, "run", run)
    assert host.report(hosts) == {"accepted": True}
    assert len(rows.read(sqlite_engine, schema.devices)) == 1
