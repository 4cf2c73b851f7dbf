# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.inventory.devices import Devices
from cyborg.conductor.placement.offers import GroupPlanner
from cyborg.core.errors import Conflict, NoHandle, WrongState
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_set import OfferMode, SetKind
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.db import schema
from cyborg.db.attachments import successors
from cyborg.db.providers.write import mark_stale_existing
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.device_sets.families import H100
from cyborg.tests.fixtures.device_sets.host import (
    GPU,
    gpu_address,
    make_gpu,
    make_source,
)
from cyborg.tests.fixtures.device_sets.saved import make_set_host, make_set_hosts
from cyborg.tests.fixtures.hosts.hosts import make_hosts

__all__ = ["node", "placement_adapter"]

PLAIN = SetKind.PCIE  # a set without work on its host


def test_sets_are_published_as_providers_that_serve_all_members(
    engine: sa.Engine, node: Node
) -> None:
    host = make_set_host(engine, node)
    # Without a wish for smaller sets the host offers its largest one.
    assert host.offered() == {"0": 8}
    assert host.offers() == {name: "offered" if name == "0" else "withheld" for name in host.family}
    # The GPUs are not offered a second time.
    for unit in host.gpus:
        child = node.children()[f"{node.name}_{gpu_address(unit)}"]
        assert node.inventory(child["uuid"]) == {}


def test_wanted_sizes_are_offered_without_overlap(sqlite_engine: sa.Engine, node: Node) -> None:
    host = make_set_host(sqlite_engine, node, wanted={"4": 1, "2": 1, "1": 2})
    assert sorted(host.offered().values()) == [1, 1, 2, 4]
    units = [unit for name in host.offered() for unit in host.family[name]]
    assert sorted(units) == sorted(host.gpus)


def test_bind_claims_all_members(engine: sa.Engine, node: Node) -> None:
    host = make_set_host(engine, node, wanted={"4": 2}, kind=PLAIN)
    instance = host.bind("1")
    assert host.owners() == dict.fromkeys(host.family["1"], instance)
    host.publish()
    assert host.offers()["1"] == "allocated"
    assert host.offered() == {"1": 4, "2": 4}
    states = {row["state"] for row in rows.read(engine, schema.arqs)}
    assert states == {"Bound"}


def test_bind_of_one_member_is_refused(sqlite_engine: sa.Engine, node: Node) -> None:
    host = make_set_host(sqlite_engine, node, kind=PLAIN)
    with pytest.raises(Conflict, match=r"device set hgx:1 of 4 devices.*the call binds 1"):
        host.bind("1", count=1)
    assert host.owners() == {}


def test_bind_of_member_alone_is_refused(sqlite_engine: sa.Engine, node: Node) -> None:
    host = make_set_host(sqlite_engine, node, kind=PLAIN)
    (row,) = rows.read(sqlite_engine, schema.deployables, address=gpu_address("01"))
    profile = rows.insert_profile(sqlite_engine)
    arq = rows.insert_arq(sqlite_engine, profile, resource_class=GPU)
    request = {
        "request": arq,
        "hostname": node.name,
        "device_rp_uuid": row["rp_uuid"],
        "instance_uuid": "7b1f7b6e-7d0c-4a0f-9a4f-0d4f4a3b2c1d",
    }
    with pytest.raises(NoHandle):
        host.arqs.bind([request], None)
    assert host.owners() == {}


def test_bind_of_overlapping_set_is_refused(engine: sa.Engine, node: Node) -> None:
    host = make_set_host(engine, node, mode=OfferMode.ALL, kind=PLAIN)
    host.bind("3")  # modules 1 and 3
    with pytest.raises(NoHandle, match="handle is taken"):
        host.bind("1")
    assert set(host.owners()) == host.family["3"]
    host.publish()
    # All sets without one of the two are offered, and the set itself is full.
    offered = {n for n, units in host.family.items() if not units & host.family["3"]}
    assert set(host.offered()) == offered | {"3"}


def test_release_offers_the_set_again(engine: sa.Engine, node: Node) -> None:
    host = make_set_host(engine, node, wanted={"2": 4}, kind=PLAIN)
    instance = host.bind("3")
    host.publish()
    host.delete(instance)
    host.publish()
    assert host.owners() == {}
    assert host.offers()["3"] == "offered"


def test_release_of_part_of_a_set_is_refused(sqlite_engine: sa.Engine, node: Node) -> None:
    host = make_set_host(sqlite_engine, node, kind=PLAIN)
    host.bind("3")
    uuids = sorted(row["uuid"] for row in rows.read(sqlite_engine, schema.arqs))
    with pytest.raises(WrongState, match=f"also release ARQ {uuids[1]}"):
        host.arqs.delete(uuids[:1], None, None, allow_bound=True)
    assert len(host.owners()) == 2
    host.arqs.delete(uuids, None, None, allow_bound=True)
    assert host.owners() == {}


def test_withdrawn_set_stays_while_a_consumer_has_it(engine: sa.Engine, node: Node) -> None:
    host = make_set_host(engine, node, wanted={"8": 1}, kind=PLAIN)
    # A server was allocated the whole host, and has not asked for its devices yet.
    consumer = node.allocate(host.provider("0"), GPU, 8)
    host.source = replace(
        host.source,
        deployables=tuple(
            replace(d, device_set=replace(d.device_set, wanted={"4": 2}))
            for d in host.source.deployables
            if d.device_set is not None
        ),
    )
    host.report()
    assert host.offers()["0"] == "withdrawing"
    assert host.offered() == {}
    (provider,) = rows.read(engine, schema.providers, uuid=host.provider("0"))
    assert provider["error"] == f"reserved, and still allocated to {consumer}"
    instance = host.bind("0", instance=consumer)
    assert set(host.owners().values()) == {instance}
    host.publish()
    host.delete(instance)
    node.deallocate(consumer)
    rows.update(engine, schema.providers, provider["id"], next_try_at=None)
    host.publish()
    assert host.offered() == {"1": 4, "2": 4}
    assert host.offers()["0"] == "withheld"


def test_unhealthy_member_closes_its_sets(engine: sa.Engine, node: Node) -> None:
    host = make_set_host(engine, node, wanted={"4": 1})
    host.gpus["01"] = make_gpu("01", health=Health.UNHEALTHY, health_reason="Xid 79")
    host.report()
    offered = host.offered()
    assert all("01" not in host.family[name] for name in offered)
    assert sorted(offered.values()) == [1, 2, 4]
    (row,) = rows.read(engine, schema.deployables, address="hgx:0")
    assert row["offer_reason"] == f"device {gpu_address('01')} is unhealthy: Xid 79"


def test_missing_member_closes_its_sets(sqlite_engine: sa.Engine, node: Node) -> None:
    host = make_set_host(sqlite_engine, node)
    host.report(without=["08"])
    assert all("08" not in host.family[name] for name in host.offered())
    host.report()
    assert host.offered() == {"0": 8}


def test_maintenance_of_a_member_closes_its_sets(sqlite_engine: sa.Engine, node: Node) -> None:
    host = make_set_host(sqlite_engine, node)
    (device,) = rows.read(sqlite_engine, schema.devices, address=gpu_address("02"))
    devices = build(Devices, UnitOfWork(sqlite_engine), lambda: None)
    devices.set_status(device["uuid"], "maintaining")
    host.publish()
    assert all("02" not in host.family[name] for name in host.offered())


def test_source_with_a_problem_offers_nothing(sqlite_engine: sa.Engine, node: Node) -> None:
    host = make_set_host(sqlite_engine, node)
    host.source = replace(
        host.source, health=Health.UNHEALTHY, health_reason="Fabric Manager is away"
    )
    host.report()
    assert host.offered() == {}


def test_group_breaks_one_host_only(engine: sa.Engine, node: Node, placement_adapter: Any) -> None:
    wanted = {"8": 1, "2": 1, "1": 2}
    second = Node(placement_adapter)
    hosts = make_set_hosts(engine, (node, second), wanted=wanted, group="h100", kind=PLAIN)
    sizes = [sorted(host.offered().values()) for host in hosts]
    assert sorted(sizes) == [[1, 1, 2, 4], [8]]
    broken, whole = (hosts[sizes.index(found)] for found in ([1, 1, 2, 4], [8]))
    # Servers get both single GPUs: the pair is split, and then the four.
    for single in [name for name, size in broken.offered().items() if size == 1]:
        broken.bind(single)
        broken.publish()
    assert whole.offered() == {"0": 8}
    free = {n: size for n, size in broken.offered().items() if broken.offers()[n] == "offered"}
    assert sorted(free.values()) == [1, 1, 2, 2]
    # One of the singles is taken, and one is left: no larger set is split at once for it.
    single = next(name for name, size in free.items() if size == 1)
    broken.bind(single)
    broken.publish()
    offers = broken.offers()
    free = {n: size for n, size in broken.offered().items() if offers[n] == "offered"}
    assert sorted(free.values()) in ([1, 1, 1, 2], [1, 2, 2])
    assert GroupPlanner(UnitOfWork(engine), lambda: None).sweep() == 1
    broken.publish()
    # Without the whole host there is none to keep.
    whole.bind("0")
    whole.publish()
    assert whole.offers()["0"] == "allocated"


def test_wanted_counts_over_the_independent_parts_of_a_source(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    boards = {
        f"{n}{name}": frozenset(f"{int(unit) + 8 * n:02}" for unit in units)
        for n in (0, 1)
        for name, units in H100.items()
    }
    host = make_set_host(sqlite_engine, node, boards, wanted={"1": 2}, kind=PLAIN)
    assert sorted(host.offered().values()) == [1, 1, 2, 4, 8]
    # Also within a group.
    host.source = make_source(boards, wanted={"1": 2}, group="all", kind=PLAIN)
    host.report()
    assert sorted(host.offered().values()) == [1, 1, 2, 4, 8]


def test_group_wants_the_sets_of_its_source_that_offers_disjoint_ones(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    board = {
        f"8{name}": frozenset(f"{int(unit) + 8:02}" for unit in units)
        for name, units in H100.items()
    }
    host = make_set_host(sqlite_engine, node, {**H100, **board}, group="g", kind=PLAIN)
    host.source = make_source({"0": H100["0"]}, mode=OfferMode.ALL, group="g", kind=PLAIN)
    other = make_source(board, wanted={"1": 2}, group="g", kind=PLAIN)
    other = replace(
        other,
        address="second",
        backend="second",
        deployables=tuple(
            replace(d, address=d.address.replace("hgx", "second")) for d in other.deployables
        ),
    )
    states = (*host.host.backends, BackendState("second", "second", BackendStatus.READY))
    host.host.backends = states
    host.host.send(make_hosts(sqlite_engine), *host.gpus.values(), host.source, other)
    host.publish()
    sizes = [
        len(row["device_set"]["members"])
        for row in rows.read(sqlite_engine, schema.deployables, offer="offered")
    ]
    assert sorted(sizes) == [1, 1, 2, 4, 8]


def test_sources_with_common_devices_and_two_groups_are_not_offered_both(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    host = make_set_host(sqlite_engine, node, wanted={"8": 1}, group="a", kind=PLAIN)
    other = make_source({"9": frozenset({"01", "02"})}, wanted={"2": 1}, group="b", kind=PLAIN)
    other = replace(
        other,
        address="rdma",
        backend="rdma",
        deployables=tuple(replace(d, address="rdma:9") for d in other.deployables),
    )
    states = (*host.host.backends, BackendState("rdma", "rdma", BackendStatus.READY))
    host.host.backends = states
    host.host.send(make_hosts(sqlite_engine), *host.gpus.values(), host.source, other)
    host.publish()
    assert host.offered() == {"0": 8}
    (row,) = rows.read(sqlite_engine, schema.deployables, address="rdma:9")
    assert (row["offer"], row["offer_reason"]) == (
        "withheld",
        "source rdma has the group b, and source hgx, which has devices in common, the group a: "
        "configure the same group for both",
    )


def test_fabric_is_prepared_after_and_released_before_its_members(
    engine: sa.Engine, node: Node
) -> None:
    host = make_set_host(engine, node)
    host.gpus = {
        unit: replace(gpu, abilities=host.source.abilities) for unit, gpu in host.gpus.items()
    }
    host.report()
    instance = host.bind("3")
    (job,) = host.jobs("prepare")
    items = [(i["backend"], i["deployable"], i["handle"]) for i in job["arguments"]["items"]]
    members = [("gpu", gpu_address(u), gpu_address(u)) for u in sorted(host.family["3"])]
    assert sorted(items[:-1]) == members
    assert items[-1] == ("hgx", "hgx:3", "")
    host.delete(instance)
    (job,) = host.jobs("release")
    items = [(i["backend"], i["deployable"], i["handle"]) for i in job["arguments"]["items"]]
    assert items[0] == ("hgx", "hgx:3", "")
    assert sorted(items[1:]) == members


def test_set_with_an_owner_is_drained_and_not_removed(engine: sa.Engine, node: Node) -> None:
    host = make_set_host(engine, node, kind=PLAIN)
    instance = host.bind("3")
    source = host.source
    host.source = replace(source, deployables=source.deployables[:3])
    host.report()
    (row,) = rows.read(engine, schema.deployables, address="hgx:3")
    assert row["draining"]
    assert rows.read(engine, schema.deployables, address="hgx:4") == []
    host.delete(instance)
    make_hosts(engine).sweep()
    host.report()
    assert rows.read(engine, schema.deployables, address="hgx:3") == []


def test_custody_of_a_set_is_in_the_logs_of_its_devices(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    host = make_set_host(sqlite_engine, node, kind=PLAIN)
    host.delete(host.bind("3"))
    devices = {row["uuid"]: row["address"] for row in rows.read(sqlite_engine, schema.devices)}
    for event in ("claimed", "released"):
        found = rows.read(sqlite_engine, schema.custody_records, event=event)
        gpus = sorted(map(gpu_address, host.family["3"]))
        assert sorted(devices[row["device_uuid"]] for row in found) == gpus
        assert sorted(row["details"]["deployable_address"] for row in found) == gpus
        sets = {row["details"].get("device_set") for row in found}
        assert sets == {"hgx:3" if event == "claimed" else None}


def test_maintenance_of_the_source_does_not_wait_for_the_servers(
    engine: sa.Engine, node: Node
) -> None:
    host = make_set_host(engine, node, wanted={"4": 2}, kind=PLAIN)
    provider = host.provider("1")
    instance = host.bind("1", instance=node.allocate(provider, GPU, 4))
    host.publish()
    (source,) = rows.read(engine, schema.devices, address="hgx")
    devices = build(Devices, UnitOfWork(engine), lambda: None)
    devices.set_status(source["uuid"], "maintaining")
    host.publish()
    assert host.offered() == {}
    (row,) = rows.read(engine, schema.providers, uuid=provider)
    assert (row["error"], row["stale_since"]) == (None, None)
    host.delete(instance)
    host.publish()
    (row,) = rows.read(engine, schema.providers, uuid=provider)
    assert row["error"] == f"reserved, and still allocated to {instance}"
    node.deallocate(instance)
    rows.update(engine, schema.providers, row["id"], next_try_at=None)
    host.publish()
    assert host.offers()["1"] == "withheld"


def test_successor_replaces_all_devices_of_a_set(engine: sa.Engine, node: Node) -> None:
    host = make_set_host(engine, node, kind=PLAIN)
    context = rows.insert(
        engine,
        schema.device_contexts,
        uuid="c",
        project_id="project-1",
        state="Bound",
        groups=[],
        config_data={},
    )
    host.bind("3")
    for row in rows.read(engine, schema.arqs):
        rows.update(engine, schema.arqs, row["id"], context_id=context)
    (device,) = rows.read(engine, schema.devices, address=gpu_address("03"))
    with engine.begin() as tx:
        arqs = successors.lock_replaced(tx, "c", device["uuid"])
        closed = successors.providers_of(tx, device["uuid"])
    assert len(arqs) == 2
    assert closed >= {host.provider(name) for name in ("0", "1", "3")}
    assert host.provider("2") not in closed


def test_failed_plan_of_a_host_does_not_stop_the_others(
    sqlite_engine: sa.Engine, node: Node, placement_adapter: Any
) -> None:
    host, other = make_set_hosts(sqlite_engine, (node, Node(placement_adapter)))
    (row,) = rows.read(sqlite_engine, schema.deployables, rp_uuid=host.provider("0"))
    rows.update(sqlite_engine, schema.deployables, row["id"], device_set={"kind": "newer"})
    stale = [row["rp_uuid"], other.provider("0")]
    with sqlite_engine.begin() as tx:
        mark_stale_existing(tx, stale, timeutils.utcnow())
    gpu = make_gpu("01", health=Health.UNHEALTHY, health_reason="Xid 79")
    other.gpus["01"] = gpu
    other.report()
    assert all("01" not in other.family[name] for name in other.offered())
    (provider,) = rows.read(sqlite_engine, schema.providers, uuid=host.provider("0"))
    assert provider["error"] == "internal error, see the log of cyborg-conductor"
    assert provider["next_try_at"] is not None
