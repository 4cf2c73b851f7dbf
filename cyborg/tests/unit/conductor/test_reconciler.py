# SPDX-License-Identifier: Apache-2.0
"""A round of the reconciler, against a real Placement and each kind of database."""

import logging
from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor import reconciler as module
from cyborg.conductor.owners import NOBODY, Owners
from cyborg.conductor.reconciler import Reconciler, Tally
from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.leaks import GRACE, INTERVAL, START, Bed
from cyborg.fixtures.options import make_conf

__all__ = ["node", "placement_adapter"]


@pytest.fixture
def bed(engine: sa.Engine, node: Node) -> Bed:
    return Bed(engine, node)


@pytest.fixture
def light(sqlite_engine: sa.Engine, node: Node) -> Bed:
    """A bed on one database, for what no database does its own way."""
    return Bed(sqlite_engine, node)


def test_an_orphan_is_suspected_and_freed_after_the_grace(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    card = bed.card()
    stays, lost = bed.bound(card), bed.bound(card)
    bed.later()
    assert bed.row(lost)["orphan_since"] is None
    bed.deallocate(lost)
    bed.later()
    suspected = bed.row(lost)
    assert (suspected["state"], suspected["orphan_since"]) == ("Bound", bed.now)
    assert suspected["updated_at"] == START - timedelta(days=1)
    bed.later(GRACE - 1)
    assert bed.row(lost)["state"] == "Bound"
    bed.later(INTERVAL)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"Request {lost} is an orphan and was unbound: instance {suspected['instance_uuid']} has "
        f"had no allocation on resource provider {card.provider} since {suspected['orphan_since']}"
    ]
    freed = bed.row(lost)
    assert (freed["state"], freed["instance_uuid"], freed["device_rp_uuid"]) == (
        "Unbound",
        None,
        None,
    )
    assert freed["orphan_since"] is None
    assert bed.handles(lost) == []
    assert (bed.row(stays)["state"], len(bed.handles(stays))) == ("Bound", 1)
    told = bed.deeds()
    assert (told["orphans_suspected"], told["orphans_freed"], told["reconciled"]) == (1, 1, 4)


def test_an_allocation_that_comes_back_ends_the_suspicion(bed: Bed) -> None:
    lost = bed.bound(bed.card(), allocated=False)
    bed.later()
    assert bed.row(lost)["orphan_since"] == bed.now
    bed.allocate(lost)
    assert bed.later().recovered == 1
    assert bed.row(lost)["orphan_since"] is None
    bed.deallocate(lost)
    bed.later(GRACE)
    # Suspected anew: the grace begins anew.
    assert (bed.row(lost)["state"], bed.row(lost)["orphan_since"]) == ("Bound", bed.now)


def test_a_young_bind_is_not_suspected(light: Bed) -> None:
    lost = light.bound(light.card(), allocated=False, updated_at=START)
    light.later(GRACE - 1)
    assert light.row(lost)["orphan_since"] is None
    light.later(INTERVAL)
    assert light.row(lost)["orphan_since"] == light.now


def test_no_decision_without_a_view(light: Bed) -> None:
    """Placement away, or without the provider: neither suspicion nor recovery, and no release."""
    card = light.card()
    lost = light.bound(card, allocated=False, orphan_since=START - timedelta(days=1))
    unknown = rows.card(light.engine, light.node.name, "0000:77:00.0")
    hidden = light.bound(unknown, allocated=False, orphan_since=START - timedelta(days=1))
    light.placement.away = True
    with pytest.raises(Unavailable):
        light.later()
    assert {light.row(one)["state"] for one in (lost, hidden)} == {"Bound"}
    light.placement.away = False
    assert light.later().freed == 1
    assert (light.row(lost)["state"], light.row(hidden)["state"]) == ("Unbound", "Bound")


def test_each_provider_is_asked_once_whatever_the_pages(
    light: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    cards = [light.card(n, handles=5) for n in range(3)]
    kept = [light.bound(card) for card in cards for _ in range(5)]
    tally = light.later()
    assert tally.judged == len(kept)
    assert sorted(light.placement.asked) == sorted(card.provider for card in cards)
    assert (tally.suspected, tally.freed) == (0, 0)
    for uuid in kept[::2]:
        light.deallocate(uuid)
    assert light.later().suspected == len(kept[::2])
    assert light.later(GRACE).freed == len(kept[::2])
    assert {light.row(uuid)["state"] for uuid in kept[::2]} == {"Unbound"}
    assert {light.row(uuid)["state"] for uuid in kept[1::2]} == {"Bound"}


def test_a_round_that_finds_nothing_is_two_statements(light: Bed) -> None:
    card = light.card(handles=12)
    for _ in range(12):
        light.bound(card)
    light.later()
    with counting(light.engine) as counted:
        light.later()
    assert len(counted) == 2, counted.statements  # the turn, and one page


@pytest.mark.parametrize("change", ["allocated", "unbound", "rebound"])
def test_what_happens_just_before_the_release_counts(bed: Bed, change: str) -> None:
    """The second question is the last moment at which anything can come in between."""
    card = bed.card()
    lost = bed.bound(card, allocated=False, orphan_since=START - timedelta(days=1))
    id_ = bed.row(lost)["id"]

    def meanwhile() -> None:
        if len(bed.placement.asked) < 2:
            return
        bed.placement.before_answer = lambda: None
        if change == "allocated":
            bed.allocate(lost)
        elif change == "unbound":
            rows.change(bed.engine, schema.requests, id_, state="Unbound", orphan_since=None)
        else:
            rows.change(
                bed.engine,
                schema.requests,
                id_,
                instance_uuid=str(uuid4()),
                orphan_since=None,
            )

    bed.placement.before_answer = meanwhile
    assert bed.later().freed == 0
    assert len(bed.placement.asked) == 2
    assert bed.row(lost)["state"] == ("Unbound" if change == "unbound" else "Bound")
    assert len(bed.handles(lost)) == 1
    assert "orphans_freed" not in bed.deeds()


def test_conductors_take_turns(bed: Bed) -> None:
    bed.bound(bed.card())
    other = bed.another()
    assert bed.reconciler.run_once() is not None
    assert other.run_once() is None
    bed.now += timedelta(seconds=INTERVAL - 1)
    assert (bed.reconciler.run_once(), other.run_once()) == (None, None)
    bed.now += timedelta(seconds=1)
    assert other.run_once() is not None
    assert bed.reconciler.run_once() is None
    assert len(bed.placement.asked) == 2


def test_a_grace_of_zero_only_reports(sqlite_engine: sa.Engine, node: Node) -> None:
    bed = Bed(sqlite_engine, node, orphan_grace=0.0)
    lost = bed.bound(bed.card(), allocated=False)
    bed.later()
    for _ in range(3):
        assert bed.later(10 * GRACE).freed == 0
    assert bed.row(lost)["state"] == "Bound"
    assert bed.row(lost)["orphan_since"] == START + timedelta(seconds=INTERVAL)


def test_without_nova_nobody_allocates(light: Bed) -> None:
    lost = light.bound(light.card(), allocated=False)
    conf = make_conf(nova={"notify": False})
    quiet = Reconciler(conf, UnitOfWork(light.engine), light.placement, now=lambda: light.now)
    assert quiet.run_once() == Tally()
    assert (light.placement.asked, light.row(lost)["orphan_since"]) == ([], None)
    # An operator who sets a grace means it.
    conf.set_override("orphan_grace", 60.0, group="conductor")
    light.now += timedelta(seconds=INTERVAL)
    quiet.run_once()
    assert light.row(lost)["orphan_since"] == light.now


def test_when_placement_has_lost_all_nothing_is_freed(
    light: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    card = light.card(handles=30)
    since = START - timedelta(days=1)
    lost = [light.bound(card, allocated=False, orphan_since=since) for _ in range(21)]
    assert light.later().freed == 0
    assert "21 of 21 bound requests have no allocation" in caplog.text
    assert {light.row(uuid)["state"] for uuid in lost} == {"Bound"}
    light.allocate(lost[0])
    assert light.later().freed == 20


def test_owners_are_settled_when_placement_knows_them(bed: Bed) -> None:
    card = bed.card()
    mine, nobody, absent, known = (
        bed.bound(card, allocated=False, owner_known=False, project_id="admins") for _ in range(4)
    )
    bed.allocate(mine, "project-2")
    bed.allocate(nobody, NOBODY)
    bed.allocate(known, "project-3")
    rows.change(bed.engine, schema.requests, bed.row(known)["id"], owner_known=True)
    assert bed.later().settled == 1
    assert [
        (bed.row(uuid)["project_id"], bool(bed.row(uuid)["owner_known"]))
        for uuid in (mine, nobody, absent, known)
    ] == [("project-2", True), ("admins", False), ("admins", False), ("admins", True)]
    assert bed.deeds()["owners_settled"] == 1


def test_owners_tell_what_placement_tells(light: Bed) -> None:
    uuid = light.bound(light.card())
    owners = Owners(light.placement)
    assert owners.project_of(light.row(uuid)["instance_uuid"]) == "project-1"
    assert owners.project_of(str(uuid4())) is None


def test_old_requests_that_nobody_holds_are_deleted(engine: sa.Engine, node: Node) -> None:
    bed = Bed(engine, node, unbound_ttl=3600.0)
    card = bed.card()
    old, young = START - timedelta(seconds=7200), START - timedelta(seconds=60)
    gone = [
        rows.request(engine, bed.profile, state=state, created_at=old, **values)
        for state, values in (
            ("Initial", {}),
            ("Unbound", {"updated_at": old}),
            ("BindFailed", {"updated_at": old}),
        )
    ]
    kept = [
        bed.bound(card, updated_at=old),
        rows.request(engine, bed.profile, created_at=young),
        rows.request(engine, bed.profile, created_at=old, state="Unbound", updated_at=young),
    ]
    assert bed.later().expired == 3
    left = {row["uuid"] for row in rows.read(engine, schema.requests)}
    assert left == set(kept)
    assert left.isdisjoint(gone)
    assert bed.deeds()["unbound_expired"] == 3


def test_by_default_they_are_kept(light: Bed) -> None:
    uuid = rows.request(light.engine, light.profile, created_at=START - timedelta(days=3650))
    light.later()
    assert light.row(uuid)["state"] == "Initial"


def test_a_prepared_handle_goes_to_be_cleaned(light: Bed) -> None:
    lost = light.bound(light.card(), allocated=False, orphan_since=START - timedelta(seconds=GRACE))
    (handle,) = light.handles(lost)
    rows.change(light.engine, schema.attach_handles, handle["id"], prepared=True)
    assert light.later().freed == 1
    (after,) = rows.read(light.engine, schema.attach_handles, id=handle["id"])
    (job,) = rows.read(light.engine, schema.jobs)
    assert (after["request_id"], bool(after["prepared"]), after["job_id"]) == (
        None,
        True,
        job["id"],
    )
    assert (job["kind"], light.woken) == ("release", 1)


def test_a_stopped_one_frees_nothing(light: Bed) -> None:
    lost = light.bound(light.card(), allocated=False, orphan_since=START - timedelta(days=1))
    light.reconciler.stop()
    assert light.later() == Tally()
    assert light.row(lost)["state"] == "Bound"
