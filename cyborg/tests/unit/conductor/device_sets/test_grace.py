# SPDX-License-Identifier: Apache-2.0
"""Device sets that Placement allocated, or a lease has, before one of their devices is closed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.binder import InstanceAllocations
from cyborg.conductor.inventory.devices import Devices
from cyborg.core.errors import NoHandle
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_set import SetKind
from cyborg.db import schema
from cyborg.db.binding import claims
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.device_sets.host import SetHost, gpu_address
from cyborg.tests.fixtures.device_sets.saved import make_set_host
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["node", "placement_adapter"]


class Allocations:
    """The allocations of all instances in Placement."""

    def __init__(self, units: dict[str, int]) -> None:
        self.units = units

    def find_allocations(self, instance: str) -> InstanceAllocations:
        return InstanceAllocations("project-1", self.units)


@pytest.fixture
def host(engine: sa.Engine, node: Node) -> SetHost:
    return make_set_host(engine, node, kind=SetKind.PCIE)


def close(host: SetHost, address: str, **values: Any) -> None:
    """Set a device into maintenance."""
    (device,) = rows.read(host.engine, schema.devices, address=address)
    devices = build(Devices, UnitOfWork(host.engine), lambda: None)
    devices.set_status(device["uuid"], "maintaining")
    rows.update(host.engine, schema.devices, device["id"], **values)


def allocate(host: SetHost, **units: int) -> None:
    allocations = {host.provider(name.removeprefix("set_")): n for name, n in units.items()}
    host.arqs = Arqs(make_conf(), UnitOfWork(host.engine), owners=Allocations(allocations))


@pytest.mark.parametrize("address", ["hgx", gpu_address("03")])
def test_server_in_build_gets_its_set_after_a_cordon(host: SetHost, address: str) -> None:
    close(host, address)
    allocate(host)
    with pytest.raises(NoHandle, match="device is under maintenance"):
        host.bind("3")
    assert host.owners() == {}
    allocate(host, set_3=2)
    instance = host.bind("3")
    assert host.owners() == dict.fromkeys(host.family["3"], instance)


def test_cordon_of_another_device_without_grace_refuses_the_set(host: SetHost) -> None:
    close(host, "hgx")
    # Its backend was removed.
    close(host, gpu_address("03"), cordoned_since=None)
    allocate(host, set_3=2)
    with pytest.raises(NoHandle, match="device is under maintenance"):
        host.bind("3")


def keep(host: SetHost) -> None:
    """Leave the source as it is."""


def remove_sets(host: SetHost) -> None:
    """Report the source without the set that is bound."""
    host.source = replace(host.source, deployables=host.source.deployables[:3])
    host.report()


def close_source(host: SetHost) -> None:
    close(host, "hgx")


def close_member(host: SetHost) -> None:
    close(host, gpu_address("03"))


def report_unhealthy(host: SetHost) -> None:
    host.source = replace(host.source, health=Health.UNHEALTHY, health_reason="Fabric Manager")
    host.report()


@pytest.mark.parametrize(
    ("change", "number"),
    [(keep, 2), (remove_sets, 0), (close_source, 0), (close_member, 1), (report_unhealthy, 0)],
)
def test_set_of_a_lease_is_locked_only_while_its_source_can_be_used(
    host: SetHost, change: Callable[[SetHost], None], number: int
) -> None:
    host.bind("3")
    host.publish()
    change(host)
    ids = [row["id"] for row in rows.read(host.engine, schema.arqs)]
    with host.engine.begin() as tx:
        assert claims.lock_schedulable(tx, ids) == number
