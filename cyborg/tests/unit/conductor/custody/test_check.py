# SPDX-License-Identifier: Apache-2.0
"""The check of custody chains by an audit: each change by SQL is found, on each database."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor.custody import check as custody
from cyborg.conductor.custody.check import ChainChecker
from cyborg.core.audit.sources import Finding, Kind
from cyborg.db import schema
from cyborg.db.audits import write as audits
from cyborg.db.custody import write as custody_keys
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import audit_setup, rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.unit.conductor.custody.test_sealer import DEVICES, KEYS, Env

__all__ = ["node", "placement_adapter"]

HOST = "compute-1"
TABLE = schema.custody_records


@pytest.fixture
def env(engine: sa.Engine) -> Env:
    new_env = Env(engine)
    new_env.add(*[DEVICES[0]] * 5, *[DEVICES[1]] * 2)
    new_env.sealer.run_once()
    return new_env


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> Env:
    new_env = Env(sqlite_engine)
    new_env.add(*[DEVICES[0]] * 5, *[DEVICES[1]] * 2)
    new_env.sealer.run_once()
    return new_env


def checker(env: Env, max_records: int = custody.MAX_RECORDS) -> ChainChecker:
    return ChainChecker(make_conf(), env.uow, now=lambda: env.time, max_records=max_records)


def check(env: Env, max_records: int = custody.MAX_RECORDS) -> list[Finding]:
    return checker(env, max_records).check(HOST, lambda: None)


def record(env: Env, sequence: int) -> int:
    """Return the row id of a record of the first device."""
    (row,) = rows.read(env.engine, TABLE, device_uuid=DEVICES[0], sequence=sequence)
    return int(row["id"])


def delete(env: Env, sequence: int) -> None:
    row = record(env, sequence)
    with env.engine.begin() as tx:
        tx.execute(sa.delete(TABLE).where(TABLE.c.id == row))


def delete_head(env: Env) -> None:
    heads = schema.custody_heads
    with env.engine.begin() as tx:
        tx.execute(sa.delete(heads).where(heads.c.device_uuid == DEVICES[0]))


def test_check_of_unchanged_chains_has_no_findings(env: Env) -> None:
    assert check(env) == []
    env.add(*DEVICES)
    env.sealer.run_once()
    assert check(env) == []
    (head, _) = rows.read(env.engine, schema.custody_heads)
    assert (head["sequence"], head["checked_sequence"]) == (6, 0)


def test_check_after_a_complete_one_reads_the_old_records_again(env: Env) -> None:
    assert check(env) == []
    rows.update(env.engine, TABLE, record(env, 1), event="cleaned")
    env.add(DEVICES[0])
    assert env.sealer.run_once() == 1
    (finding,) = check(env)
    assert (finding.kind, finding.object) == (Kind.CUSTODY_BROKEN, f"device {DEVICES[0]}")
    assert "record 1 " in finding.explanation


def test_check_continues_after_its_limit(sqlite_env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custody, "PAGE_SIZE", 2)
    sqlite_env.add(*[DEVICES[0]] * 5)
    sqlite_env.sealer.run_once()
    rows.update(sqlite_env.engine, TABLE, record(sqlite_env, 9), event="cleaned")
    for head in rows.read(sqlite_env.engine, schema.custody_heads):
        rows.update(sqlite_env.engine, schema.custody_heads, head["id"], checked_at=sqlite_env.time)
    checked: list[tuple[int, int]] = []
    found: list[Finding] = []
    while not found:
        sqlite_env.time += timedelta(hours=1)
        found = check(sqlite_env, max_records=4)
        first, second = rows.read(sqlite_env.engine, schema.custody_heads)
        checked.append((first["checked_sequence"], second["checked_sequence"]))
    # The chain that was not checked for longest comes first. After the finding, and after a
    # complete check, the check of the chain begins again at its start.
    assert checked == [(4, 0), (6, 0), (0, 0)]
    assert [finding.kind for finding in found] == [Kind.CUSTODY_BROKEN]


def test_progress_that_no_conductor_wrote_is_not_used(sqlite_engine: sa.Engine) -> None:
    env = Env(custody_keys.attach(sqlite_engine, KEYS))
    env.add(*[DEVICES[0]] * 8)
    env.sealer.run_once()
    (head,) = rows.read(env.engine, schema.custody_heads)
    rows.update(env.engine, TABLE, record(env, 3), event="cleaned")
    fourth = rows.read(env.engine, TABLE, sequence=4)[0]
    values = {"checked_sequence": 4, "checked_hash": fourth["hash"]}
    rows.update(env.engine, schema.custody_heads, head["id"], **values, checked_signature=None)
    (finding,) = check(env)
    assert "record 3 " in finding.explanation


def test_chain_is_not_hidden_by_another_host_in_its_head(env: Env) -> None:
    (head, _) = rows.read(env.engine, schema.custody_heads)
    rows.update(env.engine, schema.custody_heads, head["id"], host="")
    (finding,) = check(env)
    assert finding.object == f"device {head['device_uuid']}"
    assert "has another host" in finding.explanation


@pytest.mark.parametrize("heads", ["kept", "deleted"])
def test_check_ignores_records_deleted_after_their_retention_meanwhile(
    sqlite_env: Env, heads: str
) -> None:
    if heads == "deleted":
        for head in rows.read(sqlite_env.engine, schema.custody_heads):
            values = {"created_at": sqlite_env.time}
            rows.update(sqlite_env.engine, schema.custody_heads, head["id"], **values)
    sqlite_env.time += timedelta(days=20)
    calls: list[int] = []

    def sweep_once() -> None:
        if not calls:
            calls.append(sqlite_env.sealer.sweep())

    assert checker(sqlite_env).check(HOST, sweep_once) == []
    assert calls == [7]
    assert len(rows.read(sqlite_env.engine, schema.custody_heads)) == (2 if heads == "kept" else 0)


def test_check_reports_a_head_deleted_by_sql(env: Env) -> None:
    delete_head(env)
    (finding,) = check(env)
    assert (finding.kind, finding.object) == (Kind.CUSTODY_BROKEN, f"device {DEVICES[0]}")
    assert "custody_heads is missing" in finding.explanation


def test_check_reports_a_head_deleted_by_sql_during_the_check(sqlite_env: Env) -> None:
    delete(sqlite_env, 2)

    def delete_once() -> None:
        if len(rows.read(sqlite_env.engine, schema.custody_heads)) == 2:
            delete_head(sqlite_env)

    findings = checker(sqlite_env).check(HOST, delete_once)
    assert [finding.object for finding in findings] == [f"device {DEVICES[0]}"] * 2
    assert "record 2 " in findings[0].explanation


def test_check_reports_an_existing_device_whose_log_was_deleted(env: Env) -> None:
    rows.insert_card(env.engine, HOST, handles=0)
    rows.insert_card(env.engine, "compute-2", handles=0)
    (device,) = rows.read(env.engine, schema.devices, host=HOST)
    (finding,) = check(env)
    assert (finding.kind, finding.object) == (Kind.CUSTODY_BROKEN, f"device {device['uuid']}")
    env.add(device["uuid"])  # without head until it is sealed
    assert check(env) == []


def test_hosts_that_only_custody_logs_know_are_audited(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "COUNT_PAGE", 2)
    rows.insert_agent(env.engine, "agent")
    rows.insert_card(env.engine, "inventory", handles=0)
    record = {"event": "claimed", "details": {}, "recorded_at": env.time}
    for host in ("agent", "records", "records", "zz"):
        rows.insert(env.engine, TABLE, device_uuid=host, host=host, **record)

    def pages(tx: sa.Connection) -> Iterator[str]:
        last = ""
        while names := audits.next_hosts(tx, last, 2):
            yield from names
            last = names[-1]

    with env.engine.connect() as tx:
        hosts = list(pages(tx))
        assert hosts == ["agent", HOST, "inventory", "records", "zz"]
        assert audits.count_hosts(tx) == 5
        assert audits.next_hosts(tx, "", 1000) == hosts
        assert all(audits.host_exists(tx, host) for host in hosts)
        assert not audits.host_exists(tx, "nobody")
        inventory = [host for host in hosts if audits.has_inventory(tx, host)]
        assert inventory == ["agent", "inventory"]


def test_check_ignores_records_sealed_meanwhile(env: Env) -> None:
    def seal() -> None:
        env.add(DEVICES[0])
        env.sealer.run_once()

    assert checker(env).check(HOST, seal) == []


def test_check_reports_records_that_are_not_sealed_for_long(env: Env) -> None:
    env.add(DEVICES[0], DEVICES[0])
    assert check(env) == []
    env.time += timedelta(minutes=6)
    (finding,) = check(env)
    assert (finding.kind, finding.object) == (Kind.CUSTODY_UNSEALED, f"device {DEVICES[0]}")
    assert "2 records" in finding.explanation


def test_check_of_another_host_reads_no_chain(env: Env) -> None:
    delete(env, 2)
    assert checker(env).check("compute-2", lambda: None) == []


@pytest.mark.usefixtures("placement_adapter")
def test_audit_reports_a_broken_chain(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = audit_setup.Env(sqlite_engine, node, fake_nova)
    custody_env = Env(sqlite_engine)
    assert custody_env.sealer.run_once() == 2
    assert env.run_and_list() == []
    first: dict[str, Any] = rows.read(sqlite_engine, TABLE)[0]
    rows.update(sqlite_engine, TABLE, first["id"], details={})
    assert env.run_and_list() == [("custody_broken", f"device {first['device_uuid']}")]


@pytest.mark.usefixtures("placement_adapter")
def test_audit_of_a_deleted_host_checks_only_its_chains(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = audit_setup.Env(sqlite_engine, node, fake_nova)
    custody_env = Env(sqlite_engine)
    custody_env.add(DEVICES[0])
    custody_env.sealer.run_once()
    assert env.run_and_list() == []
    (row,) = rows.read(sqlite_engine, TABLE, host=HOST)
    rows.update(sqlite_engine, TABLE, row["id"], details={})
    assert env.run_and_list() == [("custody_broken", f"device {DEVICES[0]}")]
    assert env.run_audit(host=HOST)["num_findings"] == 1
