# SPDX-License-Identifier: Apache-2.0
"""Sources of device sets that are turned on or off while a server is being built.

The server was allocated devices in Placement, and its bind comes after the report, or at the same
time: then it fails with the reason. No server gets a device that Placement gave to another one.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.core.errors import NoHandle, NotFound
from cyborg.db import schema
from cyborg.db.binding import claims
from cyborg.db.device_sets import write as device_sets
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import node, placement_adapter
from cyborg.tests.fixtures.device_sets.host import GPU, SetHost, gpu_address
from cyborg.tests.fixtures.hosts.hosts import make_hosts
from cyborg.tests.unit.conductor.device_sets.test_changes import (
    bind_gpu,
    gpu_provider,
    host,
    turn_off,
)

__all__ = ["host", "node", "placement_adapter"]

servers = pytest.mark.parametrize("database_kind", ["mysql", "postgresql"], indirect=True)
# Seconds after which a statement that has not returned waits for a lock.
BLOCKED = 1.0


def bind_allocated_gpu(host: SetHost, unit: str, instance: str) -> None:
    """Bind a GPU that Placement has allocated alone."""
    (arq,) = host.create_arqs(1)
    target = {"hostname": host.node.name, "device_rp_uuid": gpu_provider(host, unit)}
    host.arqs.bind([{"request": arq, "instance_uuid": instance, **target}], None)


def test_server_with_a_single_gpu_fails_with_the_reason_if_sets_appear(host: SetHost) -> None:
    turn_off(host)
    consumer = host.node.allocate(gpu_provider(host, "01"), GPU)
    host.report()
    # Another server is faster: it gets the whole board.
    other = host.bind("1")
    with pytest.raises(NoHandle, match="device is allocated in device sets only") as caught:
        bind_allocated_gpu(host, "01", consumer)
    ((reason, *_),) = caught.value.details["reasons"].values()
    assert reason["code"] == "in_device_sets"
    assert set(host.owners().values()) == {other}
    # Without the other one, too: its sets are offered.
    host.delete(other)
    with pytest.raises(NoHandle, match="device is allocated in device sets only"):
        bind_allocated_gpu(host, "01", consumer)
    assert host.owners() == {}


def test_server_with_a_set_fails_with_the_reason_if_sets_disappear(host: SetHost) -> None:
    provider = host.provider("1")
    consumer = host.node.allocate(provider, GPU, 4)
    uuids = host.create_arqs(4)
    turn_off(host)
    other = bind_gpu(host, "01")
    target = {"hostname": host.node.name, "device_rp_uuid": provider, "instance_uuid": consumer}
    with pytest.raises(NotFound, match="was removed with its device or device set"):
        host.arqs.bind([{"request": uuid, **target} for uuid in uuids], None)
    assert host.owners() == {"01": other}


def free_handles(host: SetHost, units: list[str]) -> list[int]:
    addresses = {gpu_address(unit) for unit in units}
    found = rows.read(host.engine, schema.attach_handles)
    return [row["id"] for row in found if row["address"] in addresses]


@pytest.mark.parametrize("units", [["01"], ["01", "02"]])
def test_claim_of_a_handle_that_has_become_a_member_is_refused(
    host: SetHost, units: list[str]
) -> None:
    turn_off(host)
    host.create_arqs(len(units))
    arqs = [row["id"] for row in rows.read(host.engine, schema.arqs)]
    owners = dict(zip(free_handles(host, units), arqs, strict=True))
    host.report()
    with host.engine.begin() as tx:
        assert claims.claim(tx, owners) == 0
    turn_off(host)
    with host.engine.begin() as tx:
        assert claims.claim(tx, owners) == len(units)


def test_claim_of_a_former_member_of_a_set_is_refused(host: SetHost) -> None:
    host.create_arqs(2)
    arqs = [row["id"] for row in rows.read(host.engine, schema.arqs)]
    owners = dict(zip(free_handles(host, ["01", "02"]), arqs, strict=True))  # set 3 has 1 and 3
    (row,) = rows.read(host.engine, schema.deployables, address="hgx:3")
    with host.engine.begin() as tx:
        claimed = device_sets.claim(tx, row["id"], owners, needs_cleaning=(), is_honoured=False)
    assert claimed == 1


@contextlib.contextmanager
def blocked(call: Callable[[], object]) -> Iterator[Future[object]]:
    """Run a call in a thread that must wait for a lock until the end of the block."""
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(call)
        with pytest.raises(TimeoutError):
            future.exception(BLOCKED)
        yield future


@servers
def test_set_that_is_claimed_during_the_report_without_it_stays(host: SetHost) -> None:
    host.create_arqs(2)
    arqs = [row["id"] for row in rows.read(host.engine, schema.arqs)]
    owners = dict(zip(free_handles(host, ["01", "03"]), arqs, strict=True))
    (row,) = rows.read(host.engine, schema.deployables, address="hgx:3")
    connection = host.engine.connect()
    assert (
        device_sets.claim(connection, row["id"], owners, needs_cleaning=(), is_honoured=False) == 2
    )
    with blocked(lambda: host.host.send(make_hosts(host.engine), *host.gpus.values())) as report:
        connection.commit()
        connection.close()
        assert report.exception(30) is None
    (row,) = rows.read(host.engine, schema.deployables, address="hgx:3")
    assert row["draining"]
    assert rows.read(host.engine, schema.deployables, address="hgx:1") == []
    assert set(host.owners()) == {"01", "03"}


@servers
def test_set_that_is_removed_during_a_claim_refuses_it(host: SetHost) -> None:
    (row,) = rows.read(host.engine, schema.deployables, address="hgx:3")
    uuids, instance, provider = host.create_arqs(2), str(uuid4()), host.provider("3")
    target = {"hostname": host.node.name, "device_rp_uuid": provider, "instance_uuid": instance}
    requests = [{"request": uuid, **target} for uuid in uuids]
    connection = host.engine.connect()
    connection.execute(sa.delete(schema.deployables).where(schema.deployables.c.id == row["id"]))
    with blocked(lambda: host.arqs.bind(requests, None)) as bind:
        connection.commit()
        connection.close()
        error = bind.exception(30)
    assert isinstance(error, NotFound)
    assert "was removed" in error.message
    assert host.owners() == {}
