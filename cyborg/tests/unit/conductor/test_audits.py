# SPDX-License-Identifier: Apache-2.0
"""Audits on each kind of database, with a real Placement and a Nova on a socket."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor import audit_lease, audits
from cyborg.core import names
from cyborg.core.errors import Conflict, Invalid, NotFound, Unavailable
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.fixtures import rows
from cyborg.fixtures.audits import Bed
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.hosts import card
from cyborg.fixtures.nova import FakeNova

__all__ = ["node", "placement_adapter"]


@pytest.fixture
def bed(engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Bed:
    return Bed(engine, node, fake_nova)


@pytest.fixture
def light(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Bed:
    """A bed on one database, for what no database does its own way."""
    return Bed(sqlite_engine, node, fake_nova)


def test_four_sides_that_agree(bed: Bed) -> None:
    row = bed.audit()
    assert (row["state"], row["findings"], row["found"]) == ("DONE", [], 0)
    assert (row["done"], row["total"], row["owner"]) == (1, 1, None)
    assert row["sides"] == ["hardware", "database", "placement", "nova"]
    assert (bed.paused, len(bed.nova.asked)) == ([], 2)


def test_each_side_disagrees_and_safe_repairs_are_made(bed: Bed) -> None:
    lost = bed.leftover()
    bed.agents.devices[bed.host.name] = [card(0), card(1), card(2)]
    bed.node.client.put(
        f"/resource_providers/{bed.provider(1)}/traits",
        json={"resource_provider_generation": generation(bed, 1), "traits": []},
    )
    stranger = bed.node.allocate(bed.provider(1), "CUSTOM_FAKE")
    (dirty,) = rows.read(bed.engine, schema.attach_handles, request_id=None)[-1:]
    rows.change(bed.engine, schema.attach_handles, dirty["id"], prepared=True)
    del bed.nova.servers[bed.instance]
    expected = [
        ("device_unrecorded", "device 0000:02:00.0"),
        ("traits_differ", f"provider {bed.host.name}_0000:01:00.0"),
        ("provider_leftover", f"provider {bed.host.name}_lost"),
        ("handle_dirty", "handle 0000:01:00.0/0001"),
        ("instance_gone", f"request {bed.request}"),
        ("allocation_unused", f"instance {stranger} on {bed.host.name}_0000:01:00.0"),
    ]
    assert bed.found() == expected
    assert bed.paused == [audits.PAUSE]
    row = bed.audit(repair=True)
    told = {f["kind"]: (f["repair"], f["repaired"], f["error"]) for f in row["findings"]}
    assert told == {
        "device_unrecorded": ("report", True, None),
        "traits_differ": ("publish", True, None),
        "provider_leftover": ("delete_provider", True, None),
        "handle_dirty": ("clean", True, None),
        "instance_gone": (None, False, None),
        "allocation_unused": (None, False, None),
    }
    assert bed.woken == ["publisher", "jobs"]
    assert bed.node.placement.get(lost) is None
    (job,) = rows.read(bed.engine, schema.jobs)
    assert (job["kind"], job["host"]) == ("release", bed.host.name)
    bed.tell()
    # What was ordered is done; what only people may decide is left.
    assert [kind for kind, _ in bed.found()] == ["instance_gone", "allocation_unused"]


def generation(bed: Bed, n: int) -> int:
    known = bed.node.placement.get(bed.provider(n))
    assert known is not None
    return known.generation


def test_what_was_on_its_way_is_no_finding(light: Bed) -> None:
    light.agents.devices[light.host.name] = [card(0), card(1), card(2)]
    light.node.placement.delete(light.provider(1))
    light.meanwhile = light.tell
    assert light.found() == [("provider_missing", f"provider {light.host.name}_0000:01:00.0")]
    asked = len(light.agents.asked)
    assert (asked, light.paused) == (2, [audits.PAUSE])


def test_a_foreign_provider_is_not_read(light: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = str(uuid4())
    light.node.placement.create(foreign, f"{light.host.name}_bandwidth", light.node.uuid)
    read = light.node.placement.inventories
    seen: list[str] = []
    monkeypatch.setattr(
        light.node.placement, "inventories", lambda uuid: (seen.append(uuid), read(uuid))[1]
    )
    assert light.found() == []
    assert sorted(seen) == sorted([light.provider(0), light.provider(1)])


def test_one_of_ours_that_lost_its_trait_is_known_by_its_name(light: Bed) -> None:
    lost = light.provider(7)
    light.node.placement.create(lost, f"{light.host.name}_0000:07:00.0", light.node.uuid)
    assert light.found() == [("provider_leftover", f"provider {light.host.name}_0000:07:00.0")]


def test_a_leftover_with_users_is_left(light: Bed) -> None:
    lost = light.leftover()
    body = {"CUSTOM_FAKE": {"total": 1}}
    known = light.node.placement.get(lost)
    assert known is not None
    light.node.placement.set_inventories(lost, known.generation, body)
    light.node.allocate(lost, "CUSTOM_FAKE")
    (finding,) = light.audit(repair=True)["findings"]
    assert (finding["kind"], finding["repair"], finding["repaired"]) == (
        "provider_leftover",
        None,
        False,
    )
    assert "1 consumers" in finding["explanation"]
    assert light.node.placement.get(lost) is not None


def test_a_leftover_that_cannot_be_deleted_says_why(light: Bed) -> None:
    lost = light.leftover()
    light.node.placement.create(str(uuid4()), f"{light.host.name}-child", lost)
    (finding,) = light.audit(repair=True)["findings"]
    assert finding["repaired"] is False
    assert "409" in finding["error"]


def test_an_orphan_is_left_to_the_reconciler(bed: Bed) -> None:
    assert bed.node.client.delete(f"/allocations/{bed.instance}").status_code == 204
    (finding,) = bed.audit(repair=True)["findings"]
    assert (finding["kind"], finding["repair"], finding["repaired"]) == (
        "allocation_missing",
        "reconcile",
        True,
    )
    (row,) = rows.read(bed.engine, schema.requests, uuid=bed.request)
    assert (row["state"], row["orphan_since"]) == ("Bound", bed.clock.now)
    (again,) = bed.audit(repair=True)["findings"]
    assert again["repair"] is None


def test_a_silent_agent_hides_its_side_alone(light: Bed) -> None:
    light.agents.silent.add(light.host.name)
    light.node.placement.delete(light.provider(1))
    assert [kind for kind, _ in light.found()] == ["agent_silent", "provider_missing"]
    light.tell()
    light.clock.now += timedelta(hours=1)
    light.paused.clear()
    asked = len(light.agents.asked)
    kinds = [kind for kind, _ in light.found()]
    # Of an agent that is down nobody waits for an answer.
    assert "agent_silent" in kinds
    assert len(light.agents.asked) == asked


def test_without_nova_there_are_three_sides(sqlite_engine: sa.Engine, node: Node) -> None:
    bed = Bed(sqlite_engine, node, None)
    assert node.client.delete(f"/allocations/{bed.instance}").status_code == 204
    row = bed.audit()
    # Where nobody allocates, nothing lacks an allocation.
    assert (row["state"], row["findings"]) == ("DONE", [])
    assert row["sides"] == ["hardware", "database", "placement"]


def test_a_nova_that_is_away_is_told_of_once(light: Bed) -> None:
    rows.agent(light.engine, "zz-other")
    light.nova.status, light.nova.body = 503, {}
    row = light.audit()
    told = [(f["host"], f["kind"]) for f in row["findings"]]
    assert (light.host.name, "nova_silent") in told
    assert [kind for _, kind in told].count("nova_silent") == 1
    assert len(light.nova.asked) == 1


def test_a_placement_that_is_away_fails_the_audit(
    light: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise Unavailable("Placement cannot be reached: no route")

    monkeypatch.setattr(light.node.placement, "tree", away)
    row = light.audit()
    assert (row["state"], row["error"]) == ("FAILED", "Placement cannot be reached: no route")
    assert row["done"] == 0


def test_statements_do_not_grow_with_the_host(light: Bed) -> None:
    def cost() -> int:
        uuid = light.audits.create(None, False)["uuid"]
        with counting(light.engine) as counted:
            light.audits.run_once()
        assert light.row(uuid)["findings"] == []
        return len(counted)

    few = cost()
    light.agents.devices[light.host.name] = [card(n, 4) for n in range(12)]
    light.tell()
    for n in range(2, 12):
        light.bind(n)
    assert cost() == few


def test_another_conductor_carries_on(bed: Bed) -> None:
    names = sorted(f"h{n}-{uuid4().hex[:6]}" for n in range(3))
    for name in names:
        rows.agent(bed.engine, name)
        bed.agents.devices[name] = []
    uuid = bed.audits.create(None, False)["uuid"]
    answer = bed.agents.hardware

    def dies(host: str, driver: str | None = None) -> Any:
        if host == names[1]:
            bed.agents.hardware = answer  # type: ignore[method-assign]
            raise KeyboardInterrupt
        return answer(host)

    bed.agents.hardware = dies  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        bed.audits.run_once()
    half = bed.row(uuid)
    assert (half["state"], half["done"], half["last_host"]) == ("RUNNING", 2, names[0])
    assert bed.another().run_once() == 0  # the lease stands
    bed.clock.now += timedelta(days=1)
    assert bed.another().run_once() == 1
    row = bed.row(uuid)
    assert (row["state"], row["done"], row["total"]) == ("DONE", 4, 4)
    asked = [host for host in bed.agents.asked if host in names]
    assert asked.count(names[0]) == 1


def test_who_lost_the_lease_writes_nothing(light: Bed) -> None:
    uuid = light.audits.create(None, False)["uuid"]
    light.node.placement.delete(light.provider(1))

    def meanwhile() -> None:
        (row,) = rows.read(light.engine, schema.audits)
        rows.change(light.engine, schema.audits, row["id"], owner="another")

    light.meanwhile = meanwhile
    assert light.audits.run_once() == 0
    assert (light.row(uuid)["state"], light.row(uuid)["done"]) == ("RUNNING", 0)


def test_a_stop_gives_the_audit_back(light: Bed) -> None:
    uuid = light.audits.create(None, False)["uuid"]
    light.node.placement.delete(light.provider(1))
    light.meanwhile = light.audits.stop
    assert light.audits.run_once() == 0
    assert (light.row(uuid)["owner"], light.row(uuid)["lease_until"]) == (None, None)
    light.meanwhile = lambda: None
    assert light.another().run_once() == 1
    assert light.row(uuid)["found"] == 1


def test_of_very_many_the_first_are_kept(light: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_lease, "MOST", 2)
    for n in range(4):
        rows.agent(light.engine, f"zz-{n}")
        light.agents.silent.add(f"zz-{n}")
    row = light.audit()
    assert row["found"] == 4
    assert [f["kind"] for f in row["findings"]] == ["agent_silent"] * 2 + ["too_many"]


def test_one_host_and_no_other(light: Bed) -> None:
    rows.agent(light.engine, "zz-other")
    light.agents.silent.add("zz-other")
    assert light.audit(host=light.host.name)["found"] == 0
    (finding,) = light.audit(host="zz-other")["findings"]
    assert (finding["host"], finding["kind"]) == ("zz-other", "agent_silent")
    with pytest.raises(NotFound, match="nobody"):
        light.audits.create("nobody", False)
    for host, repair in (("", False), ("a\nb", False), (7, False), (None, "yes")):
        with pytest.raises(Invalid):
            light.audits.create(host, repair)  # type: ignore[arg-type]


def test_an_audit_that_nobody_foresaw_fails(light: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(light.node.placement, "tree", wrong)
    row = light.audit()
    assert (row["state"], row["error"]) == (
        "FAILED",
        "internal error: the conductor's log has it",
    )


def test_old_audits_are_forgotten(bed: Bed) -> None:
    done = bed.audit()
    waiting = bed.audits.create(None, False)["uuid"]
    old = bed.clock.now - audits.KEEP - timedelta(seconds=1)
    rows.change(bed.engine, schema.audits, done["id"], updated_at=old)
    assert bed.audits.sweep() == 1
    assert [row["uuid"] for row in rows.read(bed.engine, schema.audits)] == [waiting]


def test_audits_do_not_pile_up(light: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "WAITING", 2)
    for _ in range(2):
        light.audits.create(None, False)
    with pytest.raises(Conflict, match="2 audits wait"):
        light.audits.create(light.host.name, False)
    assert light.audits.run_once() == 2
    light.audits.create(None, False)


def test_a_provider_that_is_wanted_again_while_it_is_deleted(
    light: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, uuid = light.node.placement, light.provider(2)
    placement.create(uuid, names.provider_name(light.host.name, card(2).address), light.node.uuid)
    placement.set_traits(uuid, 0, ["OWNER_CYBORG"])
    delete = placement.delete

    def late(uuid: str) -> None:
        light.agents.devices[light.host.name] = [card(0), card(1), card(2)]
        light.tell()
        delete(uuid)

    monkeypatch.setattr(placement, "delete", late)
    (finding,) = light.audit(repair=True)["findings"]
    assert (finding["kind"], finding["repaired"]) == ("provider_leftover", True)
    assert placement.get(uuid) is None
    light.publish()
    assert placement.inventories(uuid), "the device is there, and its provider with it"
