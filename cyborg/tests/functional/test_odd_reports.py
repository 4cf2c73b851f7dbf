# SPDX-License-Identifier: Apache-2.0
"""Reports that no sound agent sends, over a real bus to a real database, one by one.

Each is refused or taken with a clear message, and nothing else is disturbed.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.endpoint import Conductor
from cyborg.core.device import Device
from cyborg.core.errors import Conflict, CyborgError, Invalid, Stale
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.broker import MEMORY, open_bus
from cyborg.fixtures.databases import engine_of, fresh_database
from cyborg.fixtures.hosts import Host, card
from cyborg.rpc.conductor import ConductorClient

LIMIT = 16777216
"""``[conductor] max_report_bytes`` unless told otherwise."""


@dataclass
class Served:
    """A conductor on a bus."""

    client: ConductorClient
    engine: sa.Engine

    def host(self, *devices: Device) -> Host:
        """Return a host that nobody else has, which has reported these."""
        host = Host(f"compute-{uuid4().hex[:8]}")
        self.tell(host, *devices)
        return host

    def tell(self, host: Host, *devices: Device) -> None:
        """Say hello over the bus, and report."""
        # The client has the same methods as the conductor's room.
        host.tell(cast(Any, self._Room(self.client)), *devices)

    def hello(self, host: Host) -> dict[str, Any]:
        """Say hello over the bus."""
        return host.hello(cast(Any, self._Room(self.client)))

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return all that reports write, but when agents were seen and what they counted."""
        found = {
            table.name: rows.read(self.engine, table)
            for table in (
                *(schema.devices, schema.deployables, schema.attach_handles),
                *(schema.providers, schema.backends, schema.departed, schema.outbox),
            )
        }
        found["services"] = [
            {key: row[key] for key in ("host", "epoch", "digest", "generation")}
            for row in rows.read(self.engine, schema.services)
        ]
        return found

    class _Room:
        def __init__(self, client: ConductorClient) -> None:
            self.hello, self.report = client.hello, client.report


@pytest.fixture(
    scope="module",
    params=[
        "sqlite",
        pytest.param("mysql", marks=pytest.mark.services),
        pytest.param("postgresql", marks=pytest.mark.services),
    ],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A conductor on the bus inside the process and SQLite, then on RabbitMQ and real servers."""
    kind = request.param
    url = MEMORY if kind == "sqlite" else request.getfixturevalue("rabbit_url")
    with (
        fresh_database(kind, Path(tmp_path_factory.mktemp("odd"))) as database,
        engine_of(database) as engine,
        open_bus(url, rpc={"timeout": 60.0}) as bus,
    ):
        schema.metadata.create_all(engine)
        nobody = cast(Any, None)
        conductor = Conductor(bus.conf, UnitOfWork(engine), nobody, nobody, nobody)
        with bus.serving("conductor", conductor):
            yield Served(bus.conductor(), engine)


def padded(bytes_: int) -> list[Device]:
    """Return devices whose report takes at least so many bytes."""
    info = {f"key-{n:03}": "x" * 900 for n in range(256)}
    size = len(json.dumps(info))
    return [card(n, 1, vendor_board_info=info) for n in range(bytes_ // size + 1)]


def refused(served: Served, message: dict[str, Any]) -> CyborgError:
    """Send a report that is refused; see that it changed nothing, and return why it was."""
    before = served.tables()
    with pytest.raises(CyborgError) as raised:
        served.client.report(message)
    assert served.tables() == before
    return raised.value


def test_two_reports_at_once_leave_one_truth(served: Served) -> None:
    bystander = served.host(card(0))
    host = Host(f"compute-{uuid4().hex[:8]}", devices=[card(n, 4) for n in range(8)])
    served.hello(host)
    messages = []
    for _ in range(2):
        host.generation += 1
        messages.append(host.message())
    gate = threading.Barrier(2)
    came: list[object] = []

    def send(message: dict[str, Any]) -> None:
        gate.wait()
        try:
            came.append(served.client.report(message))
        except CyborgError as bad:
            came.append(bad)

    threads = [threading.Thread(target=send, args=(message,)) for message in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {"accepted": True} in came
    assert {type(each) for each in came} <= {dict, Stale}
    assert len(rows.read(served.engine, schema.devices, host=host.name)) == 8
    assert served.hello(host)["report"] is False
    assert served.hello(bystander)["report"] is False


def test_a_report_of_an_old_epoch_is_refused(served: Served) -> None:
    host = served.host(card(0))
    old = replace(host, devices=[], generation=host.generation + 1)
    host.epoch, host.generation = str(uuid4()), 0
    served.hello(host)
    bad = refused(served, old.message())
    assert isinstance(bad, Stale)
    assert host.name in bad.message
    assert "say hello first" in bad.message


def test_a_host_cannot_report_in_the_name_of_another(served: Served) -> None:
    victim, forger = served.host(card(0)), served.host(card(0))
    forged = replace(forger, name=victim.name, devices=[], generation=99)
    bad = refused(served, forged.message())
    assert isinstance(bad, Stale)
    assert served.hello(victim)["report"] is False


def test_a_host_cannot_take_the_provider_of_another(served: Served) -> None:
    part = card().deployables[0]
    owner = served.host(card(0, deployables=(replace(part, address="b_c"),)))
    thief = Host(f"{owner.name}_b", devices=[card(deployables=(replace(part, address="c"),))])
    served.hello(thief)
    thief.generation = 1
    bad = refused(served, thief.message())
    assert isinstance(bad, Conflict)
    assert thief.name in bad.message
    assert "another host" in bad.message


def test_a_report_of_10_megabytes_is_taken(served: Served) -> None:
    bystander = served.host(card(0))
    host = Host(f"compute-{uuid4().hex[:8]}", devices=padded(10_000_000))
    assert 10_000_000 < len(json.dumps(host.message())) < LIMIT
    served.tell(host, *host.devices)
    assert len(rows.read(served.engine, schema.devices, host=host.name)) == len(host.devices)
    assert served.hello(host)["report"] is False
    assert served.hello(bystander)["report"] is False


def test_a_report_over_the_limit_is_refused_by_name_of_the_limit(served: Served) -> None:
    host = served.host(card(0))
    host.devices, host.generation = padded(LIMIT), host.generation + 1
    bad = refused(served, host.message())
    assert isinstance(bad, Invalid)
    assert f"limit of {LIMIT}" in bad.message


def test_a_report_of_4096_handles_is_one_transaction(served: Served) -> None:
    begun: list[None] = []
    host = Host(f"compute-{uuid4().hex[:8]}", devices=[card(n, 16) for n in range(256)])
    served.hello(host)
    host.generation = 1

    def begin(_: Any) -> None:
        begun.append(None)

    sa.event.listen(served.engine, "begin", begin)
    try:
        assert served.client.report(host.message()) == {"accepted": True}
    finally:
        sa.event.remove(served.engine, "begin", begin)
    assert len(begun) == 1
    mine = {row["id"] for row in rows.read(served.engine, schema.devices, host=host.name)}
    parts = {
        r["id"] for r in rows.read(served.engine, schema.deployables) if r["device_id"] in mine
    }
    handles = rows.read(served.engine, schema.attach_handles)
    assert sum(row["deployable_id"] in parts for row in handles) == 4096
    assert served.hello(host)["report"] is False


def test_a_duplicated_address_is_refused(served: Served) -> None:
    host = served.host(card(0))
    for odd, said in (
        ((card(1), card(1)), "the device 0000:01:00.0 twice"),
        ((card(1), card(2, deployables=card(1).deployables)), "deployable 0000:01:00.0 twice"),
    ):
        body = replace(host, generation=host.generation + 1).message()
        dumped = [replace(host, devices=[device]).message()["devices"][0] for device in odd]
        bad = refused(served, {**body, "devices": dumped})
        assert isinstance(bad, Invalid)
        assert said in bad.message
        assert host.name in bad.message
    (device,) = replace(host, devices=[card(1, 1)]).message()["devices"]
    device["deployables"][0]["handles"] *= 2
    body = replace(host, generation=host.generation + 1).message()
    bad = refused(served, {**body, "devices": [device]})
    assert isinstance(bad, Invalid)
    assert "the handle address 0000 twice" in bad.message


@pytest.mark.parametrize("odd", [{}, {"format": 99}, {"devices": 5}, {"generation": -1}], ids=str)
def test_what_is_no_report_is_refused(served: Served, odd: dict[str, Any]) -> None:
    host = served.host(card(0))
    body = {**replace(host, generation=host.generation + 1).message(), **odd} if odd else {}
    assert isinstance(refused(served, body), Invalid)
