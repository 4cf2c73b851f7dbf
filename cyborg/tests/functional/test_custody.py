# SPDX-License-Identifier: Apache-2.0
"""Custody logs under load: binds and releases of one device from many threads, with sealers."""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.custody.sealer import CustodySealer
from cyborg.core.custody import check_records, find_head_fault
from cyborg.core.errors import NoHandle
from cyborg.db import schema
from cyborg.db.custody import read
from cyborg.db.custody import write as custody_keys
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.custody import check_chain
from cyborg.tests.fixtures.databases.databases import engine_of
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.functional.test_claims import Env, at_once

SERVERS = 48
SEALS = 16
THREADS = 32


@pytest.fixture
def env(engine: sa.Engine) -> Env:
    return Env(engine)


def boot_and_delete(env: Env, card: rows.Card, uuid: str) -> None:
    """Bind an ARQ and delete it again; do nothing if no handle is free."""
    instance = str(uuid4())
    try:
        env.bind([uuid], instance, card)
    except NoHandle:
        return
    env.requests.delete(None, instance, None, allow_bound=True)


@pytest.mark.slow
def test_chain_of_a_device_is_whole_after_concurrent_binds_and_seals(env: Env) -> None:
    card, uuids = rows.insert_card(env.engine, handles=16), env.make(SERVERS)
    sealers = [CustodySealer(make_conf(), UnitOfWork(env.engine)) for _ in range(2)]
    calls: list[Callable[[], Any]] = [partial(boot_and_delete, env, card, uuid) for uuid in uuids]
    for number in range(SEALS):
        calls.insert(number * 4, sealers[number % 2].run_once)
    assert Counter(at_once(calls, THREADS)) == {"ok": SERVERS + SEALS}
    sealers[0].run_once()
    (device,) = rows.read(env.engine, schema.devices)
    events = check_chain(env.engine, device["uuid"], owners={})
    assert events["claimed"] == events["released"] == SERVERS - len(remaining(env))


def remaining(env: Env) -> list[dict[str, Any]]:
    """Return the ARQs that found no free handle."""
    return rows.read(env.engine, schema.arqs, state="Initial")


SEAL_AND_DIE = """
import os, signal, sys
import sqlalchemy as sa
from cyborg.conductor.custody.sealer import CustodySealer
from cyborg.db.engine import make_engine
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.db.custody import write as keys
from cyborg.tests.fixtures.machine.options import make_conf

conf = make_conf(
    database={"connection": sys.argv[1]}, conductor={"custody_key_file": sys.argv[3]}
)
engine = keys.attach(make_engine(conf), keys.load(conf))

def before(connection, cursor, statement, *rest):
    if sys.argv[2] in statement:
        os.kill(os.getpid(), signal.SIGKILL)

def commit(connection):
    if sys.argv[2] == "COMMIT" and sealed:
        os.kill(os.getpid(), signal.SIGKILL)

def after(connection, cursor, statement, *rest):
    sealed.extend([statement] if "UPDATE custody_heads" in statement else [])

sealed = []
sa.event.listen(engine, "before_cursor_execute", before)
sa.event.listen(engine, "after_cursor_execute", after)
sa.event.listen(engine, "commit", commit)
CustodySealer(conf, UnitOfWork(engine)).run_once()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    sample(
        ["FROM custody_records", "INSERT INTO custody_heads", "UPDATE custody_records", "COMMIT"],
        "COMMIT",
    ),
)
def test_killed_sealer_leaves_a_chain_that_another_continues(
    database_url: str, point: str, tmp_path: Path
) -> None:
    key_file = tmp_path / "custody.key"
    key_file.write_text("ab" * 32)
    keys = custody_keys.load(make_conf(conductor={"custody_key_file": str(key_file)}))
    with engine_of(database_url) as engine:
        schema.metadata.create_all(engine)
        signing = custody_keys.attach(engine, keys)
        env = Env(signing)
        card = rows.insert_card(engine, handles=4)
        for uuid in env.make(3):
            boot_and_delete(env, card, uuid)
        words = [sys.executable, "-c", SEAL_AND_DIE, database_url, point, str(key_file)]
        process = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        assert process.returncode == -signal.SIGKILL, process.stderr
        assert len(rows.read(engine, schema.custody_records, sequence=None)) == 6
        sealer = CustodySealer(make_conf(), UnitOfWork(signing))
        # A server may need a moment to find that the connection is lost and to release its locks.
        wait_until("the records are sealed", lambda: sealer.run_once() or is_sealed(engine))
        (device,) = rows.read(engine, schema.devices)
        with engine.connect() as connection:
            head = read.chain(connection, device["uuid"])
            records = read.sealed_after(connection, device["uuid"], 0, 1000)
        assert head is not None
        assert check_records(read.base(head), records) == read.tip(head)
        assert head["sequence"] == 6
        assert find_head_fault(read.to_head(head), keys) is None


def is_sealed(engine: sa.Engine) -> bool:
    return not rows.read(engine, schema.custody_records, sequence=None)
