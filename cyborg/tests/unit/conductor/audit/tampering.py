# SPDX-License-Identifier: Apache-2.0
"""Changes of a custody log by SQL, by somebody who knows this code but has no key.

The log of ``VICTIM``, an existing device, has the records 1 to 5 in its chain.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from cyborg.core.custody import START, Link, compute_hash, parse_keys, serialize_head
from cyborg.db import schema
from cyborg.db.custody import read
from cyborg.db.custody import write as custody_keys
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.unit.conductor.custody.test_sealer import KEYS, Env

HOST = "compute-1"
VICTIM = "33333333-0000-4000-8000-000000000000"
OTHER = "44444444-0000-4000-8000-000000000000"
FOREIGN = parse_keys("cd" * 32)
RECORDS, HEADS = schema.custody_records, schema.custody_heads


class VictimEnv(Env):
    """Custody logs with a copy of a former head, as a backup has it."""

    copy: Mapping[str, Any]


@dataclass(frozen=True)
class Tampering:
    """A change, and what proves it: each proof of ``proofs`` alone is enough.

    ``hash`` needs no key, ``key`` a conductor with a key, ``anchor`` one from before the change.
    Without any proof the change cannot be found.
    """

    change: Callable[[VictimEnv], object]
    proofs: frozenset[str]


def make_env(engine: sa.Engine, *, keyed: bool) -> VictimEnv:
    """Return the custody logs of two existing devices."""
    env = VictimEnv(custody_keys.attach(engine, KEYS) if keyed else engine)
    rows.insert_card(engine, HOST, "0000:01:00.0", handles=0, uuid=VICTIM)
    rows.insert_card(engine, HOST, "0000:02:00.0", handles=0, uuid=OTHER)
    env.add(VICTIM, VICTIM, OTHER)
    env.sealer.run_once()
    env.copy = head(env)
    env.add(VICTIM, VICTIM, VICTIM, OTHER)
    env.sealer.run_once()
    return env


def head(env: VictimEnv) -> dict[str, Any]:
    """Return the row of the head of the victim."""
    (row,) = rows.read(env.engine, HEADS, device_uuid=VICTIM)
    return dict(row)


def _record(env: VictimEnv, sequence: int) -> dict[str, Any]:
    (row,) = rows.read(env.engine, RECORDS, device_uuid=VICTIM, sequence=sequence)
    return dict(row)


def _set(sequence: int, /, **values: Any) -> Callable[[VictimEnv], object]:
    return lambda env: rows.update(env.engine, RECORDS, _record(env, sequence)["id"], **values)


def _set_head(env: VictimEnv, **values: Any) -> None:
    rows.update(env.engine, HEADS, head(env)["id"], **values)


def _delete(env: VictimEnv, first: int, last: int) -> None:
    with env.engine.begin() as tx:
        tx.execute(
            sa.delete(RECORDS).where(
                RECORDS.c.device_uuid == VICTIM, RECORDS.c.sequence.between(first, last)
            )
        )


def _delete_all(env: VictimEnv) -> None:
    with env.engine.begin() as tx:
        for table in (RECORDS, HEADS):
            tx.execute(sa.delete(table).where(table.c.device_uuid == VICTIM))


def _delete_head(env: VictimEnv) -> None:
    with env.engine.begin() as tx:
        tx.execute(sa.delete(HEADS).where(HEADS.c.device_uuid == VICTIM))


def _swap(env: VictimEnv) -> None:
    second, third = _record(env, 2)["id"], _record(env, 3)["id"]
    for row, sequence in ((second, 99), (third, 2), (second, 3)):
        rows.update(env.engine, RECORDS, row, sequence=sequence)


def _insert(env: VictimEnv, **values: Any) -> None:
    fixed = {"device_uuid": VICTIM, "host": HOST, "event": "cleaned", "details": {}}
    rows.insert(env.engine, RECORDS, **fixed, recorded_at=env.time, **values)


def _append(env: VictimEnv) -> Link:
    """Insert a record after the last one, with the right hash; return its position."""
    row = head(env)
    _insert(env, sequence=row["sequence"] + 1, hash="")
    with env.engine.connect() as connection:
        (found,) = read.sealed_after(connection, VICTIM, row["sequence"], 1)
    tip = Link(found.record.sequence, compute_hash(found.record, row["hash"]))
    rows.update(env.engine, RECORDS, _record(env, tip.sequence)["id"], hash=tip.hash)
    return tip


def _append_and_advance(env: VictimEnv) -> None:
    tip = _append(env)
    _set_head(env, sequence=tip.sequence, hash=tip.hash)


def _compute_again(env: VictimEnv, **values: Any) -> None:
    """Change record 3, and compute the hashes of all records again."""
    _set(3, event="cleaned")(env)
    position = START
    with env.engine.connect() as connection:
        records = read.sealed_after(connection, VICTIM, 0, 10)
    for sealed in records:
        sequence = sealed.record.sequence
        position = Link(sequence, compute_hash(sealed.record, position.hash))
        rows.update(env.engine, RECORDS, _record(env, sequence)["id"], hash=position.hash)
    _set_head(env, hash=position.hash, **values)


def _compute_again_with_a_foreign_key(env: VictimEnv) -> None:
    _compute_again(env)
    row = head(env)
    tip = Link(row["sequence"], row["hash"])
    _set_head(env, signature=FOREIGN.sign(serialize_head(VICTIM, tip, START)))


def _set_back(env: VictimEnv) -> None:
    third = _record(env, 3)
    _delete(env, 4, 5)
    _set_head(env, sequence=3, hash=third["hash"])


def _take_out(env: VictimEnv) -> None:
    """Take record 3 out, and have the conductor put the records after it into the chain again."""
    second = _record(env, 2)
    _delete(env, 3, 3)
    for sequence in (4, 5):
        _set(sequence, sequence=None, hash=None)(env)
    _set_head(env, sequence=2, hash=second["hash"])


def _move_base(env: VictimEnv) -> None:
    second = _record(env, 2)
    _delete(env, 1, 2)
    _set_head(env, base_sequence=2, base_hash=second["hash"])


def _begin_again(env: VictimEnv) -> None:
    _delete_all(env)
    env.add(VICTIM)


def _restore_older_head(env: VictimEnv) -> None:
    _delete(env, 3, 5)
    names = ("sequence", "hash", "signature")
    _set_head(env, **{name: env.copy[name] for name in names})


def _delete_new(env: VictimEnv) -> None:
    env.add(VICTIM)
    with env.engine.begin() as tx:
        tx.execute(sa.delete(RECORDS).where(RECORDS.c.sequence.is_(None)))


def _forget_device(env: VictimEnv) -> None:
    """Delete the device as well, so that nothing in the database names it any more."""
    _delete_all(env)
    with env.engine.begin() as tx:
        tx.execute(sa.delete(schema.devices).where(schema.devices.c.uuid == VICTIM))


def _case(change: Callable[[VictimEnv], object], *proofs: str) -> Tampering:
    return Tampering(change, frozenset(proofs))


TAMPERINGS: Mapping[str, Tampering] = {
    # The eleven ways of the first test.
    "details changed": _case(_set(3, details={"instance": "other"}), "hash"),
    "record removed": _case(lambda env: _delete(env, 2, 2), "hash"),
    "last record removed": _case(lambda env: _delete(env, 5, 5), "hash"),
    "records swapped": _case(_swap, "hash"),
    "head deleted": _case(_delete_head, "hash"),
    "chain deleted": _case(_delete_all, "hash"),
    "record beyond the head": _case(_append, "hash"),
    "head set back": _case(_set_back, "key", "anchor"),
    "base moved": _case(_move_base, "key"),
    "unsealed record forged": _case(_insert, "key"),
    "chain computed again": _case(_compute_again, "key", "anchor"),
    # More.
    "details that are a list": _case(_set(2, details=[1]), "hash"),
    "event changed": _case(_set(2, event="cleaned"), "hash"),
    "time changed": _case(
        lambda env: _set(5, recorded_at=env.time + timedelta(seconds=1))(env), "hash"
    ),
    "host changed": _case(_set(4, host="elsewhere"), "hash"),
    "hash changed": _case(_set(4, hash="f" * 64), "hash"),
    "record of another device": _case(_set(5, device_uuid=OTHER), "hash"),
    "record before the base": _case(lambda env: _insert(env, sequence=-3, hash="0" * 64), "hash"),
    "head set back, records kept": _case(lambda env: _set_head(env, sequence=4), "hash"),
    "record added and head advanced": _case(_append_and_advance, "key"),
    "record taken out, rest to be sealed again": _case(_take_out, "key", "anchor"),
    "signature of the head removed": _case(
        lambda env: _compute_again(env, signature=None), "key", "anchor"
    ),
    "foreign key": _case(_compute_again_with_a_foreign_key, "hash", "anchor"),
    "forged record with a foreign key": _case(
        lambda env: _insert(env, signature=FOREIGN.sign(b"")), "key"
    ),
    "chain deleted, then a new event": _case(_begin_again, "hash"),
    # Only what was kept outside of the database shows these.
    "older head and its signature restored": _case(_restore_older_head, "anchor"),
    "chain of a removed device deleted": _case(_forget_device, "anchor"),
    # Not provable.
    "new record removed before it is in the chain": _case(_delete_new),
}
