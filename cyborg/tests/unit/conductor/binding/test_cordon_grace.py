# SPDX-License-Identifier: Apache-2.0
"""A bind of an instance that Placement served before a cordon of its device, on each database."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.binder import MAX_ATTEMPTS, InstanceAllocations
from cyborg.conductor.binding.binding import bind
from cyborg.conductor.binding.claim_plan import AllocationsUnread, BindContext
from cyborg.conductor.binding.claims import Retry
from cyborg.conductor.inventory.devices import Devices
from cyborg.core.binding.arqs import BindRequest
from cyborg.core.errors import NoHandle, Unavailable
from cyborg.core.inventory.device_state import is_in_grace
from cyborg.core.orphans.orphans import providers_to_check
from cyborg.db import schema
from cyborg.db.backends import desired as desired_backends
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.publisher_setup import Clock
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.machine.options import make_conf

PROJECT = "project-1"
START = Clock().now


class Allocations:
    """The allocations of Placement: those of every instance, None if Placement is away."""

    def __init__(self, units: dict[str, int] | None) -> None:
        self.units = units

    def find_allocations(self, instance: str) -> InstanceAllocations:
        if self.units is None:
            raise Unavailable("Placement is away")
        return InstanceAllocations(PROJECT, self.units)


class Env:
    """A card, and the services of a conductor; ``advance`` lets time pass."""

    def __init__(self, engine: sa.Engine, **card: Any) -> None:
        self.engine = engine
        self.clock = Clock()
        self.uow = UnitOfWork(engine)
        self.conf = make_conf()
        self.profile = rows.insert_profile(engine)
        self.card = rows.insert_card(engine, handles=4, **card)
        self.devices = build(Devices, self.uow, now=self.clock)
        (self.device,) = rows.read(engine, schema.devices)

    def set_status(self, status: str) -> None:
        self.devices.set_status(self.device["uuid"], status)

    def set_backend(self, status: str | None) -> None:
        """Set the desired status of the card's backend; None removes its desired state."""
        table = schema.desired_backends
        with self.engine.begin() as tx:
            tx.execute(sa.delete(table))
        if status is not None:
            (agent,) = rows.read(self.engine, schema.services) or [{}]
            id_ = agent.get("id") or rows.insert_agent(self.engine, self.card.host)
            rows.insert(
                self.engine,
                table,
                service_id=id_,
                backend=self.device["backend"],
                driver="fake",
                status=status,
                config={},
                generation=1,
            )
        self.uow.run(lambda tx: desired_backends.sync_cordon(tx, [self.card.host], self.clock.now))

    def bind(
        self, *allocated: str, number: int = 1, units: int | None = 1, instance: str | None = None
    ) -> str:
        """Bind new ARQs to an instance; ``units`` of each provider are allocated to it."""
        placement = None if units is None else dict.fromkeys(allocated, units)
        arqs = Arqs(self.conf, self.uow, owners=Allocations(placement), now=self.clock)
        instance = instance or str(uuid4())
        requests = [
            {
                "request": rows.insert_arq(self.engine, self.profile),
                "hostname": self.card.host,
                "device_rp_uuid": self.card.provider,
                "instance_uuid": instance,
            }
            for _ in range(number)
        ]
        arqs.bind(requests, None)
        return instance

    def count_owned(self) -> int:
        handles = rows.read(self.engine, schema.attach_handles)
        return sum(handle["arq_id"] is not None for handle in handles)

    def advance(self, seconds: float) -> None:
        self.clock.now += timedelta(seconds=seconds)


@pytest.fixture
def env(engine: sa.Engine) -> Env:
    return Env(engine)


@pytest.mark.parametrize(
    ("since", "seconds", "expected"),
    [
        (START, 0, True),
        (START, 600, True),
        (START, 601, False),
        (None, 0, False),
        (START + timedelta(seconds=5), 0, True),  # the clock of another conductor
    ],
)
def test_is_in_grace(since: Any, seconds: float, expected: bool) -> None:
    assert is_in_grace(since, START + timedelta(seconds=seconds), 600.0) is expected


@pytest.mark.parametrize("number", [1, 3])
def test_server_in_build_gets_its_device_after_it_was_disabled(env: Env, number: int) -> None:
    env.set_status("maintaining")
    env.bind(env.card.provider, number=number, units=number)
    assert env.count_owned() == number
    with pytest.raises(NoHandle, match="device is under maintenance"):
        env.bind(str(uuid4()))
    env.advance(601)
    with pytest.raises(NoHandle, match="device is under maintenance"):
        env.bind(env.card.provider)
    env.set_status("enabled")
    env.bind()
    assert env.count_owned() == number + 1


def test_driver_that_is_disabled_keeps_new_servers_away_only(env: Env) -> None:
    env.set_backend("disabled")
    env.bind(env.card.provider)
    with pytest.raises(NoHandle, match="its driver is disabled"):
        env.bind()
    # It is removed: nobody could clean the device.
    env.set_backend("absent")
    with pytest.raises(NoHandle, match="its driver is disabled"):
        env.bind(env.card.provider)
    env.set_backend(None)
    env.bind()
    assert env.count_owned() == 2


def test_grace_begins_with_the_first_cordon(env: Env) -> None:
    env.set_backend("disabled")
    env.advance(500)
    env.set_status("maintaining")
    env.advance(200)
    with pytest.raises(NoHandle):
        env.bind(env.card.provider)
    env.set_backend(None)
    with pytest.raises(NoHandle, match="under maintenance"):
        env.bind(env.card.provider)
    env.set_status("enabled")
    assert rows.read(env.engine, schema.devices)[0]["cordoned_since"] is None


@pytest.mark.parametrize(
    "fault", [{"health": "unhealthy"}, {"draining": True}, {"deliverable": False}]
)
def test_device_that_cannot_be_used_is_refused(
    sqlite_engine: sa.Engine, fault: dict[str, Any]
) -> None:
    env = Env(sqlite_engine, **fault)
    env.set_status("maintaining")
    with pytest.raises(NoHandle):
        env.bind(env.card.provider)
    assert env.count_owned() == 0


def test_device_that_is_being_programmed_is_refused(sqlite_engine: sa.Engine) -> None:
    env = Env(sqlite_engine)
    env.set_status("maintaining")
    values = {"host": env.card.host, "subject": "s", "arguments": {}, "next_try_at": START}
    job = rows.insert(sqlite_engine, schema.jobs, kind="program", **values)
    with sqlite_engine.begin() as tx:
        tx.execute(sa.update(schema.deployables).values(job_id=job))
    with pytest.raises(NoHandle, match="being programmed"):
        env.bind(env.card.provider)


def test_grace_of_0_refuses(sqlite_engine: sa.Engine) -> None:
    env = Env(sqlite_engine)
    env.conf.set_override("cordon_grace", 0.0, "conductor")
    env.set_status("maintaining")
    env.advance(0.001)
    with pytest.raises(NoHandle):
        env.bind(env.card.provider)


def test_allocation_is_served_once(env: Env) -> None:
    """The instance has no other unit in Placement, and later servers none at all."""
    env.set_status("maintaining")
    with pytest.raises(NoHandle, match="under maintenance"):
        env.bind(env.card.provider, number=2, units=1)
    instance = env.bind(env.card.provider)
    arq = rows.insert_arq(env.engine, env.profile)
    request = BindRequest(arq, env.card.host, env.card.provider, instance)
    context = BindContext(
        now=env.clock.now,
        prepare_timeout=60.0,
        allocated={env.card.provider: 1},
        cordon_grace=600.0,
    )
    with pytest.raises(NoHandle, match="under maintenance"):  # such as by an attachment
        env.uow.run(lambda tx: bind(tx, [request], None, context, wait=True, append=True))
    assert env.count_owned() == 1


def test_bind_without_an_answer_of_placement_is_unavailable(sqlite_engine: sa.Engine) -> None:
    env = Env(sqlite_engine)
    env.bind(units=None)
    env.set_status("maintaining")
    with pytest.raises(Unavailable, match="before its device was cordoned: Placement is away"):
        env.bind(units=None)
    env.advance(601)
    with pytest.raises(NoHandle):
        env.bind(units=None)


def test_query_of_placement_uses_up_no_attempt(sqlite_engine: sa.Engine) -> None:
    env = Env(sqlite_engine)
    binder = Arqs(env.conf, env.uow, owners=Allocations({"provider": 1})).binder
    calls: list[bool] = []

    def claim(_: sa.Connection, context: BindContext, wait: bool) -> dict[str, int]:
        calls.append(wait)
        if context.allocated is None:
            raise AllocationsUnread("instance")
        if len(calls) <= MAX_ATTEMPTS:
            raise Retry("taken")
        return dict(context.allocated)

    assert binder.run([], binder.make_context(), claim) == {"provider": 1}
    assert calls == [False, False, True, True, True]


def test_full_device_in_grace_says_that_its_handles_are_taken(sqlite_engine: sa.Engine) -> None:
    """Orphans are searched only then."""
    env = Env(sqlite_engine)
    env.bind(number=4)
    env.set_status("maintaining")
    with pytest.raises(NoHandle, match="handle is taken") as found:
        env.bind(env.card.provider)
    assert "maintenance" not in found.value.message
    assert list(providers_to_check(found.value.details["reasons"])) == [env.card.provider]


def test_bind_without_grace_honours_no_cordon_that_begins_during_it() -> None:
    """Binds of attachments have no grace: they could not read the allocations."""
    assert not is_in_grace(START + timedelta(milliseconds=5), START, 0.0)


def test_bind_that_is_undone_at_each_attempt_logs_the_reasons(
    sqlite_engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    env = Env(sqlite_engine)
    binder = Arqs(env.conf, env.uow).binder
    reasons = iter(
        ["a slot was taken", "a handle was taken", "the agent is down", "an ARQ changed"]
    )

    def claim(tx: sa.Connection, context: BindContext, wait: bool) -> None:
        raise Retry(next(reasons))

    with pytest.raises(NoHandle, match="4 attempts"):
        binder.run([], binder.make_context(), claim)
    assert (
        "Bind was undone at each attempt: a slot was taken; a handle was taken; the agent is down; "
        "an ARQ changed" in caplog.text
    )
