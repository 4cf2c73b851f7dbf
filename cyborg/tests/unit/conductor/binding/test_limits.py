# SPDX-License-Identifier: Apache-2.0
"""The limits of units of a project, on each kind of database."""

import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.binder import InstanceAllocations
from cyborg.conductor.binding.limits import StaticLimits, make_source
from cyborg.conductor.service import ConductorService
from cyborg.core.binding.limits import Limits
from cyborg.core.errors import Misconfigured, OverLimit, Unavailable
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.hosts.context_work import ContextEnv
from cyborg.tests.fixtures.machine.options import make_conf

LIMIT = 10
THREADS = 32
PROJECT = "project-1"


class Owners:
    """The owner of every instance is one project."""

    def __init__(self, project: str | None) -> None:
        self.project = project

    def find_allocations(self, instance: str) -> InstanceAllocations:
        return InstanceAllocations(self.project)


def make_arqs(
    engine: sa.Engine,
    default: Mapping[str, Any] | None = None,
    projects: tuple[str, ...] = (),
    owner: str | None = None,
    now: Callable[[], datetime] | None = None,
) -> Arqs:
    quota = {
        "driver": "static",
        "default_limits": {"FPGA": str(LIMIT)} if default is None else default,
        "project_limits": list(projects),
    }
    conf, uow = make_conf(quota=quota), UnitOfWork(engine)
    source = make_source(conf)
    assert source is not None
    owners = None if owner is None else Owners(owner)
    return Arqs(conf, uow, owners=owners, limit_source=source, now=now)


def bind(arqs: Arqs, card: rows.Card, *uuids: str, **changed: Any) -> str:
    instance = str(uuid4())
    item = {"hostname": card.host, "device_rp_uuid": card.provider, "instance_uuid": instance}
    arqs.bind([{"request": uuid, **item, **changed} for uuid in uuids], None)
    return instance


def run_together(work: Callable[[int], None], count: int = THREADS) -> list[OverLimit]:
    """Run the work in threads at the same time; return the refusals. Raise other errors."""
    start, errors = threading.Barrier(count), list[Exception]()

    def run(number: int) -> None:
        start.wait()
        try:
            work(number)
        except Exception as exc:  # noqa: BLE001  checked by the test
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    refused = [error for error in errors if isinstance(error, OverLimit)]
    assert len(refused) == len(errors), [repr(error) for error in errors]
    return refused


def states(engine: sa.Engine) -> list[str]:
    return sorted(row["state"] for row in rows.read(engine, schema.arqs))


def test_concurrent_creates_stop_exactly_at_the_limit(engine: sa.Engine) -> None:
    rows.insert_profile(engine)
    # As of two conductors.
    conductors = [make_arqs(engine), make_arqs(engine)]
    refused = run_together(lambda n: void(conductors[n % 2].create("fpga", PROJECT, PROJECT)))
    assert len(refused) == THREADS - LIMIT
    assert len(rows.read(engine, schema.arqs)) == LIMIT


def void(_: object) -> None:
    """Discard a result."""


def test_concurrent_creates_of_two_units_do_not_exceed_the_limit(engine: sa.Engine) -> None:
    rows.insert_profile(engine, "three", [{"resources:FPGA": "3"}])
    arqs = make_arqs(engine)
    refused = run_together(lambda n: void(arqs.create("three", PROJECT, PROJECT)), 8)
    assert len(refused) == 5
    assert len(rows.read(engine, schema.arqs)) == 9


def test_concurrent_binds_to_another_project_stop_exactly_at_the_limit(engine: sa.Engine) -> None:
    """An administrator evacuates servers: their ARQs belong to the project of the servers."""
    profile = rows.insert_profile(engine)
    card = rows.insert_card(engine, handles=THREADS)
    uuids = [rows.insert_arq(engine, profile, project_id="admins") for _ in range(THREADS)]
    conductors = [make_arqs(engine, owner=PROJECT), make_arqs(engine, owner=PROJECT)]
    refused = run_together(lambda n: void(bind(conductors[n % 2], card, uuids[n])))
    assert len(refused) == THREADS - LIMIT
    assert states(engine) == ["Bound"] * LIMIT + ["Initial"] * (THREADS - LIMIT)
    assert len(rows.read(engine, schema.arqs, project_id=PROJECT)) == LIMIT
    owned = [row for row in rows.read(engine, schema.attach_handles) if row["arq_id"]]
    assert len(owned) == LIMIT


def test_concurrent_binds_after_the_limit_was_lowered_stop_at_the_limit(engine: sa.Engine) -> None:
    profile = rows.insert_profile(engine)
    card = rows.insert_card(engine, handles=THREADS)
    uuids = [rows.insert_arq(engine, profile, project_id=PROJECT) for _ in range(THREADS)]
    arqs = make_arqs(engine)
    refused = run_together(lambda n: void(bind(arqs, card, uuids[n])))
    assert len(refused) == THREADS - LIMIT
    assert states(engine).count("Bound") == LIMIT


def test_concurrent_leases_stop_exactly_at_the_limit(engine: sa.Engine) -> None:
    env = ContextEnv(engine)
    card = env.add_card(handles=THREADS, host="host-2", abilities=[])
    contexts = [env.create(resources={"FPGA": 1}) for _ in range(THREADS)]
    conductors = []
    for _ in range(2):
        env.arqs = make_arqs(engine, now=env.now)
        conductors.append(env.new_leases())
    body = {"hostname": card.host, "mappings": {"0": [card.provider]}}

    def reserve(n: int) -> None:
        conductors[n % 2].pre_bind(contexts[n], body, PROJECT)

    refused = run_together(reserve)
    assert len(refused) == THREADS - LIMIT
    found = [env.row(context) for context in contexts]
    leased = [row for row in found if row["state"] == "reserved"]
    assert [(row["epoch"], row["hostname"]) for row in leased] == [(1, card.host)] * LIMIT
    others = [row for row in found if row not in leased]
    assert {(r["state"], r["epoch"], r["hostname"], r["lease_expires_at"]) for r in others} == {
        ("unbound", 0, None, None)
    }
    assert states(engine).count("Bound") == env.handles()["owned"] == LIMIT
    # A renewal needs no more units; the end of a lease returns them.
    number, other = contexts.index(leased[0]["uuid"]), contexts.index(others[0]["uuid"])
    conductors[0].pre_bind(contexts[number], {**body, "epoch": 1}, PROJECT)
    with pytest.raises(OverLimit):
        reserve(other)
    conductors[1].unbind(contexts[number], {"epoch": 1}, PROJECT)
    reserve(other)
    assert env.handles()["owned"] == LIMIT


def test_creates_and_binds_of_one_project_together_do_not_exceed_the_limit(
    engine: sa.Engine,
) -> None:
    profile = rows.insert_profile(engine)
    card = rows.insert_card(engine, handles=THREADS)
    uuids = [rows.insert_arq(engine, profile, project_id="admins") for _ in range(16)]
    arqs = make_arqs(engine, owner=PROJECT)

    def work(n: int) -> None:
        if n < 16:
            bind(arqs, card, uuids[n])
        else:
            arqs.create("fpga", PROJECT, PROJECT)

    run_together(work)
    bound = [row for row in rows.read(engine, schema.arqs) if row["state"] == "Bound"]
    assert len(bound) == LIMIT
    # The limit of a create includes what was bound before it, so creates found less than 10.
    assert len(rows.read(engine, schema.arqs, state="Initial", project_id=PROJECT)) <= LIMIT


def test_over_limit_error_names_project_class_and_counts(sqlite_engine: sa.Engine) -> None:
    rows.insert_profile(sqlite_engine, "three", [{"resources:FPGA": "3"}])
    arqs = make_arqs(sqlite_engine, {"FPGA": "5"})
    arqs.create("three", PROJECT, PROJECT)
    with pytest.raises(OverLimit, match="project project-1 uses 3 units of FPGA") as raised:
        arqs.create("three", PROJECT, PROJECT)
    assert raised.value.details == {
        "project_id": PROJECT,
        "resource_class": "FPGA",
        "limit": 5,
        "used": 3,
        "requested": 3,
    }
    assert len(rows.read(sqlite_engine, schema.arqs)) == 3


def test_limits_are_separate_by_project_and_class(engine: sa.Engine) -> None:
    rows.insert_profile(engine)
    rows.insert_profile(engine, "gpu", [{"resources:PGPU": "2"}])
    arqs = make_arqs(engine, {"FPGA": "1", "PGPU": "2"}, ("big:FPGA:3", "free:FPGA:-1"))
    for project, count in (("p", 1), ("big", 3)):
        for _ in range(count):
            arqs.create("fpga", project, project)
        with pytest.raises(OverLimit):
            arqs.create("fpga", project, project)
    arqs.create("gpu", "p", "p")
    for _ in range(5):
        arqs.create("fpga", "free", "free")
        arqs.create("fpga", None, None)
    with pytest.raises(OverLimit):
        arqs.create("gpu", "p", "p")


def test_administrator_creates_arqs_of_other_projects(engine: sa.Engine) -> None:
    """An evacuation is not limited in the project of the administrator, but in that of the server.

    The token has the project "admin", whose limit is 0.
    """
    rows.insert_profile(engine)
    card = rows.insert_card(engine, handles=4)
    arqs = make_arqs(engine, {"FPGA": "1"}, ("admin:FPGA:0",))
    first, second = (arqs.create("fpga", "admin")["arqs"][0]["uuid"] for _ in range(2))
    request = {"hostname": card.host, "device_rp_uuid": card.provider, "project_id": PROJECT}
    arqs.bind([{**request, "request": first, "instance_uuid": str(uuid4())}], None)
    with pytest.raises(OverLimit, match=f"project {PROJECT} has bound 1 units"):
        arqs.bind([{**request, "request": second, "instance_uuid": str(uuid4())}], None)


def test_delete_returns_units(engine: sa.Engine) -> None:
    rows.insert_profile(engine)
    arqs = make_arqs(engine, {"FPGA": "1"})
    (arq,) = arqs.create("fpga", PROJECT, PROJECT)["arqs"]
    instance = bind(arqs, rows.insert_card(engine, handles=2), arq["uuid"])
    with pytest.raises(OverLimit):
        arqs.create("fpga", PROJECT, PROJECT)
    arqs.delete(None, instance, None, True)
    assert len(arqs.create("fpga", PROJECT, PROJECT)["arqs"]) == 1


def test_unbind_returns_bound_units_and_keeps_used_units(engine: sa.Engine) -> None:
    profile = rows.insert_profile(engine)
    card = rows.insert_card(engine, handles=3)
    first, second = (rows.insert_arq(engine, profile, project_id=PROJECT) for _ in range(2))
    arqs = make_arqs(engine, {"FPGA": "1"})
    bind(arqs, card, first)
    with pytest.raises(OverLimit, match="has bound 1 units of FPGA and the limit is 1") as raised:
        bind(arqs, card, second)
    assert (raised.value.details["used"], raised.value.details["requested"]) == (1, 1)
    arqs.unbind([{"request": first}], None)
    with pytest.raises(OverLimit):
        arqs.create("fpga", PROJECT, PROJECT)
    bind(arqs, card, second)


def test_lowered_limit_rejects_new_units_and_keeps_bound_ones(engine: sa.Engine) -> None:
    profile = rows.insert_profile(engine)
    card = rows.insert_card(engine, handles=8)
    uuids = [rows.insert_arq(engine, profile, project_id=PROJECT) for _ in range(5)]
    instance = bind(make_arqs(engine), card, *uuids[:4])
    before = rows.read(engine, schema.arqs), rows.read(engine, schema.attach_handles)
    lowered = make_arqs(engine, {"FPGA": "2"})
    with pytest.raises(OverLimit):
        lowered.create("fpga", PROJECT, PROJECT)
    with pytest.raises(OverLimit):
        bind(lowered, card, uuids[4])
    # A repeated bind of Nova still succeeds.
    lowered.bind(
        [
            {
                "request": uuid,
                "hostname": card.host,
                "device_rp_uuid": card.provider,
                "instance_uuid": instance,
            }
            for uuid in uuids[:4]
        ],
        None,
    )
    assert (rows.read(engine, schema.arqs), rows.read(engine, schema.attach_handles)) == before


def test_bind_of_several_projects_checks_each(engine: sa.Engine) -> None:
    profile = rows.insert_profile(engine)
    card = rows.insert_card(engine, handles=8)
    uuids = [rows.insert_arq(engine, profile, project_id=f"p{n}") for n in (2, 1, 2)]
    arqs = make_arqs(engine, {"FPGA": "2"}, ("p1:FPGA:0",))
    with pytest.raises(OverLimit, match="project p1"):
        bind(arqs, card, *uuids)
    assert states(engine) == ["Initial"] * 3
    bind(arqs, card, uuids[0], uuids[2])


@pytest.mark.parametrize(
    ("default", "statements"), [(None, 2), ({"PGPU": "1"}, 0)], ids=["limited", "not limited"]
)
def test_limits_add_two_statements(
    engine: sa.Engine, default: Mapping[str, str] | None, statements: int
) -> None:
    rows.insert_profile(engine)
    card = rows.insert_card(engine, handles=8)
    with_limits = make_arqs(engine, default)
    without = Arqs(make_conf(), UnitOfWork(engine))
    costs = []
    for arqs in (with_limits, with_limits, without):
        with count_statements(engine) as creating:
            (arq,) = arqs.create("fpga", PROJECT, PROJECT)["arqs"]
        with count_statements(engine) as binding:
            bind(arqs, card, arq["uuid"])
        costs.append((len(creating), len(binding)))
    # The first call of a project also inserts its row.
    _, limited, unlimited = costs
    assert [a - b for a, b in zip(limited, unlimited, strict=True)] == [statements, statements]


def test_rolled_back_create_leaves_no_units(sqlite_engine: sa.Engine) -> None:
    """The count comes from the ARQs themselves, so a crash before the commit cannot change it."""
    rows.insert_profile(sqlite_engine)
    arqs = make_arqs(sqlite_engine, {"FPGA": "1"})

    def fail(connection: sa.Connection) -> None:
        raise KeyboardInterrupt

    sa.event.listen(sqlite_engine, "commit", fail)
    with pytest.raises(KeyboardInterrupt):
        arqs.create("fpga", PROJECT, PROJECT)
    sa.event.remove(sqlite_engine, "commit", fail)
    assert rows.read(sqlite_engine, schema.arqs) == []
    assert len(arqs.create("fpga", PROJECT, PROJECT)["arqs"]) == 1


class ChangingSource:
    """A source whose limits are unavailable at first."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def known(self, project: str) -> None:
        return None

    def find(self, project: str) -> Limits:
        self.calls.append(project)
        if len(self.calls) == 1:
            raise Unavailable("keystone does not answer")
        return Limits(project, {"FPGA": 1})


def test_create_fails_if_the_limits_are_unavailable(sqlite_engine: sa.Engine) -> None:
    rows.insert_profile(sqlite_engine)
    uow, source = UnitOfWork(sqlite_engine), ChangingSource()
    arqs = Arqs(make_conf(), uow, limit_source=source)
    with pytest.raises(Unavailable):
        arqs.create("fpga", PROJECT, PROJECT)
    assert rows.read(sqlite_engine, schema.arqs) == []
    arqs.create("fpga", PROJECT, PROJECT)
    assert source.calls == [PROJECT, PROJECT]


def test_bind_finds_the_limits_of_projects_that_only_the_arqs_name(engine: sa.Engine) -> None:
    profile = rows.insert_profile(engine)
    card = rows.insert_card(engine, handles=8)
    uuids = [rows.insert_arq(engine, profile, project_id=f"p{n}") for n in range(4)]
    uow, source = UnitOfWork(engine), ChangingSource()
    arqs = Arqs(make_conf(), uow, limit_source=source)
    with pytest.raises(Unavailable):
        bind(arqs, card, *uuids)
    assert states(engine) == ["Initial"] * 4
    bind(arqs, card, *uuids)
    assert states(engine) == ["Bound"] * 4
    assert set(source.calls[1:]) == {"p0", "p1", "p2", "p3"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"default_limits": {"FPGA": "many"}}, r"\[quota\] default_limits: 'FPGA:many'"),
        ({"default_limits": {"FPGA": "-2"}}, "expected -1"),
        ({"default_limits": {"fpga": "1"}}, "neither a standard resource class nor CUSTOM_"),
        ({"project_limits": ["p:FPGA"]}, r"\[quota\] project_limits: 'p:FPGA': expected PROJECT:"),
        ({"project_limits": [":FPGA:1"]}, "expected PROJECT:"),
        ({"project_limits": ["p:FPGA:1.5"]}, "no limit"),
        ({"project_limits": ["p:FPGA:99999999999"]}, "no limit"),
        ({"project_limits": ["p:FPGA:1", "p:FPGA:2"]}, "a second limit of FPGA"),
    ],
)
def test_invalid_option_is_misconfigured(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(Misconfigured, match=message) as raised:
        make_source(make_conf(quota={"driver": "static", **options}))
    assert raised.value.details["option"] in ("[quota] default_limits", "[quota] project_limits")


def test_conductor_with_invalid_limit_does_not_start() -> None:
    conf = make_conf(quota={"driver": "static", "default_limits": {"FPGA": "many"}})
    with pytest.raises(Misconfigured, match="'FPGA:many'"):
        ConductorService(conf).open()


def test_limits_of_project_replace_default_limits() -> None:
    quota = {
        "driver": "static",
        "default_limits": {"FPGA": "1", "CUSTOM_QAT": "4"},
        "project_limits": ["p:FPGA:7", "p: PGPU: -1"],
    }
    source = StaticLimits(make_conf(quota=quota))
    assert source.find("p").units == {"FPGA": 7, "CUSTOM_QAT": 4, "PGPU": -1}
    assert source.find("other").units == {"FPGA": 1, "CUSTOM_QAT": 4}
    assert source.known("p").limited(["PGPU", "FPGA", "VGPU"]) == ["FPGA"]


def test_driver_none_has_no_limits() -> None:
    assert make_source(make_conf()) is None
