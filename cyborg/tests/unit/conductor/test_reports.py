# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from cyborg.core import names
from cyborg.core.device import Ability, Device, Health
from cyborg.core.report import BackendState, BackendStatus
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.store import claims
from cyborg.fixtures import rows
from cyborg.fixtures.hosts import READY, Host, card, handles, rooms


def owned(engine: sa.Engine, n: int = 0) -> int:
    """Give the nth handle of all to a new request, and return the request's id."""
    request = rows.request(engine, rows.profile(engine, f"p{n}"), state="Bound")
    (row,) = rows.read(engine, schema.requests, uuid=request)
    handle = rows.read(engine, schema.attach_handles)[n]
    rows.change(engine, schema.attach_handles, handle["id"], request_id=row["id"])
    return int(row["id"])


def stale(engine: sa.Engine) -> dict[str, int]:
    return {
        row["name"]: row["revision"]
        for row in rows.read(engine, schema.providers)
        if row["stale_since"] is not None
    }


def settle(engine: sa.Engine) -> None:
    with engine.begin() as tx:
        tx.execute(sa.update(schema.providers).values(stale_since=None))


def snapshot(engine: sa.Engine) -> dict[str, list[dict[str, Any]]]:
    tables = (schema.devices, schema.deployables, schema.attach_handles, schema.providers)
    return {table.name: rows.read(engine, table) for table in tables}


def test_a_first_report_is_recorded_whole(engine: sa.Engine) -> None:
    woken: list[None] = []
    hosts, host = rooms(engine, woken), Host()
    host.tell(hosts, card(serial="S1", numa_node=1, std_board_info={"product_id": "0xff"}))
    (device,) = rows.read(engine, schema.devices)
    assert (device["host"], device["address"], device["status"]) == (
        "compute-1",
        "0000:00:00.0",
        "enabled",
    )
    assert (device["serial"], device["numa_node"]) == ("S1", 1)
    assert device["std_board_info"] == {"product_id": "0xff"}
    (part,) = rows.read(engine, schema.deployables)
    assert part["name"] == "compute-1_0000:00:00.0"
    assert part["rp_uuid"] == names.provider_uuid("compute-1", "0000:00:00.0")
    assert (part["num_accelerators"], part["attributes"]) == (2, {"key": "value"})
    assert (part["parent_id"], part["root_id"]) == (None, part["id"])
    assert [h["address"] for h in rows.read(engine, schema.attach_handles)] == ["0000", "0001"]
    assert stale(engine) == {"compute-1_0000:00:00.0": 1}
    assert len(woken) == 1


def cost(engine: sa.Engine, host: Host, devices: Sequence[Device]) -> list[str]:
    hosts = rooms(engine)
    host.devices = devices
    host.hello(hosts)
    begun: list[None] = []
    sa.event.listen(engine, "begin", lambda _: begun.append(None))
    with counting(engine) as count:
        host.report(hosts)
    assert len(begun) == 1
    return count.statements


def test_a_first_report_costs_the_same_with_more_handles_and_devices(engine: sa.Engine) -> None:
    little = cost(engine, Host("a"), [card(n, 1) for n in range(2)])
    some = cost(engine, Host("b"), [card(n, 1) for n in range(64)])
    much = cost(engine, Host("c"), [card(n, 16) for n in range(64)])
    assert len(little) == len(some) == len(much)
    assert len(much) < 25
    assert len(rows.read(engine, schema.attach_handles)) == 2 + 64 + 64 * 16


def test_what_did_not_change_is_not_written(engine: sa.Engine) -> None:
    woken: list[None] = []
    hosts, host = rooms(engine, woken), Host()
    host.tell(hosts, card(0), card(1))
    settle(engine)
    woken.clear()
    before = snapshot(engine)
    with counting(engine) as count:
        host.report(hosts)
    assert snapshot(engine) == before
    changes = [s for s in count.statements if not s.startswith("SELECT")]
    assert [s.split()[1] for s in changes] == ["services"]
    assert not woken
    host.tell(hosts, card(0), card(1, health=Health.UNHEALTHY))
    after = snapshot(engine)
    assert after["devices"][0] == before["devices"][0]
    assert after["devices"][1]["health"] == "unhealthy"
    assert stale(engine) == {"compute-1_0000:01:00.0": 2}


def test_operators_fields_survive(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    host.tell(hosts, card())
    (device,) = rows.read(engine, schema.devices)
    (part,) = rows.read(engine, schema.deployables)
    rows.change(engine, schema.devices, device["id"], status="maintaining")
    rows.insert(engine, schema.attributes, deployable_id=part["id"], key="rack", value="7")
    changed = replace(card().deployables[0], attributes={"key": "other"}, bitstream_id="b1")
    host.tell(hosts, card(model="new", deployables=(changed,)))
    (device,) = rows.read(engine, schema.devices)
    assert (device["status"], device["model"]) == ("maintaining", "new")
    (part,) = rows.read(engine, schema.deployables)
    assert (part["attributes"], part["bitstream_id"]) == ({"key": "other"}, "b1")
    assert [a["key"] for a in rows.read(engine, schema.attributes)] == ["rack"]


def test_abilities_come_and_go(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    for able in (frozenset(Ability), frozenset({Ability.PREPARES}), frozenset[Ability]()):
        host.tell(hosts, card(abilities=able))
        (device,) = rows.read(engine, schema.devices)
        assert device["abilities"] == sorted(able)
        before = snapshot(engine)
        host.report(hosts)
        assert snapshot(engine) == before, "what was stored is read as it was reported"


def test_parts_within_parts_know_parent_and_root(engine: sa.Engine) -> None:
    def nested(*places: tuple[str, str | None]) -> Device:
        part = card().deployables[0]
        return card(
            deployables=tuple(replace(part, address=own, parent=above) for own, above in places)
        )

    hosts, host = rooms(engine), Host()
    host.tell(hosts, nested(("c", "b"), ("b", "a"), ("a", None)))
    parts = {p["address"]: p for p in rows.read(engine, schema.deployables)}
    ids = {address: part["id"] for address, part in parts.items()}
    assert parts["a"]["parent_id"] is None
    assert (parts["b"]["parent_id"], parts["c"]["parent_id"]) == (ids["a"], ids["b"])
    assert {part["root_id"] for part in parts.values()} == {ids["a"]}
    host.tell(hosts, nested(("c", "a"), ("a", None)))
    parts = {p["address"]: p for p in rows.read(engine, schema.deployables)}
    assert parts["c"]["parent_id"] == ids["a"]
    assert host.hello(hosts)["report"] is False


def test_what_vanishes_unbound_is_removed(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    host.tell(hosts, card(0), card(1))
    settle(engine)
    host.tell(hosts, card(0, count=1))
    assert [d["address"] for d in rows.read(engine, schema.devices)] == ["0000:00:00.0"]
    (part,) = rows.read(engine, schema.deployables)
    assert part["num_accelerators"] == 1
    assert stale(engine) == {"compute-1_0000:00:00.0": 2, "compute-1_0000:01:00.0": 2}


def test_what_vanishes_bound_drains_until_it_is_released(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    host.tell(hosts, card(0))
    request = owned(engine)
    host.tell(hosts)
    (device,) = rows.read(engine, schema.devices)
    (part,) = rows.read(engine, schema.deployables)
    (handle,) = rows.read(engine, schema.attach_handles)
    assert [row["draining"] for row in (device, part, handle)] == [True] * 3
    assert handle["request_id"] == request
    assert host.hello(hosts)["report"] is False
    with engine.begin() as tx:
        assert claims.release(tx, [request]) == []
    assert hosts.sweep() == 1
    assert host.hello(hosts)["report"] is True
    host.report(hosts)
    assert not rows.read(engine, schema.devices)
    assert stale(engine)


def test_what_drains_and_comes_back_is_whole_again(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    host.tell(hosts, card(0))
    request = owned(engine)
    host.tell(hosts)
    host.tell(hosts, card(0))
    assert not rows.read(engine, schema.devices)[0]["draining"]
    assert [h["request_id"] for h in rows.read(engine, schema.attach_handles)] == [request, None]
    assert not any(h["draining"] for h in rows.read(engine, schema.attach_handles))
    assert rows.read(engine, schema.deployables)[0]["num_accelerators"] == 2


def test_a_backend_that_cannot_see_loses_nothing(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    other = BackendState("gen0", "generic", BackendStatus.READY)
    host.backends = [READY, other]
    host.tell(hosts, card(0), card(1, backend="gen0"))
    host.backends = [READY, replace(other, status=BackendStatus.ERROR, error="no bus")]
    host.tell(hosts)
    assert [d["backend"] for d in rows.read(engine, schema.devices)] == ["gen0"]
    host.backends = [READY]
    host.tell(hosts)
    assert not rows.read(engine, schema.devices)


def test_a_part_that_moves_keeps_its_name(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    part = replace(card().deployables[0], address="part")
    host.tell(hosts, card(0, deployables=(part,)), card(1, deployables=()))
    host.tell(hosts, card(0, deployables=()), card(1, deployables=(part,)))
    (moved,) = rows.read(engine, schema.deployables)
    assert moved["device_id"] == rows.read(engine, schema.devices)[1]["id"]
    owned(engine)
    host.tell(hosts, card(0, deployables=(part,)), card(1, deployables=()))
    (held,) = rows.read(engine, schema.deployables)
    assert held["id"] == moved["id"]
    assert held["draining"]


def test_more_handles_on_an_old_device_are_counted(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    host.tell(hosts, card(0, 2))
    part = card().deployables[0]
    host.tell(hosts, card(0, deployables=(replace(part, handles=handles(5)),)))
    assert rows.read(engine, schema.deployables)[0]["num_accelerators"] == 5
    assert stale(engine) == {"compute-1_0000:00:00.0": 2}


def test_a_dirty_handle_that_vanishes_and_returns_stays_dirty(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    host.tell(hosts, card(0))
    rows.change(engine, schema.attach_handles, 1, prepared=True)
    host.tell(hosts)
    (kept,) = rows.read(engine, schema.attach_handles)
    assert (kept["draining"], kept["prepared"]) == (True, True)
    host.tell(hosts, card(0))
    assert [row["prepared"] for row in rows.read(engine, schema.attach_handles)] == [True, False]
    host.tell(hosts)
    rows.change(engine, schema.attach_handles, 1, prepared=False)
    hosts.sweep()
    assert host.hello(hosts)["report"] is True
    host.report(hosts)
    assert rows.read(engine, schema.devices) == []


def test_a_device_that_leaves_the_bus_to_be_programmed_stays(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    host.tell(hosts, card(0))
    job = rows.insert(
        engine, schema.jobs, kind="program", host="compute-1", subject="x", arguments={}
    )
    rows.change(engine, schema.deployables, 1, job_id=job)
    host.tell(hosts)
    (part,) = rows.read(engine, schema.deployables)
    assert (part["job_id"], part["draining"]) == (job, False)
    # Nor does a device that shows itself without its part open what comes back.
    host.tell(hosts, replace(card(0), deployables=()))
    host.tell(hosts, card(0))
    assert [row["job_id"] for row in rows.read(engine, schema.deployables)] == [job]
