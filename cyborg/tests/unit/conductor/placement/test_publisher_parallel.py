# SPDX-License-Identifier: Apache-2.0
"""Several hosts are published at the same time, each provider by one call at a time."""

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.clients.placement import Placement, ProviderSummary
from cyborg.conductor.placement.publisher import PROBE_NAME, Publisher
from cyborg.core.errors import Unavailable
from cyborg.core.hosts import Identity
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import report_devices
from cyborg.tests.fixtures.hosts.hosts import Host, card
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["placement_adapter"]

CALLS = 4
TIMEOUT = 30.0


class ConcurrentPlacement(Placement):
    """Placement that records how many calls create providers at a time.

    A call waits until CALLS calls have arrived, if there is a ``barrier``.
    """

    def __init__(self, adapter: Any, barrier: threading.Barrier | None = None) -> None:
        super().__init__(adapter)
        self.barrier = barrier
        self.names: list[str] = []
        self.parents: list[str | None] = []
        self.most = 0
        self.same_host = 0

    def create(self, uuid: str, name: str, parent_uuid: str | None) -> int:
        self.names.append(name)
        self.parents.append(parent_uuid)
        self.most = max(self.most, len(self.parents))
        self.same_host = max(self.same_host, self.parents.count(parent_uuid))
        if self.barrier is not None:
            self.barrier.wait(TIMEOUT)
        generation = super().create(uuid, name, parent_uuid)
        self.parents.remove(parent_uuid)
        return generation


def make_publisher(engine: sa.Engine, placement: Placement, calls: int = CALLS) -> Publisher:
    conf = make_conf(conductor={"max_placement_calls": calls})
    return Publisher(conf, UnitOfWork(engine), placement)


def add_hosts(engine: sa.Engine, adapter: Any, hosts: int, cards: int) -> list[Node]:
    nodes = [Node(adapter) for _ in range(hosts)]
    for node in nodes:
        report_devices(engine, node, *(card(n, 1) for n in range(cards)))
    return nodes


def test_hosts_are_published_at_the_same_time(
    sqlite_engine: sa.Engine, placement_adapter: Any
) -> None:
    nodes = add_hosts(sqlite_engine, placement_adapter, 2 * CALLS, 2)
    placement = ConcurrentPlacement(placement_adapter, threading.Barrier(CALLS))
    assert make_publisher(sqlite_engine, placement).run_once() == 4 * CALLS
    assert (placement.most, placement.same_host) == (CALLS, 1)
    assert [len(node.children()) for node in nodes] == [2] * len(nodes)
    assert all(row["stale_since"] is None for row in rows.read(sqlite_engine, schema.providers))


def test_one_call_at_a_time_if_configured(sqlite_engine: sa.Engine, placement_adapter: Any) -> None:
    add_hosts(sqlite_engine, placement_adapter, 3, 1)
    placement = ConcurrentPlacement(placement_adapter)
    assert make_publisher(sqlite_engine, placement, 1).run_once() == 3
    assert placement.most == 1


def test_two_conductors_create_each_provider_once(
    engine: sa.Engine, placement_adapter: Any
) -> None:
    nodes = add_hosts(engine, placement_adapter, 6, 2)
    clients = [ConcurrentPlacement(placement_adapter) for _ in range(2)]
    publishers = [make_publisher(engine, client) for client in clients]
    threads = [threading.Thread(target=publisher.run_once) for publisher in publishers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [name for client in clients for name in client.names]
    assert sorted(names) == sorted(name for node in nodes for name in node.children())


class LostPlacement(Placement):
    """Placement that gives no answer; it records its queries by name."""

    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter)
        self.found: list[str] = []

    def find(self, name: str) -> ProviderSummary | None:
        self.found.append(name)
        raise Unavailable("Placement is away")


def test_placement_that_is_down_is_checked_once(
    sqlite_engine: sa.Engine, placement_adapter: Any
) -> None:
    add_hosts(sqlite_engine, placement_adapter, 3 * CALLS, 1)
    placement = LostPlacement(placement_adapter)
    assert make_publisher(sqlite_engine, placement).run_once() == 0
    assert placement.found.count(PROBE_NAME) == 1
    assert len(placement.found) <= CALLS + 1, "no host is tried after the check"
    for row in rows.read(sqlite_engine, schema.providers):
        assert (row["error"], row["owner"], row["attempts"]) == ("Placement is away", None, 0)


class CountingPlacement(Placement):
    """Placement that counts the lists of all root providers."""

    lists = 0

    def root_providers(self) -> list[ProviderSummary]:
        self.lists += 1
        return super().root_providers()


def test_hosts_that_need_the_list_of_nodes_share_one(
    sqlite_engine: sa.Engine, placement_adapter: Any
) -> None:
    """The names of these hosts are not those of their compute nodes."""
    for number in range(2 * CALLS):
        node = Node(placement_adapter, created=False)
        host = Host(f"host-{number}-{node.name}")
        node.name = f"{host.name}.example.org"
        node.create()
        host.identity = Identity(names=(node.name,))
        report_devices(sqlite_engine, node, card(0), host=host)
    placement = CountingPlacement(placement_adapter)
    assert make_publisher(sqlite_engine, placement).run_once() == 2 * CALLS
    assert placement.lists == 1


@pytest.mark.parametrize("calls", [1, CALLS])
def test_stopped_publisher_writes_nothing(
    sqlite_engine: sa.Engine, placement_adapter: Any, calls: int
) -> None:
    add_hosts(sqlite_engine, placement_adapter, 2, 1)
    placement = ConcurrentPlacement(placement_adapter)
    publisher = make_publisher(sqlite_engine, placement, calls)
    publisher.stop()
    assert publisher.run_once() == 0
    assert placement.names == []
