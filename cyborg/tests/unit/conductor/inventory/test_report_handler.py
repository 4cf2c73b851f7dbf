# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core import naming
from cyborg.core.inventory.device import Ability, AttachHandle, Device, HandleType, Health
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.core.migration.import_plan import BACKEND
from cyborg.db import schema
from cyborg.db.binding import claims as handle_claims
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.hosts.hosts import READY, Host, card, handles, make_hosts


def bind_handle(engine: sa.Engine, n: int = 0) -> int:
    """Bind a new ARQ to the nth handle; return the id of the ARQ."""
    request = rows.insert_arq(engine, rows.insert_profile(engine, f"p{n}"), state="Bound")
    (row,) = rows.read(engine, schema.arqs, uuid=request)
    handle = rows.read(engine, schema.attach_handles)[n]
    rows.update(engine, schema.attach_handles, handle["id"], arq_id=row["id"])
    return int(row["id"])


def stale(engine: sa.Engine) -> dict[str, int]:
    return {
        row["name"]: row["revision"]
        for row in rows.read(engine, schema.providers)
        if row["stale_since"] is not None
    }


def clear_stale(engine: sa.Engine) -> None:
    with engine.begin() as tx:
        tx.execute(sa.update(schema.providers).values(stale_since=None))


def snapshot(engine: sa.Engine) -> dict[str, list[dict[str, Any]]]:
    tables = (schema.devices, schema.deployables, schema.attach_handles, schema.providers)
    return {table.name: rows.read(engine, table) for table in tables}


def test_first_report_creates_all_rows(engine: sa.Engine) -> None:
    woken: list[None] = []
    hosts, host = make_hosts(engine, woken), Host()
    host.send(hosts, card(serial="S1", numa_node=1, std_board_info={"product_id": "0xff"}))
    (device,) = rows.read(engine, schema.devices)
    assert (device["host"], device["address"], device["status"]) == (
        "compute-1",
        "0000:00:00.0",
        "enabled",
    )
    assert (device["serial"], device["numa_node"]) == ("S1", 1)
    assert device["std_board_info"] == {"product_id": "0xff"}
    (deployable,) = rows.read(engine, schema.deployables)
    assert deployable["name"] == "compute-1_0000:00:00.0"
    assert deployable["rp_uuid"] == naming.provider_uuid("compute-1", "0000:00:00.0")
    assert (deployable["num_accelerators"], deployable["attributes"]) == (2, {"key": "value"})
    assert (deployable["parent_id"], deployable["root_id"]) == (None, deployable["id"])
    assert [h["address"] for h in rows.read(engine, schema.attach_handles)] == ["0000", "0001"]
    assert stale(engine) == {"compute-1_0000:00:00.0": 1}
    assert len(woken) == 1


def test_report_mediated_device_has_the_uuid_that_its_agent_knows(engine: sa.Engine) -> None:
    slots = tuple(AttachHandle(f"mtty/mtty-2/{n}", HandleType.MDEV) for n in range(2))
    whole = AttachHandle("0000:00:00.0", HandleType.PCI)
    device = card()
    (deployable,) = device.deployables
    device = replace(device, deployables=(replace(deployable, handles=(*slots, whole)),))
    for name in ("compute-1", "compute-2"):
        Host(name).send(make_hosts(engine), device)
    found = [h["uuid"] for h in rows.read(engine, schema.attach_handles) if h["type"] == "MDEV"]
    assert found == [
        naming.handle_uuid(name, deployable.address, slot.address)
        for name in ("compute-1", "compute-2")
        for slot in slots
    ]
    assert len({h["uuid"] for h in rows.read(engine, schema.attach_handles)}) == 6


def count_report_statements(engine: sa.Engine, host: Host, devices: Sequence[Device]) -> list[str]:
    hosts = make_hosts(engine)
    host.devices = devices
    host.hello(hosts)
    transactions: list[None] = []
    sa.event.listen(engine, "begin", lambda _: transactions.append(None))
    with count_statements(engine) as count:
        host.report(hosts)
    assert len(transactions) == 1
    return count.statements


def test_first_report_statement_count_is_constant(engine: sa.Engine) -> None:
    small = count_report_statements(engine, Host("a"), [card(n, 1) for n in range(2)])
    medium = count_report_statements(engine, Host("b"), [card(n, 1) for n in range(64)])
    large = count_report_statements(engine, Host("c"), [card(n, 16) for n in range(64)])
    assert len(small) == len(medium) == len(large)
    assert len(large) < 25
    assert len(rows.read(engine, schema.attach_handles)) == 2 + 64 + 64 * 16


def test_report_without_changes_writes_nothing(engine: sa.Engine) -> None:
    woken: list[None] = []
    hosts, host = make_hosts(engine, woken), Host()
    host.send(hosts, card(0), card(1))
    clear_stale(engine)
    woken.clear()
    before = snapshot(engine)
    with count_statements(engine) as count:
        host.report(hosts)
    assert snapshot(engine) == before
    changes = [s for s in count.statements if not s.startswith("SELECT")]
    assert [s.split()[1] for s in changes] == ["services"]
    assert not woken
    host.send(hosts, card(0), card(1, health=Health.UNHEALTHY))
    after = snapshot(engine)
    assert after["devices"][0] == before["devices"][0]
    assert after["devices"][1]["health"] == "unhealthy"
    assert stale(engine) == {"compute-1_0000:01:00.0": 2}


def test_report_keeps_fields_of_operators(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card())
    (device,) = rows.read(engine, schema.devices)
    (deployable,) = rows.read(engine, schema.deployables)
    rows.update(engine, schema.devices, device["id"], status="maintaining")
    rows.insert(engine, schema.attributes, deployable_id=deployable["id"], key="rack", value="7")
    changed = replace(card().deployables[0], attributes={"key": "other"}, bitstream_id="b1")
    host.send(hosts, card(model="new", deployables=(changed,)))
    (device,) = rows.read(engine, schema.devices)
    assert (device["status"], device["model"]) == ("maintaining", "new")
    (deployable,) = rows.read(engine, schema.deployables)
    assert (deployable["attributes"], deployable["bitstream_id"]) == ({"key": "other"}, "b1")
    assert [a["key"] for a in rows.read(engine, schema.attributes)] == ["rack"]


def test_report_updates_abilities(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    for abilities in (frozenset(Ability), frozenset({Ability.PREPARES}), frozenset[Ability]()):
        host.send(hosts, card(abilities=abilities))
        (device,) = rows.read(engine, schema.devices)
        assert device["abilities"] == sorted(abilities)
        before = snapshot(engine)
        host.report(hosts)
        assert snapshot(engine) == before, "a stored device equals the reported one"


def test_nested_deployables_have_parent_and_root(engine: sa.Engine) -> None:
    def nested(*parents: tuple[str, str | None]) -> Device:
        deployable = card().deployables[0]
        return card(
            deployables=tuple(
                replace(deployable, address=address, parent=parent) for address, parent in parents
            )
        )

    hosts, host = make_hosts(engine), Host()
    host.send(hosts, nested(("c", "b"), ("b", "a"), ("a", None)))
    deployables = {p["address"]: p for p in rows.read(engine, schema.deployables)}
    ids = {address: deployable["id"] for address, deployable in deployables.items()}
    assert deployables["a"]["parent_id"] is None
    assert (deployables["b"]["parent_id"], deployables["c"]["parent_id"]) == (ids["a"], ids["b"])
    assert {deployable["root_id"] for deployable in deployables.values()} == {ids["a"]}
    host.send(hosts, nested(("c", "a"), ("a", None)))
    deployables = {p["address"]: p for p in rows.read(engine, schema.deployables)}
    assert deployables["c"]["parent_id"] == ids["a"]
    assert host.hello(hosts)["report"] is False


def test_unreported_unbound_objects_are_removed(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card(0), card(1))
    clear_stale(engine)
    host.send(hosts, card(0, count=1))
    assert [d["address"] for d in rows.read(engine, schema.devices)] == ["0000:00:00.0"]
    (deployable,) = rows.read(engine, schema.deployables)
    assert deployable["num_accelerators"] == 1
    assert stale(engine) == {"compute-1_0000:00:00.0": 2, "compute-1_0000:01:00.0": 2}


def test_unreported_bound_device_drains_until_released(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card(0))
    request = bind_handle(engine)
    host.send(hosts)
    (device,) = rows.read(engine, schema.devices)
    (deployable,) = rows.read(engine, schema.deployables)
    (handle,) = rows.read(engine, schema.attach_handles)
    assert [row["draining"] for row in (device, deployable, handle)] == [True] * 3
    assert handle["arq_id"] == request
    assert host.hello(hosts)["report"] is False
    with engine.begin() as tx:
        assert handle_claims.release(tx, [request], timeutils.utcnow()) == []
    assert hosts.sweep() == 1
    assert host.hello(hosts)["report"] is True
    host.report(hosts)
    assert not rows.read(engine, schema.devices)
    assert stale(engine)


def test_draining_device_that_returns_is_restored(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card(0))
    request = bind_handle(engine)
    host.send(hosts)
    host.send(hosts, card(0))
    assert not rows.read(engine, schema.devices)[0]["draining"]
    assert [h["arq_id"] for h in rows.read(engine, schema.attach_handles)] == [request, None]
    assert not any(h["draining"] for h in rows.read(engine, schema.attach_handles))
    assert rows.read(engine, schema.deployables)[0]["num_accelerators"] == 2


def test_failed_backend_keeps_its_devices(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    other = BackendState("gen0", "generic", BackendStatus.READY)
    host.backends = [READY, other]
    host.send(hosts, card(0), card(1, backend="gen0"))
    host.backends = [READY, replace(other, status=BackendStatus.ERROR, error="no bus")]
    host.send(hosts)
    assert [d["backend"] for d in rows.read(engine, schema.devices)] == ["gen0"]
    host.backends = [READY]
    host.send(hosts)
    assert not rows.read(engine, schema.devices)


@pytest.mark.parametrize("stopped", ["failed", "removed"])
def test_device_with_a_prepared_handle_stays_with_the_backend_that_prepared_it(
    engine: sa.Engine, caplog: pytest.LogCaptureFixture, stopped: str
) -> None:
    hosts, host = make_hosts(engine), Host()
    other = BackendState("gen0", "generic", BackendStatus.READY)
    host.backends = [READY, other]
    host.send(hosts, card(0), card(1))
    request = bind_handle(engine)
    rows.update(engine, schema.attach_handles, 1, needs_cleaning=True)
    # The agent has restarted: the first backend has no devices, so the second one reports them.
    failed = replace(READY, status=BackendStatus.ERROR, error="no driver has registered")
    host.backends = [failed, other] if stopped == "failed" else [other]
    found = [card(n, backend="gen0") for n in range(2)]
    host.send(hosts, *found)
    assert [(d["backend"], d["draining"]) for d in rows.read(engine, schema.devices)] == [
        ("fake", stopped == "removed"),
        ("gen0", False),
    ]
    assert "device stays with backend fake, which prepared handles of it" in caplog.text
    remedy = "uninstall-driver DRIVER --host compute-1 --backend fake --force"
    assert (remedy in caplog.text) is (stopped == "removed")
    with engine.begin() as tx:
        (released,) = handle_claims.release(tx, [request], timeutils.utcnow())
    assert (released["address"], released["backend"]) == ("0000", "fake")
    host.backends = [READY, other]
    host.send(hosts, *found)
    assert {d["backend"] for d in rows.read(engine, schema.devices)} == {"fake", "gen0"}
    rows.update(engine, schema.attach_handles, 1, needs_cleaning=False)
    assert hosts.sweep() == 1, "its report moves the device"
    host.send(hosts, *found)
    assert [(d["backend"], d["draining"]) for d in rows.read(engine, schema.devices)] == [
        ("gen0", False),
        ("gen0", False),
    ]


def test_moved_deployable_keeps_its_provider_name(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    deployable = replace(card().deployables[0], address="part")
    host.send(hosts, card(0, deployables=(deployable,)), card(1, deployables=()))
    host.send(hosts, card(0, deployables=()), card(1, deployables=(deployable,)))
    (deployable_row,) = rows.read(engine, schema.deployables)
    assert deployable_row["device_id"] == rows.read(engine, schema.devices)[1]["id"]
    bind_handle(engine)
    host.send(hosts, card(0, deployables=(deployable,)), card(1, deployables=()))
    (draining,) = rows.read(engine, schema.deployables)
    assert draining["id"] == deployable_row["id"]
    assert draining["draining"]


def test_function_that_moves_has_no_second_handle_before_its_release(
    sqlite_engine: sa.Engine,
) -> None:
    # As after an import from OpenStack Cyborg, which had a deployable for each virtual function.
    hosts, host = make_hosts(sqlite_engine), Host()
    functions = [AttachHandle(f"0000:00:00.{n}", HandleType.PCI) for n in (1, 2)]
    parts = tuple(
        replace(card().deployables[0], address=handle.address, handles=(handle,))
        for handle in functions
    )
    host.send(hosts, card(deployables=parts))
    owner = bind_handle(sqlite_engine)
    whole = replace(card().deployables[0], handles=tuple(functions))

    def free() -> list[str]:
        found = rows.read(sqlite_engine, schema.attach_handles)
        return [h["address"] for h in found if not h["draining"] and h["arq_id"] is None]

    host.send(hosts, card(deployables=(whole,)))
    assert free() == ["0000:00:00.2"]
    host.report(hosts)
    assert free() == ["0000:00:00.2"]
    with sqlite_engine.begin() as tx:
        handle_claims.release(tx, [owner], timeutils.utcnow())
    assert hosts.sweep() == 1
    host.send(hosts, card(deployables=(whole,)))
    assert free() == ["0000:00:00.2", "0000:00:00.1"]
    (deployable,) = rows.read(sqlite_engine, schema.deployables)
    assert deployable["num_accelerators"] == 2


def test_new_handles_of_existing_device_are_counted(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card(0, 2))
    deployable = card().deployables[0]
    host.send(hosts, card(0, deployables=(replace(deployable, handles=handles(5)),)))
    assert rows.read(engine, schema.deployables)[0]["num_accelerators"] == 5
    assert stale(engine) == {"compute-1_0000:00:00.0": 2}


def test_dirty_handle_that_returns_stays_dirty(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card(0))
    rows.update(engine, schema.attach_handles, 1, needs_cleaning=True)
    host.send(hosts)
    (handle,) = rows.read(engine, schema.attach_handles)
    assert (handle["draining"], handle["needs_cleaning"]) == (True, True)
    host.send(hosts, card(0))
    assert [row["needs_cleaning"] for row in rows.read(engine, schema.attach_handles)] == [
        True,
        False,
    ]
    host.send(hosts)
    rows.update(engine, schema.attach_handles, 1, needs_cleaning=False)
    hosts.sweep()
    assert host.hello(hosts)["report"] is True
    host.report(hosts)
    assert rows.read(engine, schema.devices) == []


def test_unreported_device_in_programming_is_kept(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card(0))
    job = rows.insert(
        engine, schema.jobs, kind="program", host="compute-1", subject="x", arguments={}
    )
    rows.update(engine, schema.deployables, 1, job_id=job)
    host.send(hosts)
    (deployable,) = rows.read(engine, schema.deployables)
    assert (deployable["job_id"], deployable["draining"]) == (job, False)
    # A report without its deployable does not make the device schedulable, either.
    host.send(hosts, replace(card(0), deployables=()))
    host.send(hosts, card(0))
    assert [row["job_id"] for row in rows.read(engine, schema.deployables)] == [job]


def test_imported_device_in_use_moves_to_the_backend_that_reports_it(
    sqlite_engine: sa.Engine,
) -> None:
    """An import knows no backend, and marks the handles in use for cleaning."""
    hosts, host = make_hosts(sqlite_engine), Host()
    host.send(hosts, card(0))
    bind_handle(sqlite_engine)
    rows.update(sqlite_engine, schema.attach_handles, 1, needs_cleaning=True)
    rows.update(sqlite_engine, schema.devices, 1, backend=BACKEND)
    host.send(hosts, card(0, serial="S1"))
    (device,) = rows.read(sqlite_engine, schema.devices)
    assert (device["backend"], device["draining"]) == ("fake", False)
    assert len(rows.read(sqlite_engine, schema.attach_handles)) == 2
