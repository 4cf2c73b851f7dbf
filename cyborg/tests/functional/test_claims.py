# SPDX-License-Identifier: Apache-2.0
"""Claims at once, from many threads, on each of the real databases."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.conductor.requests import Requests
from cyborg.core.errors import Conflict, CyborgError, InUse, NoHandle, NotFound
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.options import make_conf


class Bed:
    """Requests of one profile, bound from threads."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.uow = UnitOfWork(engine)
        self.requests = Requests(make_conf(), self.uow)
        self.profile = rows.profile(engine)

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
            tx.execute(sa.insert(schema.requests), rows_)
        return [str(row["uuid"]) for row in rows_]

    def bind(self, uuids: Sequence[str], instance: str, *cards: rows.Card) -> None:
        wishes = [
            {
                "request": uuid,
                "hostname": cards[n % len(cards)].host,
                "device_rp_uuid": cards[n % len(cards)].provider,
                "instance_uuid": instance,
            }
            for n, uuid in enumerate(uuids)
        ]
        self.requests.patch(wishes, "bind", None)

    def states(self) -> Counter[str]:
        return Counter(row["state"] for row in rows.read(self.engine, schema.requests))

    def check(self) -> None:
        """Hold what must be true at any moment: one handle for each Bound request, and no more."""
        bound = {row["id"] for row in rows.read(self.engine, schema.requests, state="Bound")}
        owners = [
            row["request_id"]
            for row in rows.read(self.engine, schema.attach_handles)
            if row["request_id"] is not None
        ]
        assert sorted(owners) == sorted(bound)
        assert set(self.states()) <= {"Initial", "Bound", "Unbound"}


@pytest.fixture
def bed(engine: sa.Engine) -> Bed:
    return Bed(engine)


def at_once(calls: Sequence[Callable[[], Any]], threads: int) -> list[str]:
    """Run calls from so many threads that start together; return "ok" or the error of each."""
    barrier = Barrier(min(threads, len(calls)))

    def one(n: int) -> str:
        if n < barrier.parties:
            barrier.wait(30)
        try:
            calls[n]()
        except CyborgError as bad:
            return type(bad).__name__
        return "ok"

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, range(len(calls))))


def test_64_requests_for_16_handles_from_32_threads(bed: Bed) -> None:
    card, uuids = rows.card(bed.engine, handles=16), bed.make(64)
    calls = [lambda u=uuid: bed.bind([u], str(uuid4()), card) for uuid in uuids]
    told = Counter(at_once(calls, 32))
    assert told == {"ok": 16, "NoHandle": 48}
    assert bed.states() == {"Bound": 16, "Initial": 48}
    bed.check()
    assert len(rows.read(bed.engine, schema.outbox)) == 16


def test_batches_get_all_or_nothing(bed: Bed) -> None:
    cards = [rows.card(bed.engine, address=f"0000:0{n}:00.0", handles=8) for n in range(2)]
    batches = [bed.make(3) for _ in range(12)]
    orders = [cards, cards[::-1]]
    calls = [
        lambda b=batch, n=n: bed.bind(b, str(uuid4()), *orders[n % 2])
        for n, batch in enumerate(batches)
    ]
    told = Counter(at_once(calls, 12))
    assert set(told) <= {"ok", "NoHandle"}
    assert bed.states()["Bound"] == 3 * told["ok"]
    # 16 handles hold at most five batches; two and one of each card, at least four fit.
    assert 4 <= told["ok"] <= 5
    bed.check()


def test_one_request_from_eight_threads_takes_one_handle(bed: Bed) -> None:
    card, (uuid,), instance = rows.card(bed.engine), bed.make(1), str(uuid4())
    told = at_once([lambda: bed.bind([uuid], instance, card)] * 8, 8)
    assert told == ["ok"] * 8
    assert bed.states() == {"Bound": 1}
    bed.check()
    assert len(rows.read(bed.engine, schema.outbox)) == 1


def test_one_instance_from_eight_calls_takes_one(bed: Bed) -> None:
    card, batches, instance = rows.card(bed.engine), [bed.make(2) for _ in range(8)], str(uuid4())
    told = Counter(at_once([lambda b=b: bed.bind(b, instance, card) for b in batches], 8))
    assert told == {"ok": 1, "Conflict": 7}
    assert bed.states() == {"Bound": 2, "Initial": 14}
    bed.check()


def test_delete_and_bind_of_the_same_requests_leak_no_handle(bed: Bed) -> None:
    card, uuids = rows.card(bed.engine, handles=24), bed.make(24)
    binds = [lambda u=uuid: bed.bind([u], str(uuid4()), card) for uuid in uuids]
    deletes = [lambda u=uuid: bed.requests.delete([u], None, None, True) for uuid in uuids]
    told = at_once([call for pair in zip(binds, deletes, strict=True) for call in pair], 16)
    assert set(told[1::2]) == {"ok"}
    assert set(told[0::2]) <= {"ok", "NotFound"}
    assert bed.states() == {}
    bed.check()


def test_unbind_and_bind_again_in_a_storm(bed: Bed) -> None:
    card, uuids = rows.card(bed.engine, handles=4), bed.make(8)

    def cycle(uuid: str) -> None:
        for _ in range(3):
            try:
                bed.bind([uuid], str(uuid4()), card)
            except NoHandle:
                continue
            bed.requests.patch([{"request": uuid}], "unbind", None)

    assert at_once([lambda u=uuid: cycle(u) for uuid in uuids], 8) == ["ok"] * 8
    bed.check()
    assert bed.states()["Bound"] == 0


def test_a_profile_that_goes_while_requests_are_made(bed: Bed) -> None:
    profiles = DeviceProfiles(bed.uow)
    for n in range(4):
        name = f"short-{n}"
        rows.profile(bed.engine, name)
        calls = [lambda name=name: bed.requests.create(name, None)] * 4
        told = at_once([*calls, lambda name=name: profiles.delete([name])], 5)
        left = rows.read(bed.engine, schema.device_profiles, name=name)
        made = rows.read(bed.engine, schema.requests, device_profile_name=name)
        assert len(made) == told[:4].count("ok")
        assert set(told[:4]) <= {"ok", NotFound.__name__}
        assert told[4] == (InUse.__name__ if made else "ok")
        assert len(left) == (1 if made else 0)


def test_one_profile_name_from_eight_threads(bed: Bed) -> None:
    profiles = DeviceProfiles(bed.uow)
    body = {"name": "one", "groups": rows.GROUPS}
    told = Counter(at_once([lambda: profiles.create(body)] * 8, 8))
    assert told == {"ok": 1, Conflict.__name__: 7}
