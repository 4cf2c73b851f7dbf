# SPDX-License-Identifier: Apache-2.0
"""Sealing of custody records and deletion of old ones, on each database."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.custody import sealer
from cyborg.conductor.custody.sealer import CustodySealer
from cyborg.core.custody import (
    START,
    Entry,
    Event,
    Fault,
    Link,
    Log,
    check_records,
    parse_keys,
    verify,
)
from cyborg.db import schema
from cyborg.db.custody import read
from cyborg.db.custody import write as custody_keys
from cyborg.db.custody import write as records
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.interleave import Race
from cyborg.tests.fixtures.machine.options import make_conf

NOW = datetime(2026, 5, 1, 12, 0, 0, 123456)
DAY = timedelta(days=1)
KEYS = parse_keys("ab" * 32)
DEVICES = ("11111111-0000-4000-8000-000000000000", "22222222-0000-4000-8000-000000000000")


class Env:
    """Custody records, and the sealer of a conductor."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.uow = UnitOfWork(engine)
        self.time = NOW
        self._added: set[str] = set()
        self.sealer = self.new_sealer()

    def new_sealer(self, retention: int = 10) -> CustodySealer:
        conf = make_conf(conductor={"custody_retention": retention})
        return CustodySealer(conf, self.uow, now=lambda: self.time)

    def add(self, *devices: str) -> None:
        """Record an event of each device, the first one of a device as ``device_added``."""
        details = {
            "handle": str(uuid4()),
            "instance": None,
            "ärger": "ß",
            "n": 7,
            "accel": {"a": "b"},
        }
        entries = []
        for device in devices:
            event = Event.CLAIMED if device in self._added else Event.DEVICE_ADDED
            entries.append(Entry(device, "compute-1", event, details))
            self._added.add(device)
        self.uow.run(lambda tx: records.add(tx, entries, self.time))

    def chain(self, device: str) -> Sequence[Any]:
        return self.uow.run(lambda tx: read.sealed_after(tx, device, 0, 10_000))

    def head(self, device: str) -> read.ChainRow:
        row = self.uow.run(lambda tx: read.chain(tx, device))
        assert row is not None
        return row

    def unsealed(self) -> int:
        return len(rows.read(self.engine, schema.custody_records, sequence=None))

    def find_fault(self, device: str) -> Fault | None:
        head = read.to_head(self.head(device))
        log = Log(head, self.chain(device), head)
        return verify(log, self.uow.run(custody_keys.keys_of))[1]


@pytest.fixture
def env(engine: sa.Engine) -> Env:
    return Env(custody_keys.attach(engine, KEYS))


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> Env:
    return Env(custody_keys.attach(sqlite_engine, KEYS))


def test_run_once_seals_each_device_in_the_order_of_its_records(env: Env) -> None:
    env.add(DEVICES[0], DEVICES[1], DEVICES[0])
    env.time += DAY
    env.add(DEVICES[1])
    assert env.sealer.run_once() == 4
    assert env.sealer.run_once() == 0
    for device in DEVICES:
        assert [sealed.record.sequence for sealed in env.chain(device)] == [1, 2]
        assert env.find_fault(device) is None
        assert env.head(device)["base_hash"] == START.hash
    env.add(DEVICES[0])
    assert env.sealer.run_once() == 1
    assert env.head(DEVICES[0])["sequence"] == 3
    assert env.find_fault(DEVICES[0]) is None


def test_run_once_seals_in_several_batches(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealer, "BATCH_SIZE", 3)
    sqlite_env.add(*[DEVICES[0]] * 7)
    assert sqlite_env.sealer.run_once() == 7
    assert sqlite_env.find_fault(DEVICES[0]) is None
    assert sqlite_env.head(DEVICES[0])["sequence"] == 7


def test_run_once_statement_count_is_independent_of_the_records(sqlite_env: Env) -> None:
    counts = []
    for number in (1, 200):
        sqlite_env.add(*[DEVICES[0]] * number)
        with count_statements(sqlite_env.engine) as count:
            sqlite_env.sealer.run_once()
        counts.append(len(count))
    # The first round also inserts the head.
    assert counts[1] == counts[0] - 1


def test_sealer_that_dies_before_its_commit_leaves_records_for_another(env: Env) -> None:
    env.add(DEVICES[0], DEVICES[0])

    def die(tx: sa.Connection) -> None:
        sealer._seal(tx, DEVICES)
        raise KeyboardInterrupt

    env.sealer.run_once()
    env.add(DEVICES[0])
    with pytest.raises(KeyboardInterrupt):
        env.uow.run(die)
    assert env.unsealed() == 1
    assert env.new_sealer().run_once() == 1
    assert env.find_fault(DEVICES[0]) is None
    assert env.head(DEVICES[0])["sequence"] == 3


@pytest.mark.parametrize(
    "at", ["INSERT INTO custody_heads", "FOR UPDATE", "UPDATE custody_records", "COMMIT"]
)
def test_two_sealers_at_once_build_one_chain(env: Env, at: str) -> None:
    if at == "FOR UPDATE" and env.engine.dialect.name == "sqlite":
        at = "FROM custody_heads"
    env.add(DEVICES[0], DEVICES[1], DEVICES[0])
    other = env.new_sealer()
    race = Race(env.engine, env.sealer.run_once, at, other.run_once)
    assert race.reached
    assert (race.first, race.second) == (None, None)
    env.sealer.run_once()
    assert env.unsealed() == 0
    assert [env.find_fault(device) for device in DEVICES] == [None, None]
    assert [env.head(device)["sequence"] for device in DEVICES] == [2, 1]


def test_record_that_commits_late_is_sealed_after_later_ones(env: Env) -> None:
    if env.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    late = [Entry(DEVICES[0], "compute-1", Event.RELEASED, {})]
    with env.engine.begin() as tx:
        records.add(tx, late, env.time)
        env.add(DEVICES[0])
        assert env.sealer.run_once() == 1
    assert env.sealer.run_once() == 1
    assert [sealed.record.event for sealed in env.chain(DEVICES[0])] == [
        "device_added",
        "released",
    ]
    assert env.find_fault(DEVICES[0]) is None


def test_broken_chain_does_not_delay_other_devices(
    env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    env.add(*DEVICES)
    env.sealer.run_once()
    first = rows.read(env.engine, schema.custody_heads, device_uuid=DEVICES[0])[0]
    rows.update(env.engine, schema.custody_heads, first["id"], sequence=0, hash=START.hash)
    env.add(*DEVICES)
    assert env.sealer.run_once() == 1
    assert env.find_fault(DEVICES[1]) is None
    assert env.unsealed() == 1
    assert "Cannot seal custody records" in caplog.text


def test_forged_records_do_not_delay_those_of_a_conductor(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sealer, "BATCH_SIZE", 3)
    forged = {"device_uuid": DEVICES[0], "host": "compute-1", "event": "cleaned", "details": {}}
    sqlite_env.add(DEVICES[0])
    (genuine,) = rows.read(sqlite_env.engine, schema.custody_records)
    for number in range(7):
        # The signature of another record proves nothing.
        signature = genuine["signature"] if number else None
        rows.insert(
            sqlite_env.engine,
            schema.custody_records,
            **forged,
            recorded_at=NOW,
            signature=signature,
        )
    sqlite_env.add(DEVICES[0], DEVICES[1])
    assert sqlite_env.sealer.run_once() == 3
    assert sqlite_env.sealer.run_once() == 0
    assert sqlite_env.unsealed() == 7
    assert [sqlite_env.find_fault(device) for device in DEVICES] == [None, None]
    refusals = [line for line in caplog.messages if "Refused a custody record" in line]
    assert len(refusals) == 1  # a minute
    assert (
        rows.read(sqlite_env.engine, schema.custody_records, id=genuine["id"])[0]["signature"]
        is None
    )


def test_keys_add_no_statement(sqlite_engine: sa.Engine) -> None:
    counts = []
    for engine in (sqlite_engine, custody_keys.attach(sqlite_engine, KEYS)):
        env = Env(engine)
        device = str(uuid4())
        with count_statements(sqlite_engine) as count:
            env.add(device, device)
            env.sealer.run_once()
            env.time += 20 * DAY
            env.sealer.sweep()
        counts.append(len(count))
    assert counts[0] == counts[1]


def test_heads_without_signature_cost_no_transaction_each_and_one_line(
    sqlite_engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """All chains are such from the start of conductors with a key until ``sign-custody``."""
    devices = [str(uuid4()) for _ in range(20)]
    old = Env(sqlite_engine)
    old.add(*devices)
    assert old.sealer.run_once() == 20
    env = Env(custody_keys.attach(sqlite_engine, KEYS))
    env.add(*devices, DEVICES[0])
    with count_statements(sqlite_engine) as count:
        assert env.sealer.run_once() == 1, "the new chain does not wait"
    assert len(count) < 20
    assert env.sealer.run_once() == 0
    (line,) = [line for line in caplog.messages if "Cannot seal custody records" in line]
    assert "it has no signature" in line


@pytest.mark.parametrize("max_failed", [2, 1])
def test_devices_that_cannot_be_sealed_do_not_fill_the_batches(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch, max_failed: int
) -> None:
    monkeypatch.setattr(sealer, "BATCH_SIZE", 3)
    monkeypatch.setattr(sealer, "MAX_FAILED", max_failed)
    sqlite_env.add(*DEVICES)
    sqlite_env.sealer.run_once()
    (head,) = rows.read(sqlite_env.engine, schema.custody_heads, device_uuid=DEVICES[0])
    changed = {"sequence": head["sequence"], "hash": head["hash"]}
    rows.update(sqlite_env.engine, schema.custody_heads, head["id"], sequence=0, hash=START.hash)
    sqlite_env.add(*[DEVICES[0]] * 5, *[DEVICES[1]] * 4)
    assert sqlite_env.sealer.run_once() == (4 if max_failed == 2 else 0)
    assert sqlite_env.unsealed() == (5 if max_failed == 2 else 9)
    # A later round retries the device, and seals its records once the head is restored.
    rows.update(sqlite_env.engine, schema.custody_heads, head["id"], **changed)
    assert sqlite_env.sealer.run_once() == (5 if max_failed == 2 else 9)
    assert [sqlite_env.find_fault(device) for device in DEVICES] == [None, None]


def test_sweep_deletes_only_the_old_start_of_a_chain(env: Env) -> None:
    env.add(DEVICES[0], DEVICES[0])
    env.time += 5 * DAY
    env.add(DEVICES[0], DEVICES[1])
    env.sealer.run_once()
    env.time += 6 * DAY
    env.add(DEVICES[0])
    second = env.chain(DEVICES[0])[1].hash
    assert env.sealer.sweep() == 2
    assert env.sealer.sweep() == 0
    assert env.head(DEVICES[0])["base_sequence"] == 2
    assert env.head(DEVICES[0])["base_hash"] == second
    assert [sealed.record.sequence for sealed in env.chain(DEVICES[0])] == [3]
    assert env.unsealed() == 1
    env.sealer.run_once()
    assert env.find_fault(DEVICES[0]) is None
    assert env.new_sealer(retention=0).sweep() == 0


def test_sweep_continues_the_chain_of_a_device_without_records(env: Env) -> None:
    device = rows.insert_card(env.engine, handles=0)
    (row,) = rows.read(env.engine, schema.devices, id=device.device_id)
    env.add(row["uuid"], DEVICES[0])
    env.sealer.run_once()
    tip = read.tip(env.head(row["uuid"]))
    env.time += 20 * DAY
    rows.update(env.engine, schema.custody_heads, 1, created_at=NOW)
    rows.update(env.engine, schema.custody_heads, 2, created_at=NOW)
    assert env.sealer.sweep() == 2
    # The head of a device that no longer exists is deleted with its last record.
    assert [head["device_uuid"] for head in rows.read(env.engine, schema.custody_heads)] == [
        row["uuid"]
    ]
    env.add(row["uuid"])
    env.sealer.run_once()
    assert env.head(row["uuid"])["sequence"] == tip.sequence + 1
    assert read.base(env.head(row["uuid"])) == tip
    assert env.find_fault(row["uuid"]) is None


def test_sweep_keeps_a_changed_record_and_all_after_it(env: Env) -> None:
    env.add(*[DEVICES[0]] * 4)
    env.sealer.run_once()
    third = rows.read(env.engine, schema.custody_records, sequence=3)[0]
    rows.update(env.engine, schema.custody_records, third["id"], host="elsewhere")
    env.time += 20 * DAY
    assert env.sealer.sweep() == 2
    assert env.find_fault(DEVICES[0]) == check_records(
        Link(2, env.head(DEVICES[0])["base_hash"]), env.chain(DEVICES[0])
    )
    assert isinstance(env.find_fault(DEVICES[0]), Fault)
    assert env.sealer.sweep() == 0


def test_stopped_sealer_seals_nothing(sqlite_env: Env) -> None:
    sqlite_env.add(DEVICES[0])
    sqlite_env.sealer.stop()
    assert sqlite_env.sealer.run_once() == 0
    assert sqlite_env.unsealed() == 1
