# SPDX-License-Identifier: Apache-2.0
"""Events without a bind after which a group offers a set of a whole host again, at once.

Nothing here runs the sweep of the groups.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.conductor.inventory.devices import Devices
from cyborg.conductor.jobs import completion
from cyborg.conductor.jobs.dispatcher import JobDispatcher
from cyborg.conductor.maintenance.windows import MaintenanceWindows
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.conductor.placement import publisher as publishing
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_set import SetKind
from cyborg.db import schema
from cyborg.db.providers.write import mark_stale_of_hosts
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.device_sets.families import H100_FOUR
from cyborg.tests.fixtures.device_sets.host import GPU, SOURCE, gpu_address, make_gpu
from cyborg.tests.fixtures.device_sets.saved import make_set_host, make_set_hosts
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.threads.periodic import PeriodicTask

__all__ = ["node", "placement_adapter"]

WANTED = {"4": 1, "2": 1, "1": 2}
SIZES = [1, 1, 2, 4]
WHOLE, ALL = "1", 4  # the set of a whole host, and its size
SICK: dict[str, Any] = {"health": Health.UNHEALTHY, "health_reason": "Xid 79"}


class Group:
    """Two hosts that together have exactly the wanted sets; ``whole`` has the one of four."""

    def __init__(self, engine: sa.Engine, nodes: tuple[Node, Node], kind: SetKind) -> None:
        self.engine, self.uow = engine, UnitOfWork(engine)
        self.hosts = make_set_hosts(engine, nodes, H100_FOUR, wanted=WANTED, group="hgx", kind=kind)
        assert self.sizes() == SIZES
        self.whole = next(host for host in self.hosts if host.offered() == {WHOLE: ALL})
        self.wakes = 0

    def publish(self) -> None:
        self.hosts[0].publish()

    def sizes(self) -> list[int]:
        """Return the sizes of the sets that a server can get now."""
        found = []
        for host in self.hosts:
            offers = host.offers()
            found += [size for name, size in host.offered().items() if offers[name] == "offered"]
        return sorted(found)

    def wake(self) -> None:
        self.wakes += 1

    def device(self, address: str) -> dict[str, Any]:
        """Return a device of the host with the set of four."""
        host = self.whole.node.name
        (row,) = rows.read(self.engine, schema.devices, host=host, address=address)
        return row

    def report(self, *, without: str | None = None) -> None:
        """Report the devices of the host with the set of four."""
        host = self.whole
        gpus = [gpu for unit, gpu in host.gpus.items() if unit != without]
        host.host.send(
            build(Hosts, make_conf(), self.uow, self.wake, lambda: None), *gpus, host.source
        )


class Fault:
    """A GPU has a fault, and recovers."""

    kind = SetKind.PCIE

    def __init__(self, group: Group) -> None:
        self.group = group

    def lose(self) -> None:
        self.group.whole.gpus["01"] = make_gpu("01", **SICK)
        self.group.report()

    def regain(self) -> None:
        self.group.whole.gpus["01"] = make_gpu("01")
        self.group.report()


class Fabric(Fault):
    """Fabric Manager is away, and returns."""

    def lose(self) -> None:
        host = self.group.whole
        self.source, host.source = host.source, replace(host.source, **SICK)
        self.group.report()

    def regain(self) -> None:
        self.group.whole.source = self.source
        self.group.report()


class Discovery(Fault):
    """A GPU is not on the bus, and is found again."""

    def lose(self) -> None:
        self.group.report(without="01")

    def regain(self) -> None:
        self.group.report()


class Status(Fault):
    """An administrator disables a device, and enables it."""

    def set(self, status: str) -> None:
        devices = build(Devices, self.group.uow, self.group.wake)
        devices.set_status(self.group.device(gpu_address("01"))["uuid"], status)

    def lose(self) -> None:
        self.set("maintaining")

    def regain(self) -> None:
        self.set("enabled")


class Window(Fault):
    """A maintenance window of the source ends by itself."""

    def windows(self) -> MaintenanceWindows:
        notices = NotificationBuilder(make_conf(), now=self.group.uow.clock)
        return MaintenanceWindows(make_conf(), self.group.uow, notices, self.group.wake)

    def lose(self) -> None:
        self.uuid = self.group.device(SOURCE)["uuid"]
        until = (self.group.uow.clock() + timedelta(hours=1)).isoformat()
        self.windows().begin({"uuid": self.uuid, "until": until})

    def regain(self) -> None:
        engine = self.group.engine
        (row,) = rows.read(engine, schema.device_maintenances)
        past = self.group.uow.clock() - timedelta(seconds=1)
        rows.update(engine, schema.device_maintenances, row["id"], until=past)
        assert self.windows().sweep() == 1


class Failing(Fault):
    """Prepare jobs of a device fail; it is tried again after a time."""

    def lose(self) -> None:
        id_, engine = self.group.device(gpu_address("01"))["id"], self.group.engine
        past = timeutils.utcnow() - timedelta(seconds=1)
        rows.update(engine, schema.devices, id_, failing=True, retry_at=past)
        with engine.begin() as tx:
            mark_stale_of_hosts(tx, [self.group.whole.node.name], timeutils.utcnow())

    def regain(self) -> None:
        now = self.group.uow.clock()
        assert self.group.uow.run(lambda tx: completion.open_devices(tx, now))
        self.group.wake()  # by the number of providers


class Host(Fault):
    """The agent of the host is down, and returns."""

    def lose(self) -> None:
        engine, name = self.group.engine, self.group.whole.node.name
        (agent,) = rows.read(engine, schema.services, host=name)
        rows.update(engine, schema.services, agent["id"], down_since=timeutils.utcnow())
        with engine.begin() as tx:
            mark_stale_of_hosts(tx, [name], timeutils.utcnow())

    def regain(self) -> None:
        self.group.report()


class Release(Fault):
    """A server is deleted, whose devices need no work."""

    def lose(self) -> None:
        host = self.group.whole
        host.arqs.binder = replace(host.arqs.binder, wake_publisher=self.group.wake)
        host.arqs._wake_publisher = self.group.wake
        consumer = host.node.allocate(host.provider(WHOLE), GPU, ALL)
        self.instance = host.bind(WHOLE, instance=consumer)

    def regain(self) -> None:
        host = self.group.whole
        host.delete(self.instance)
        host.node.deallocate(self.instance)


class Cleaning(Release):
    """The host has cleaned the devices of a deleted server, of a set that was withdrawn."""

    kind = SetKind.FABRIC

    def lose(self) -> None:
        super().lose()
        super().regain()

    def regain(self) -> None:
        (job,) = self.group.whole.jobs("release")
        found: list[completion.JobResult] = []
        jobs: Any = build(JobDispatcher, make_conf(), self.group.uow, None, found.append)
        jobs.complete(job["uuid"], job["host"], "done", None)
        assert found[0].providers
        self.group.wake()


class FailedBind(Release):
    """The devices of a server cannot be prepared; Nova deletes its allocation."""

    kind = SetKind.FABRIC

    def regain(self) -> None:
        found: list[completion.JobResult] = []
        jobs: Any = build(JobDispatcher, make_conf(), self.group.uow, None, found.append)
        (job,) = self.group.whole.jobs("prepare")
        jobs.complete(job["uuid"], job["host"], "failed", "broken")
        assert found[0].providers
        self.group.wake()
        self.group.publish()
        (job,) = self.group.whole.jobs("release")
        jobs.complete(job["uuid"], job["host"], "done", None)
        self.group.whole.node.deallocate(self.instance)


EVENTS = [
    *(Fault, Fabric, Discovery, Status, Window, Failing, Host),
    *(Release, Cleaning, FailedBind),
]


@pytest.mark.parametrize(
    "event",
    # A report brings the others back as it does a fault, a window as a status.
    sample(EVENTS, Fault, Status, Failing, Release, Cleaning, FailedBind),
    ids=lambda event: event.__name__.lower(),
)
def test_group_offers_its_sets_again_after(
    sqlite_engine: sa.Engine, node: Node, placement_adapter: Any, event: Callable[[Group], Any]
) -> None:
    kind: SetKind = event.kind  # type: ignore[attr-defined]
    group = Group(sqlite_engine, (node, Node(placement_adapter)), kind)
    change = event(group)
    change.lose()
    group.publish()
    if event is not Cleaning:  # an offered set stays offered while it is cleaned
        assert ALL not in group.sizes()
    group.wakes = 0
    change.regain()
    assert group.wakes, "the publisher does not wait for its interval"
    group.publish()
    assert group.sizes() == SIZES


def test_two_free_hosts_offer_all_sizes_at_once(
    sqlite_engine: sa.Engine, node: Node, placement_adapter: Any
) -> None:
    """Both had a server of all GPUs: no smaller set was offered, and none was allocated."""
    group = Group(sqlite_engine, (node, Node(placement_adapter)), SetKind.PCIE)
    first = group.whole.bind(WHOLE)
    group.publish()
    (other,) = (host for host in group.hosts if host is not group.whole)
    other.source = replace(
        other.source,
        deployables=tuple(
            replace(d, device_set=replace(d.device_set, wanted={"4": 2}))
            for d in other.source.deployables
            if d.device_set is not None
        ),
    )
    other.report()
    assert group.sizes() == [ALL]
    second = other.bind(WHOLE)
    other.source = replace(other.source, deployables=group.whole.source.deployables)
    other.report()
    assert group.sizes() == []
    group.whole.delete(first)
    group.publish()
    assert group.sizes() == [ALL], "the only one: it is kept for a while"
    other.delete(second)
    group.publish()
    assert group.sizes() == SIZES


def test_allocation_that_nova_deletes_without_a_bind_ends_the_withdrawal(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    host = make_set_host(sqlite_engine, node, H100_FOUR, wanted={"4": 1}, kind=SetKind.PCIE)
    consumer = node.allocate(host.provider(WHOLE), GPU, ALL)
    host.gpus["01"] = make_gpu("01", **SICK)
    host.report()
    provider = host.provider(WHOLE)
    # Servers wait for minutes, which must not delay the sets of the other devices for a minute.
    for _ in range(12):
        (row,) = rows.read(sqlite_engine, schema.providers, uuid=provider)
        assert row["error"] == f"reserved, and still allocated to {consumer}"
        delay = row["next_try_at"] - timeutils.utcnow()
        assert delay <= timedelta(seconds=publishing.WITHDRAWAL_INTERVAL)
        rows.update(sqlite_engine, schema.providers, row["id"], next_try_at=None)
        host.publish()
    (row,) = rows.read(sqlite_engine, schema.providers, uuid=provider)
    rows.update(
        sqlite_engine,
        schema.providers,
        row["id"],
        next_try_at=None,
        attempts=publishing.MAX_WITHDRAWAL_CHECKS,
    )
    host.publish()
    (row,) = rows.read(sqlite_engine, schema.providers, uuid=provider)
    assert row["next_try_at"] - timeutils.utcnow() > timedelta(seconds=30), "it may never end"
    node.deallocate(consumer)
    rows.update(sqlite_engine, schema.providers, row["id"], next_try_at=None)
    host.publish()
    assert sorted(host.offered().values()) == [1, 2]


def test_withdrawals_that_are_checked_again_do_not_delay_other_providers(
    sqlite_engine: sa.Engine, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the longest stale, and as many as a batch has."""
    host = make_set_host(sqlite_engine, node, H100_FOUR, wanted={"4": 1}, kind=SetKind.PCIE)
    node.allocate(host.provider(WHOLE), GPU, ALL)
    host.gpus["01"] = make_gpu("01", **SICK)
    host.report()
    for name, value in {"BATCH": 1, "WITHDRAWAL_INTERVAL": 0.0, "MAX_RUN": 2.0}.items():
        monkeypatch.setattr(publishing, name, value)
    now = timeutils.utcnow()
    (withdrawn,) = rows.read(sqlite_engine, schema.providers, uuid=host.provider(WHOLE))
    rows.update(sqlite_engine, schema.providers, withdrawn["id"], next_try_at=None)
    (other,) = rows.read(sqlite_engine, schema.providers, uuid=host.provider("3"))
    rows.update(sqlite_engine, schema.providers, other["id"], stale_since=now)
    host.publish()
    stale = rows.read(sqlite_engine, schema.providers)
    assert [row["id"] for row in stale if row["stale_since"]] == [withdrawn["id"]]


def test_offer_of_a_whole_host_is_back_within_seconds_after_a_fault(
    sqlite_engine: sa.Engine, node: Node, placement_adapter: Any
) -> None:
    """The publisher runs only when it is woken, and for what it has due."""
    group = Group(sqlite_engine, (node, Node(placement_adapter)), SetKind.PCIE)
    task = PeriodicTask("publisher", 600.0, group.publish)
    group.wake = task.wake  # type: ignore[method-assign]
    task.start()
    try:
        fault = Fault(group)
        fault.lose()
        wait_until("the set is withdrawn", lambda: ALL not in group.sizes(), 60)
        fault.regain()
        wait_until("the set is offered again", lambda: ALL in group.sizes(), 60)
    finally:
        task.stop()
        task.join(20.0)
