# SPDX-License-Identifier: Apache-2.0
"""Concurrent claims from many threads, on each of the real databases."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.core.errors import Conflict, CyborgError, InUse, NoHandle, NotFound
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.machine.options import make_notification_conf


class Env:
    """ARQs of one profile, bound from threads."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.uow = UnitOfWork(engine)
        self.requests = Arqs(make_notification_conf(), self.uow)
        self.profile = rows.insert_profile(engine)

    def make(self, count: int) -> list[str]:
        rows_ = [
            {
                "uuid": str(uuid4()),
                "state": "Initial",
                "profile_id": self.profile,
                "device_profile_name": "fpga",
                "device_profile_group_id": 0,
                "resource_class": "FPGA",
                "group": dict(rows.GROUPS[0]),
            }
            for _ in range(count)
        ]
        with self.engine.begin() as tx:
            tx.execute(sa.insert(schema.arqs), rows_)
        return [str(row["uuid"]) for row in rows_]

    def bind(self, uuids: Sequence[str], instance: str, *cards: rows.Card) -> None:
        binds = [
            {
                "request": uuid,
                "hostname": cards[n % len(cards)].host,
                "device_rp_uuid": cards[n % len(cards)].provider,
                "instance_uuid": instance,
            }
            for n, uuid in enumerate(uuids)
        ]
        self.requests.bind(binds, None)

    def states(self) -> Counter[str]:
        return Counter(row["state"] for row in rows.read(self.engine, schema.arqs))

    def check(self) -> None:
        """Check that each Bound ARQ has exactly one handle, and no other handle is owned."""
        bound = {row["id"] for row in rows.read(self.engine, schema.arqs, state="Bound")}
        owners = [
            row["arq_id"]
            for row in rows.read(self.engine, schema.attach_handles)
            if row["arq_id"] is not None
        ]
        assert sorted(owners) == sorted(bound)
        assert set(self.states()) <= {"Initial", "Bound", "Unbound"}


@pytest.fixture
def env(engine: sa.Engine) -> Env:
    return Env(engine)


def at_once(calls: Sequence[Callable[[], Any]], threads: int) -> list[str]:
    """Run calls in ``threads`` threads that start together; return "ok" or the error of each."""
    barrier = Barrier(min(threads, len(calls)))

    def run_call(n: int) -> str:
        if n < barrier.parties:
            barrier.wait(30)
        try:
            calls[n]()
        except CyborgError as exc:
            return type(exc).__name__
        return "ok"

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run_call, range(len(calls))))


def test_bind_of_64_arqs_from_32_threads_claims_16_handles(env: Env) -> None:
    card, uuids = rows.insert_card(env.engine, handles=16), env.make(64)
    calls = [lambda u=uuid: env.bind([u], str(uuid4()), card) for uuid in uuids]
    outcomes = Counter(at_once(calls, 32))
    assert outcomes == {"ok": 16, "NoHandle": 48}
    assert env.states() == {"Bound": 16, "Initial": 48}
    env.check()
    assert len(rows.read(env.engine, schema.outbox)) == 16


def test_bind_of_batches_is_all_or_nothing(env: Env) -> None:
    cards = [rows.insert_card(env.engine, address=f"0000:0{n}:00.0", handles=8) for n in range(2)]
    batches = [env.make(3) for _ in range(12)]
    orders = [cards, cards[::-1]]
    calls = [
        lambda b=batch, n=n: env.bind(b, str(uuid4()), *orders[n % 2])
        for n, batch in enumerate(batches)
    ]
    outcomes = Counter(at_once(calls, 12))
    assert set(outcomes) <= {"ok", "NoHandle"}
    assert env.states()["Bound"] == 3 * outcomes["ok"]
    # 16 handles hold at most five batches; two and one of each card, at least four fit.
    assert 4 <= outcomes["ok"] <= 5
    env.check()


def test_bind_of_one_arq_from_eight_threads_claims_one_handle(env: Env) -> None:
    card, (uuid,), instance = rows.insert_card(env.engine), env.make(1), str(uuid4())
    outcomes = at_once([lambda: env.bind([uuid], instance, card)] * 8, 8)
    assert outcomes == ["ok"] * 8
    assert env.states() == {"Bound": 1}
    env.check()
    assert len(rows.read(env.engine, schema.outbox)) == 1


def test_bind_for_one_instance_from_eight_calls_succeeds_once(env: Env) -> None:
    card, batches, instance = (
        rows.insert_card(env.engine),
        [env.make(2) for _ in range(8)],
        str(uuid4()),
    )
    outcomes = Counter(at_once([partial(env.bind, b, instance, card) for b in batches], 8))
    assert outcomes == {"ok": 1, "Conflict": 7}
    assert env.states() == {"Bound": 2, "Initial": 14}
    env.check()


def test_delete_concurrent_with_bind_leaks_no_handle(env: Env) -> None:
    card, uuids = rows.insert_card(env.engine, handles=24), env.make(24)
    binds = [lambda u=uuid: env.bind([u], str(uuid4()), card) for uuid in uuids]
    deletes = [lambda u=uuid: env.requests.delete([u], None, None, True) for uuid in uuids]
    outcomes = at_once([call for pair in zip(binds, deletes, strict=True) for call in pair], 16)
    assert set(outcomes[1::2]) == {"ok"}
    assert set(outcomes[0::2]) <= {"ok", "NotFound"}
    assert env.states() == {}
    env.check()


def test_concurrent_unbind_and_bind_leak_no_handle(env: Env) -> None:
    card, uuids = rows.insert_card(env.engine, handles=4), env.make(8)

    def cycle(uuid: str) -> None:
        for _ in range(3):
            try:
                env.bind([uuid], str(uuid4()), card)
            except NoHandle:
                continue
            env.requests.unbind([{"request": uuid}], None)

    assert at_once([partial(cycle, uuid) for uuid in uuids], 8) == ["ok"] * 8
    env.check()
    assert env.states()["Bound"] == 0


def test_profile_deleted_during_arq_create_leaves_no_partial_arqs(env: Env) -> None:
    profiles = build(DeviceProfiles, env.uow)
    for n in range(4):
        name = f"short-{n}"
        rows.insert_profile(env.engine, name)
        calls = [partial(env.requests.create, name, None)] * 4
        outcomes = at_once([*calls, partial(profiles.delete, [name])], 5)
        remaining = rows.read(env.engine, schema.device_profiles, name=name)
        created = rows.read(env.engine, schema.arqs, device_profile_name=name)
        assert len(created) == outcomes[:4].count("ok")
        assert set(outcomes[:4]) <= {"ok", NotFound.__name__}
        assert outcomes[4] == (InUse.__name__ if created else "ok")
        assert len(remaining) == (1 if created else 0)


def test_profile_create_from_eight_threads_succeeds_once(env: Env) -> None:
    profiles = build(DeviceProfiles, env.uow)
    body = {"name": "one", "groups": rows.GROUPS}
    outcomes = Counter(at_once([lambda: profiles.create(body)] * 8, 8))
    assert outcomes == {"ok": 1, Conflict.__name__: 7}
